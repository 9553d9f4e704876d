#include "xla_ffi/cuda/call.h"
#include "xla_ffi/cuda/handlers.h"

namespace jax_ep::ffi_cuda {

// Operands: the routing, the rows of each leaf and, unless `values` is kNone, one value a pair.
// Results: the leaves [T, ...] and, with kMoved, the pairs' values [T, K].
ffi::Error Combine(cudaStream_t stream, int64_t group, int32_t layout, int64_t capacity,
                   int64_t expert_alignment, I32 position, I32 topk_idx, I32 slots, I32 row_source,
                   I32 row_topk_idx, I32 recv_slots, int32_t values_role,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  const auto role = static_cast<Values>(values_role);
  const auto payload = DecodePayload(operands, results, role);
  if (!payload) return ToError("combine", Status::Error("operands and results do not match"));
  std::shared_ptr<const cuda::Group> held;
  cuda::MoveArgs args;
  if (Status status = FindCommon(group, layout, capacity, expert_alignment, position,
                                 topk_idx.dimensions()[0], &held, &args.common);
      !status.ok()) {
    return ToError("combine", status);
  }
  const Shape& shape = args.common.shape;
  Status status = CheckRouting(shape, topk_idx, slots, row_source, row_topk_idx, recv_slots);
  if (status.ok()) status = CheckPayload(shape, args.common.num_tokens, *payload, false);
  if (!status.ok()) return ToError("combine", status);
  SetRouting(&args, topk_idx, slots, row_source, row_topk_idx, recv_slots);
  if (role == Values::kWeights) {
    if (Status status = SetWeights(&args, *payload->values); !status.ok()) {
      return ToError("combine", status);
    }
  }
  for (const Payload::Leaf& leaf : payload->leaves) {
    const auto dtype = ToDType(leaf.from.element_type());
    if (!dtype) return ToError("combine", Status::Error("rows of a dtype that it does not sum"));
    // One launch sums leaves of one dtype.
    if (args.num_leaves == cuda::kMaxLeaves || (args.num_leaves > 0 && args.dtype != *dtype)) {
      if (Status status = cuda::Combine(stream, args); !status.ok()) {
        return ToError("combine", status);
      }
      ClearPayload(&args);
    }
    args.dtype = *dtype;
    AddLeaf(&args, Data(leaf.to), Data(leaf.from),
            RowElements(leaf.to) * ElementBytes(leaf.from));
  }
  if (role == Values::kMoved) {
    SetValues(&args, Data(*payload->moved_values), Data(*payload->values),
              ElementBytes(*payload->values));
  }
  return ToError("combine", cuda::Combine(stream, args));
}

}  // namespace jax_ep::ffi_cuda

JAX_EP_DEFINE_CUDA_HANDLER(JaxEpCudaCombine, &jax_ep::ffi_cuda::Combine,
                           jax_ep::BindCombine(jax_ep::ffi_cuda::BindCall()));
