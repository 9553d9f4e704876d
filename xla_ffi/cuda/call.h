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

// Appends a leaf, of `tokens` [T, ...] and `rows`, to the payload of one launch.
inline cuda::Leaf& AddLeaf(cuda::MoveArgs* args, const ffi::AnyBuffer& tokens,
                           const ffi::AnyBuffer& rows) {
  cuda::Leaf& leaf = args->leaves[args->num_leaves++];
  leaf = {};
  leaf.tokens = Data(tokens);
  leaf.rows = Data(rows);
  leaf.row_bytes = RowElements(tokens) * ElementBytes(rows);
  leaf.staging_offset = Stage(args, leaf.row_bytes);
  return leaf;
}

// The same for the values of its pairs, which follow the leaves.
inline void SetValues(cuda::MoveArgs* args, const ffi::AnyBuffer& tokens,
                      const ffi::AnyBuffer& rows) {
  args->values.tokens = Data(tokens);
  args->values.rows = Data(rows);
  args->values.bytes = static_cast<int32_t>(ElementBytes(tokens));
  args->values.staging_offset =
      Stage(args, int64_t{args->values.bytes} * args->common.shape.num_topk);
}

// Empties the payload, for the next launch of the same operation.
inline void ClearPayload(cuda::MoveArgs* args) {
  args->num_leaves = 0;
  args->staging_row_bytes = 0;
  args->values = {};
}

}  // namespace jax_ep::ffi_cuda

#endif  // JAX_EP_XLA_FFI_CUDA_CALL_H_
