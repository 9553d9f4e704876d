#include "xla_ffi/cuda/call.h"
#include "xla_ffi/cuda/handlers.h"

namespace jax_ep::ffi_cuda {

// Operands: the routing, the leaves [T, ...] and, with `has_weights`, the top-k weights [T, K].
// Results: the rows of each leaf, after those of a leaf that is cast their scales, and the row
// weights.
ffi::Error Dispatch(cudaStream_t stream, int64_t group, int32_t layout, int64_t capacity,
                    int64_t expert_alignment, I32 position, I32 topk_idx, I32 slots,
                    I32 row_source, I32 row_topk_idx, I32 recv_slots, bool has_weights,
                    int32_t quantize, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  const auto payload =
      DecodePayload(operands, results, has_weights ? Values::kMoved : Values::kNone,
                    static_cast<Quantize>(quantize));
  if (!payload) return ToError("dispatch", Status::Error("operands and results do not match"));
  std::shared_ptr<const cuda::Group> held;
  cuda::MoveArgs args;
  if (Status status = FindCommon(group, layout, capacity, expert_alignment, position,
                                 topk_idx.dimensions()[0], &held, &args.common);
      !status.ok()) {
    return ToError("dispatch", status);
  }
  const Shape& shape = args.common.shape;
  Status status = CheckRouting(shape, topk_idx, slots, row_source, row_topk_idx, recv_slots);
  if (status.ok()) status = CheckPayload(shape, args.common.num_tokens, *payload, true);
  if (!status.ok()) return ToError("dispatch", status);
  SetRouting(&args, topk_idx, slots, row_source, row_topk_idx, recv_slots);
  for (size_t i = 0; i < payload->leaves.size(); ++i) {
    const auto& [from, to, cast, scales] = payload->leaves[i];
    cuda::Leaf& leaf = AddTokens(&args, from, cast);
    leaf.rows = Data(to);
    if (scales) leaf.scales = Data(*scales);
    // The last launch is below, with the values.
    if (args.num_leaves < cuda::kMaxLeaves || i + 1 == payload->leaves.size()) continue;
    if (Status status = cuda::Dispatch(stream, args); !status.ok()) {
      return ToError("dispatch", status);
    }
    ClearPayload(&args);
  }
  if (payload->values) {
    SetValues(&args, Data(*payload->values), Data(*payload->moved_values),
              ElementBytes(*payload->values));
  }
  if (args.num_leaves == 0 && !payload->values) return ffi::Error::Success();
  return ToError("dispatch", cuda::Dispatch(stream, args));
}

}  // namespace jax_ep::ffi_cuda

JAX_EP_DEFINE_CUDA_HANDLER(JaxEpCudaDispatch, &jax_ep::ffi_cuda::Dispatch,
                           jax_ep::BindDispatch(jax_ep::ffi_cuda::BindCall()));
