#include "csrc/cpu/dispatch.h"

#include "xla_ffi/cpu/handlers.h"
#include "xla_ffi/cpu/meet.h"

namespace jax_ep::ffi_cpu {

// Operands: the routing, the leaves [T, ...] and, with `has_weights`, the
// top-k weights [T, K]. Results: the rows of each leaf, and the row weights.
ffi::Future Dispatch(Instance* instance, ffi::RunId run_id, ffi::ThreadPool threads,
                     int64_t group, int32_t layout, int64_t capacity, int64_t expert_alignment,
                     I32 position, I32 topk_idx, I32 /*slots*/, I32 row_source, I32 row_topk_idx,
                     I32 /*recv_slots*/, bool has_weights, ffi::RemainingArgs leaves, ffi::RemainingRets rows) {
  const Call call{"dispatch", group, layout,   capacity, expert_alignment,
                  position,   run_id, instance, &threads};
  cpu::DispatchArgs args;
  args.num_tokens = topk_idx.dimensions()[0];
  args.row_source = row_source.typed_data();
  args.row_topk_idx = row_topk_idx.typed_data();
  Work<cpu::DispatchArgs> work;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto from = leaves.get<ffi::AnyBuffer>(i);
    auto to = rows.get<ffi::AnyBuffer>(i);
    if (!from || !to) return Failed("jax_ep dispatch: as many results as leaves are needed");
    const auto* from_data = static_cast<const std::byte*>(from->untyped_data());
    auto* to_data = static_cast<std::byte*>((*to)->untyped_data());
    const int64_t element_bytes = ffi::ByteWidth(from->element_type());
    if (has_weights && i + 1 == leaves.size()) {
      args.pair_values = from_data;
      args.row_values = to_data;
      args.value_bytes = element_bytes;
    } else {
      args.leaves.push_back({from_data, to_data, RowElements(*from) * element_bytes});
    }
    work.bytes += static_cast<int64_t>((*to)->size_bytes());
  }
  work.items = [](const Shape& shape, const cpu::DispatchArgs&) { return shape.num_rows(); };
  work.run = cpu::Dispatch;
  return Meet(call, std::move(args), std::move(work));
}

}  // namespace jax_ep::ffi_cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpCpuDispatch, &jax_ep::ffi_cpu::Dispatch,
                              jax_ep::ffi_cpu::BindCall()
                                  .Arg<jax_ep::I32>()  // topk_idx
                                  .Arg<jax_ep::I32>()  // slots
                                  .Arg<jax_ep::I32>()  // row_source
                                  .Arg<jax_ep::I32>()  // row_topk_idx
                                  .Arg<jax_ep::I32>()  // recv_slots
                                  .Attr<bool>("has_weights")
                                  .RemainingArgs()
                                  .RemainingRets());
