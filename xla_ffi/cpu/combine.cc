#include "csrc/cpu/combine.h"

#include "xla_ffi/cpu/handlers.h"
#include "xla_ffi/cpu/meet.h"

namespace jax_ep::ffi_cpu {

// Operands: the routing, the rows of each leaf and, unless `values` is kNone,
// one value a pair. Results: the leaves [T, ...] and, with kReturned, the
// pairs' values [T, K].
ffi::Future Combine(Instance* instance, ffi::RunId run_id, ffi::ThreadPool threads, int64_t group,
                    int32_t layout, int64_t capacity, int64_t expert_alignment, I32 position,
                    I32 topk_idx, I32 slots, I32 /*row_source*/, I32 /*row_topk_idx*/, I32 /*recv_slots*/,
                    int32_t values_role, ffi::RemainingArgs operands,
                    ffi::RemainingRets results) {
  const Call call{"combine", group, layout,   capacity, expert_alignment,
                  position,  run_id, instance, &threads};
  const auto role = static_cast<Values>(values_role);
  const size_t num_leaves = operands.size() - (role == Values::kNone ? 0 : 1);
  cpu::CombineArgs args;
  args.num_tokens = topk_idx.dimensions()[0];
  args.topk_idx = topk_idx.typed_data();
  args.slots = slots.typed_data();
  Work<cpu::CombineArgs> work;
  for (size_t i = 0; i < num_leaves; ++i) {
    const auto from = operands.get<ffi::AnyBuffer>(i);
    auto to = results.get<ffi::AnyBuffer>(i);
    if (!from || !to) return Failed("jax_ep combine: as many results as leaves are needed");
    const auto dtype = ToDType(from->element_type());
    if (!dtype) return Failed("jax_ep combine: rows of a dtype that it does not sum");
    args.leaves.push_back({*dtype, static_cast<const std::byte*>(from->untyped_data()),
                           static_cast<std::byte*>((*to)->untyped_data()), RowElements(**to)});
    work.bytes += static_cast<int64_t>((*to)->size_bytes()) * topk_idx.dimensions()[1];
  }
  if (role != Values::kNone) {
    const auto values = operands.get<ffi::AnyBuffer>(num_leaves);
    const auto* data = static_cast<const std::byte*>(values->untyped_data());
    if (role == Values::kWeights) {
      const auto dtype = ToDType(values->element_type());
      if (dtype != DType::kF32 && dtype != DType::kF64) {
        return Failed("jax_ep combine: row weights are neither float32 nor float64");
      }
      args.row_weights = data;
      args.weight_dtype = *dtype;
    } else {
      auto to = results.get<ffi::AnyBuffer>(num_leaves);
      if (!to) return Failed("jax_ep combine: no result for the returned values");
      args.row_values = data;
      args.pair_values = static_cast<std::byte*>((*to)->untyped_data());
      args.value_bytes = ffi::ByteWidth(values->element_type());
    }
  }
  work.items = [](const Shape&, const cpu::CombineArgs& rank) { return rank.num_tokens; };
  work.run = cpu::Combine;
  return Meet(call, std::move(args), std::move(work));
}

}  // namespace jax_ep::ffi_cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpCpuCombine, &jax_ep::ffi_cpu::Combine,
                              jax_ep::ffi_cpu::BindCall()
                                  .Arg<jax_ep::I32>()  // topk_idx
                                  .Arg<jax_ep::I32>()  // slots
                                  .Arg<jax_ep::I32>()  // row_source
                                  .Arg<jax_ep::I32>()  // row_topk_idx
                                  .Arg<jax_ep::I32>()  // recv_slots
                                  .Attr<int32_t>("values")
                                  .RemainingArgs()
                                  .RemainingRets());
