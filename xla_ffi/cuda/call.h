#ifndef JAX_EP_XLA_FFI_CUDA_CALL_H_
#define JAX_EP_XLA_FFI_CUDA_CALL_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>

#include "csrc/core/status.h"
#include "csrc/cuda/group.h"
#include "csrc/cuda/kernels.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/check.h"
#include "xla_ffi/decode.h"

// What the CUDA handlers share. They only decode and launch: everything that changes between calls
// is in device memory, so that a launch captured into a CUDA graph can be replayed.
namespace jax_ep::ffi_cuda {

namespace ffi = ::xla::ffi;

// Binds what every operation has, before its own operands.
inline auto BindCall() {
  return BindCommon(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>());
}

inline ffi::Error ToError(const char* op, const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error::Internal("jax_ep " + std::string(op) + ": " + status.message());
}

// Fills in what all operations need, for the current device's rank of the group. Hold `group` until
// the launch, which closing the group waits for.
inline Status FindCommon(int64_t group_id, int32_t layout, int64_t capacity,
                         int64_t expert_alignment, const I32& position, int64_t num_tokens,
                         std::shared_ptr<const cuda::Group>* held, cuda::Common* common) {
  int device = 0;
  if (Status status = cuda::CheckCuda(cudaGetDevice(&device), "cudaGetDevice"); !status.ok()) {
    return status;
  }
  const std::shared_ptr<const cuda::Group> group = *held = cuda::FindGroup(group_id, device);
  if (!group) {
    return Status::Error("Group " + std::to_string(group_id) +
                         " is closed, or was never opened on device " + std::to_string(device) +
                         " of this process");
  }
  if (Status status = group->CheckError(); !status.ok()) return status;
  const cuda::WorkspaceLayout& sizes = group->workspace().layout;
  common->workspace = group->workspace();
  common->num_tokens = static_cast<int32_t>(num_tokens);
  common->position = position.typed_data();
  common->shape.num_ranks = sizes.num_ranks;
  common->shape.num_experts = sizes.num_experts;
  common->shape.num_topk = sizes.num_topk;
  common->shape.max_tokens_per_rank = sizes.max_tokens_per_rank;
  common->shape.layout = static_cast<Layout>(layout);
  common->shape.capacity = capacity;
  common->shape.expert_alignment = expert_alignment;
  return Status();
}

// Gives `bytes` of a staged row a place of their own; returns where.
inline int64_t Stage(cuda::MoveArgs* args, int64_t bytes) {
  const int64_t offset = args->staging_row_bytes;
  args->staging_row_bytes += (bytes + 15) / 16 * 16;
  return offset;
}

// Appends a leaf, of rows of `row_bytes`, to the payload of one launch.
inline cuda::Leaf& AddLeaf(cuda::MoveArgs* args, std::byte* tokens, std::byte* rows,
                           int64_t row_bytes) {
  cuda::Leaf& leaf = args->leaves[args->num_leaves++];
  leaf = {};
  leaf.tokens = tokens;
  leaf.rows = rows;
  leaf.row_bytes = row_bytes;
  leaf.staging_offset = Stage(args, leaf.row_bytes);
  return leaf;
}

// The same for dispatch, which may cast; where its rows go is left to the caller.
inline cuda::Leaf& AddTokens(cuda::MoveArgs* args, const ffi::AnyBuffer& tokens,
                             const Cast& cast) {
  const bool casts = cast.quantize != Quantize::kNone;
  cuda::Leaf& leaf = AddLeaf(args, Data(tokens), nullptr,
                             RowElements(tokens) * (casts ? 1 : ElementBytes(tokens)));
  if (!casts) return leaf;
  leaf.quantize = cast.quantize;
  leaf.dtype = cast.dtype;
  leaf.columns = cast.columns;
  leaf.scale_bytes = cast.scale_bytes;
  leaf.scales_offset = Stage(args, cast.scale_bytes);
  return leaf;
}

// The same for the values of its pairs, of `bytes` each, which follow the leaves.
inline void SetValues(cuda::MoveArgs* args, std::byte* tokens, std::byte* rows, int64_t bytes) {
  args->values.tokens = tokens;
  args->values.rows = rows;
  args->values.bytes = static_cast<int32_t>(bytes);
  args->values.staging_offset = Stage(args, bytes * args->common.shape.num_topk);
}

// The weights of combine's rows, if they are floats of a width that it takes.
inline Status SetWeights(cuda::MoveArgs* args, const ffi::AnyBuffer& weights) {
  const auto dtype = ToDType(weights.element_type());
  if (dtype != DType::kF32 && dtype != DType::kF64) {
    return Status::Error("row weights are neither float32 nor float64");
  }
  args->row_weights = Data(weights);
  args->weight_dtype = *dtype;
  return Status();
}

// The routing that a prepare has given.
inline void SetRouting(cuda::MoveArgs* args, const I32& topk_idx, const I32& slots,
                       const I32& row_source, const I32& row_topk_idx, const I32& recv_slots) {
  args->topk_idx = topk_idx.typed_data();
  args->slots = slots.typed_data();
  args->row_source = row_source.typed_data();
  args->row_topk_idx = row_topk_idx.typed_data();
  args->recv_slots = recv_slots.typed_data();
}

// Makes a launch the first or the second half of a low-latency operation.
inline Status SetTicket(const U32& ticket, bool starts, cuda::Split* split) {
  *split = {starts, !starts, ticket.typed_data()};
  return CheckElements("ticket", ticket, 2);
}

// Empties the payload, for the next launch of the same operation.
inline void ClearPayload(cuda::MoveArgs* args) {
  args->num_leaves = 0;
  args->staging_row_bytes = 0;
  args->values = {};
}

}  // namespace jax_ep::ffi_cuda

// Defines the handler `name`, which XLA may put into command buffers, and its twin that stays out
// of them (jax_ep/overlap.py).
#define JAX_EP_DEFINE_CUDA_HANDLER(name, function, binding)                   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, binding,                      \
                                {xla::ffi::Traits::kCmdBufferCompatible});    \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name##Uncaptured, function, binding)

#endif  // JAX_EP_XLA_FFI_CUDA_CALL_H_
