// jax_ep._native._cuda: the CUDA backend's FFI handlers, its open groups, and what it runs on.
// Importing it calls nothing of CUDA, so that it imports where there is no driver.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "csrc/comm/reach.h"
#include "csrc/comm/symmetric_memory.h"
#include "csrc/cuda/device_info.h"
#include "csrc/cuda/group.h"
#include "xla_ffi/cuda/handlers.h"

namespace nb = nanobind;

namespace jax_ep::ffi_cuda {
namespace {

nb::dict Target(XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*)) {
  nb::dict stages;
  stages["execute"] = nb::capsule(reinterpret_cast<void*>(execute));
  return stages;
}

void RaiseUnlessOk(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

int64_t WorkspaceBytes(int32_t num_ranks, int32_t num_experts, int32_t num_topk,
                       int32_t max_tokens_per_rank, int64_t max_row_bytes, bool low_latency) {
  const cuda::WorkspaceLayout layout{num_ranks, num_experts, num_topk, max_tokens_per_rank,
                                     max_row_bytes, low_latency};
  constexpr int64_t kGranularity = comm::SymmetricMemory::kGranularity;
  return (layout.total_bytes() + kGranularity - 1) / kGranularity * kGranularity;
}

comm::MemoryKind MemoryKindOf(const std::string& name) {
  if (name == "ipc") return comm::MemoryKind::kIpc;
  if (name == "fabric") return comm::MemoryKind::kFabric;
  throw nb::value_error(("there is no memory \"" + name + "\"").c_str());
}

nb::bytes Open(int64_t id, int device, std::string axis, int32_t subgroup, int32_t rank,
               int32_t num_ranks, int32_t num_experts, int32_t num_topk,
               int32_t max_tokens_per_rank, int64_t max_row_bytes, bool low_latency,
               double timeout_s, const std::string& memory) {
  const comm::MemoryKind kind = MemoryKindOf(memory);
  std::string handle;
  {
    nb::gil_scoped_release release;
    RaiseUnlessOk(cuda::OpenGroup(
        {id, std::move(axis), subgroup, rank,
         {num_ranks, num_experts, num_topk, max_tokens_per_rank, max_row_bytes, low_latency},
         timeout_s, kind},
        device, &handle));
  }
  return nb::bytes(handle.data(), handle.size());
}

std::string Connect(int64_t id, int device, const std::vector<nb::bytes>& handles,
                    int32_t num_sms, int32_t low_latency_sms, int32_t ranks_per_device) {
  std::vector<std::string> texts;
  for (const nb::bytes& handle : handles) texts.emplace_back(handle.c_str(), handle.size());
  std::string transport;
  nb::gil_scoped_release release;
  RaiseUnlessOk(cuda::ConnectGroup(id, device, texts,
                                   {num_sms, low_latency_sms, ranks_per_device}, &transport));
  return transport;
}

nb::object Check(int64_t id) {
  const Status status = cuda::CheckGroup(id);
  if (status.ok()) return nb::none();
  return nb::str(status.message().c_str());
}

nb::object NoneIfEmpty(const std::string& text) {
  return text.empty() ? nb::none() : nb::object(nb::str(text.c_str()));
}

nb::dict ToDict(const cuda::DeviceInfo& device) {
  nb::dict dict;
  dict["name"] = device.name;
  dict["uuid"] = device.uuid;
  dict["pci_bus_id"] = device.pci_bus_id;
  dict["compute_capability"] = nb::make_tuple(device.major, device.minor);
  dict["num_sms"] = device.num_sms;
  dict["total_bytes"] = device.total_bytes;
  dict["peer_access"] = device.peer_access;
  return dict;
}

nb::dict MachineInfo() {
  cuda::MachineInfo info;
  {
    nb::gil_scoped_release release;
    info = cuda::GetMachineInfo();
  }
  nb::dict dict;
  dict["runtime_version"] = info.runtime_version;
  dict["driver_version"] = info.driver_version;
  dict["obstacle"] = NoneIfEmpty(info.obstacle);
  nb::list devices;
  for (const cuda::DeviceInfo& device : info.devices) devices.append(ToDict(device));
  dict["devices"] = devices;
  return dict;
}

nb::dict GetReach(int device) {
  comm::Reach reach;
  {
    nb::gil_scoped_release release;
    RaiseUnlessOk(comm::GetReach(device, &reach));
  }
  nb::dict dict;
  dict["host"] = reach.host;
  dict["device"] = reach.device;
  dict["fabric_obstacle"] = NoneIfEmpty(reach.fabric.message());
  dict["nvlink_domain"] = NoneIfEmpty(reach.nvlink_domain);
  dict["domain_obstacle"] = NoneIfEmpty(reach.domain_obstacle);
  return dict;
}

int64_t FreeBytes(int device) {
  nb::gil_scoped_release release;
  int64_t bytes = 0;
  RaiseUnlessOk(cuda::GetFreeBytes(device, &bytes));
  return bytes;
}

}  // namespace
}  // namespace jax_ep::ffi_cuda

NB_MODULE(_cuda, module) {
  using namespace jax_ep;  // NOLINT
  module.def("targets", [] {
    nb::dict targets;
    const auto add = [&](const std::string& op, auto execute, auto uncaptured) {
      targets[("jax_ep_cuda_" + op).c_str()] = ffi_cuda::Target(execute);
      targets[("jax_ep_cuda_" + op + "_uncaptured").c_str()] = ffi_cuda::Target(uncaptured);
    };
    add("prepare", JaxEpCudaPrepare, JaxEpCudaPrepareUncaptured);
    add("dispatch", JaxEpCudaDispatch, JaxEpCudaDispatchUncaptured);
    add("combine", JaxEpCudaCombine, JaxEpCudaCombineUncaptured);
    add("low_latency_dispatch", JaxEpCudaLowLatencyDispatch, JaxEpCudaLowLatencyDispatchUncaptured);
    add("low_latency_dispatch_start", JaxEpCudaLowLatencyDispatchStart,
        JaxEpCudaLowLatencyDispatchStartUncaptured);
    add("low_latency_dispatch_done", JaxEpCudaLowLatencyDispatchDone,
        JaxEpCudaLowLatencyDispatchDoneUncaptured);
    add("low_latency_combine", JaxEpCudaLowLatencyCombine, JaxEpCudaLowLatencyCombineUncaptured);
    add("low_latency_combine_start", JaxEpCudaLowLatencyCombineStart,
        JaxEpCudaLowLatencyCombineStartUncaptured);
    add("low_latency_combine_done", JaxEpCudaLowLatencyCombineDone,
        JaxEpCudaLowLatencyCombineDoneUncaptured);
    return targets;
  }, "FFI targets by name.");
  module.def("machine_info", &ffi_cuda::MachineInfo,
             "Versions, the visible devices, and why there are none.");
  module.def("reach", &ffi_cuda::GetReach, nb::arg("device"),
             "What decides how ranks on other devices can reach this one's memory.");
  module.def("free_bytes", &ffi_cuda::FreeBytes, nb::arg("device"),
             "Memory of a device that no process has.");
  module.def("workspace_bytes", &ffi_cuda::WorkspaceBytes, nb::kw_only(), nb::arg("num_ranks"),
             nb::arg("num_experts"), nb::arg("num_topk"), nb::arg("max_tokens_per_rank"),
             nb::arg("max_row_bytes"), nb::arg("low_latency") = false,
             "Device memory of one rank of a group.");
  module.def("open_group", &ffi_cuda::Open, nb::kw_only(), nb::arg("id"), nb::arg("device"),
             nb::arg("axis"), nb::arg("subgroup"), nb::arg("rank"), nb::arg("num_ranks"),
             nb::arg("num_experts"), nb::arg("num_topk"), nb::arg("max_tokens_per_rank"),
             nb::arg("max_row_bytes"), nb::arg("low_latency") = false, nb::arg("timeout_s"),
             nb::arg("memory"),
             "Allocates \"ipc\" or \"fabric\" memory; returns the handle for all ranks.");
  module.def("connect_group", &ffi_cuda::Connect, nb::kw_only(), nb::arg("id"), nb::arg("device"),
             nb::arg("handles"), nb::arg("num_sms"), nb::arg("low_latency_sms"),
             nb::arg("ranks_per_device"),
             "Opens the memory of all ranks, in rank order; returns the ways that were taken.");
  module.def("check_group", &ffi_cuda::Check, nb::arg("id"),
             "The first error on this process's devices, or None.");
  module.def("disconnect_group", &cuda::DisconnectGroup, nb::arg("id"),
             nb::call_guard<nb::gil_scoped_release>(),
             "Waits for this process's kernels and closes the peers' memory.");
  module.def("close_group", &cuda::CloseGroup, nb::arg("id"),
             nb::call_guard<nb::gil_scoped_release>(), "Frees this process's memory.");
}
