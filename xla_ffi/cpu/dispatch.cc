#include "csrc/cpu/dispatch.h"

#include "xla_ffi/cpu/handlers.h"
#include "xla_ffi/cpu/meet.h"

namespace jax_ep::ffi_cpu {

// Operands: the routing, the leaves [T, ...] and, with `has_weights`, the
// top-k weights [T, K]. Results: the rows of each leaf, after those of a leaf
// that is cast their scales, and the row weights.
ffi::Future Dispatch(Instance* instance, ffi::RunId run_id, ffi::ThreadPool threads,
                     int64_t group, int32_t layout, int64_t capacity, int64_t expert_alignment,
                     I32 position, I32 topk_idx, I32 slots, I32 row_source, I32 row_topk_idx,
                     I32 recv_slots, bool has_weights, int32_t quantize,
                     ffi::RemainingArgs operands, ffi::RemainingRets results) {
  const Call call{"dispatch", group, layout,   capacity, expert_alignment,
                  position,   run_id, instance, &threads};
  const auto payload =
      DecodePayload(operands, results, has_weights ? Values::kMoved : Values::kNone,
                    static_cast<Quantize>(quantize));
  if (!payload) return Failed("jax_ep dispatch: operands and results do not match");
  cpu::DispatchArgs args;
  args.num_tokens = topk_idx.dimensions()[0];
  args.row_source = row_source.typed_data();
  args.row_topk_idx = row_topk_idx.typed_data();
  Work<cpu::DispatchArgs> work;
  for (const auto& [from, to, cast, scales] : payload->leaves) {
    args.leaves.push_back({Data(from), Data(to), RowElements(from) * ElementBytes(to),
                           cast.quantize, cast.dtype, cast.columns,
                           scales ? Data(*scales) : nullptr, cast.scale_bytes});
    work.bytes += static_cast<int64_t>(to.size_bytes());
  }
  if (payload->values) {
    args.pair_values = Data(*payload->values);
    args.row_values = Data(*payload->moved_values);
    args.value_bytes = ElementBytes(*payload->values);
  }
  work.check = [&](const Shape& shape) {
    Status status = CheckRouting(shape, topk_idx, slots, row_source, row_topk_idx, recv_slots);
    return status.ok() ? CheckPayload(shape, topk_idx.dimensions()[0], *payload, true) : status;
  };
  work.items = [](const Shape& shape, const cpu::DispatchArgs&) { return shape.num_rows(); };
  work.run = cpu::Dispatch;
  return Meet(call, std::move(args), std::move(work));
}

}  // namespace jax_ep::ffi_cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpCpuDispatch, &jax_ep::ffi_cpu::Dispatch,
                              jax_ep::BindDispatch(jax_ep::ffi_cpu::BindCall()));
