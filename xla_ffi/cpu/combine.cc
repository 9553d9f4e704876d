#include "csrc/cpu/combine.h"

#include "xla_ffi/cpu/handlers.h"
#include "xla_ffi/cpu/meet.h"

namespace jax_ep::ffi_cpu {

// Operands: the routing, the rows of each leaf and, unless `values` is kNone,
// one value a pair. Results: the leaves [T, ...] and, with kMoved, the
// pairs' values [T, K].
ffi::Future Combine(Instance* instance, ffi::RunId run_id, ffi::ThreadPool threads, int64_t group,
                    int32_t layout, int64_t capacity, int64_t expert_alignment, I32 position,
                    I32 topk_idx, I32 slots, I32 row_source, I32 row_topk_idx,
                    I32 recv_slots, int32_t values_role, ffi::RemainingArgs operands,
                    ffi::RemainingRets results) {
  const Call call{"combine", group, layout,   capacity, expert_alignment,
                  position,  run_id, instance, &threads};
  const auto role = static_cast<Values>(values_role);
  const auto payload = DecodePayload(operands, results, role);
  if (!payload) return Failed("jax_ep combine: operands and results do not match");
  cpu::CombineArgs args;
  args.num_tokens = topk_idx.dimensions()[0];
  args.topk_idx = topk_idx.typed_data();
  args.slots = slots.typed_data();
  Work<cpu::CombineArgs> work;
  for (const Payload::Leaf& leaf : payload->leaves) {
    const auto dtype = ToDType(leaf.from.element_type());
    if (!dtype) return Failed("jax_ep combine: rows of a dtype that it does not sum");
    args.leaves.push_back({*dtype, Data(leaf.from), Data(leaf.to), RowElements(leaf.to)});
    work.bytes += static_cast<int64_t>(leaf.to.size_bytes()) * topk_idx.dimensions()[1];
  }
  if (role == Values::kWeights) {
    const auto dtype = ToDType(payload->values->element_type());
    if (dtype != DType::kF32 && dtype != DType::kF64) {
      return Failed("jax_ep combine: row weights are neither float32 nor float64");
    }
    args.row_weights = Data(*payload->values);
    args.weight_dtype = *dtype;
  } else if (role == Values::kMoved) {
    args.row_values = Data(*payload->values);
    args.pair_values = Data(*payload->moved_values);
    args.value_bytes = ElementBytes(*payload->values);
  }
  work.check = [&](const Shape& shape) {
    Status status = CheckRouting(shape, topk_idx, slots, row_source, row_topk_idx, recv_slots);
    return status.ok() ? CheckPayload(shape, topk_idx.dimensions()[0], *payload, false) : status;
  };
  work.items = [](const Shape&, const cpu::CombineArgs& rank) { return rank.num_tokens; };
  work.run = cpu::Combine;
  return Meet(call, std::move(args), std::move(work));
}

}  // namespace jax_ep::ffi_cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpCpuCombine, &jax_ep::ffi_cpu::Combine,
                              jax_ep::BindCombine(jax_ep::ffi_cpu::BindCall()));
