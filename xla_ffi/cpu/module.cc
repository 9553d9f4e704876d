// jax_ep._native._cpu: the CPU backend's FFI handlers, and its open groups.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "csrc/cpu/group.h"
#include "xla_ffi/cpu/handlers.h"
#include "xla_ffi/cpu/meet.h"

namespace nb = nanobind;

namespace jax_ep::ffi_cpu {

ffi::TypeId Instance::id = {};

namespace {

const ffi::TypeInfo kInstanceInfo = ffi::MakeTypeInfo<Instance>();

ffi::ErrorOr<std::unique_ptr<Instance>> Instantiate() { return std::make_unique<Instance>(); }

template <typename T>
nb::capsule Capsule(T* pointer) {
  return nb::capsule(reinterpret_cast<void*>(pointer));
}

nb::dict Target(XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*)) {
  nb::dict stages;
  stages["instantiate"] = Capsule(JaxEpCpuInstantiate);
  stages["execute"] = Capsule(execute);
  return stages;
}

}  // namespace
}  // namespace jax_ep::ffi_cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpCpuInstantiate, &jax_ep::ffi_cpu::Instantiate,
                              xla::ffi::Ffi::BindInstantiate());

NB_MODULE(_cpu, module) {
  using namespace jax_ep;  // NOLINT
  module.def("types", [] {
    nb::dict type;
    type["type_id"] = ffi_cpu::Capsule(&ffi_cpu::Instance::id);
    type["type_info"] = ffi_cpu::Capsule(const_cast<ffi_cpu::ffi::TypeInfo*>(&ffi_cpu::kInstanceInfo));
    nb::dict types;
    types["jax_ep_cpu_instance"] = type;
    return types;
  }, "FFI types by name; register them before the targets.");
  module.def("targets", [] {
    nb::dict targets;
    targets["jax_ep_cpu_prepare"] = ffi_cpu::Target(JaxEpCpuPrepare);
    targets["jax_ep_cpu_dispatch"] = ffi_cpu::Target(JaxEpCpuDispatch);
    targets["jax_ep_cpu_combine"] = ffi_cpu::Target(JaxEpCpuCombine);
    return targets;
  }, "FFI targets by name.");
  module.def("open_group",
             [](int64_t id, std::string axis, int32_t num_ranks, int32_t num_experts,
                int32_t num_topk, int32_t max_tokens_per_rank, double timeout_s) {
               cpu::OpenGroup({id, std::move(axis), num_ranks, num_experts, num_topk,
                               max_tokens_per_rank, timeout_s});
             },
             nb::kw_only(), nb::arg("id"), nb::arg("axis"), nb::arg("num_ranks"),
             nb::arg("num_experts"), nb::arg("num_topk"), nb::arg("max_tokens_per_rank"),
             nb::arg("timeout_s"));
  module.def("close_group", &cpu::CloseGroup, nb::arg("id"));
}
