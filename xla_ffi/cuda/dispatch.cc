#include "xla_ffi/cuda/call.h"
#include "xla_ffi/cuda/handlers.h"

namespace jax_ep::ffi_cuda {

// Operands: the routing, the leaves [T, ...] and, with `has_weights`, the top-k weights [T, K].
// Results: the rows of each leaf, and the row weights.
ffi::Error Dispatch(cudaStream_t stream, int64_t group, int32_t layout, int64_t capacity,
                    int64_t expert_alignment, I32 position, I32 topk_idx, I32 slots,
                    I32 row_source, I32 row_topk_idx, I32 recv_slots, bool has_weights,
                    ffi::RemainingArgs leaves, ffi::RemainingRets rows) {
  std::shared_ptr<const cuda::Group> held;
  cuda::MoveArgs args;
  if (Status status = FindCommon(group, layout, capacity, expert_alignment, position,
                                 topk_idx.dimensions()[0], &held, &args.common);
      !status.ok()) {
    return ToError("dispatch", status);
  }
  args.topk_idx = topk_idx.typed_data();
  args.slots = slots.typed_data();
  args.row_source = row_source.typed_data();
  args.row_topk_idx = row_topk_idx.typed_data();
  args.recv_slots = recv_slots.typed_data();
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto from = leaves.get<ffi::AnyBuffer>(i);
    auto to = rows.get<ffi::AnyBuffer>(i);
    if (!from || !to) {
      return ToError("dispatch", Status::Error("as many results as leaves are needed"));
    }
    const bool last = i + 1 == leaves.size();
    if (has_weights && last) {
      SetValues(&args, *from, **to);
    } else {
      AddLeaf(&args, *from, **to);
    }
    if (!last && args.num_leaves < cuda::kMaxLeaves) continue;
    if (Status status = cuda::Dispatch(stream, args); !status.ok()) {
      return ToError("dispatch", status);
    }
    ClearPayload(&args);
  }
  return ffi::Error::Success();
}

}  // namespace jax_ep::ffi_cuda

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpCudaDispatch, &jax_ep::ffi_cuda::Dispatch,
                              jax_ep::ffi_cuda::BindCall()
                                  .Arg<jax_ep::I32>()  // topk_idx
                                  .Arg<jax_ep::I32>()  // slots
                                  .Arg<jax_ep::I32>()  // row_source
                                  .Arg<jax_ep::I32>()  // row_topk_idx
                                  .Arg<jax_ep::I32>()  // recv_slots
                                  .Attr<bool>("has_weights")
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
