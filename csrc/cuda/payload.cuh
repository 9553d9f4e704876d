#ifndef JAX_EP_CSRC_CUDA_PAYLOAD_CUH_
#define JAX_EP_CSRC_CUDA_PAYLOAD_CUH_

#include <cstdint>

#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"

// All leaves and values of a payload together.
namespace jax_ep::cuda {

// What ranks must agree on of a payload, as a number (see Operation).
__device__ __forceinline__ uint32_t PayloadSite(const MoveArgs& args) {
  return static_cast<uint32_t>(args.staging_row_bytes / 16) * 8 +
         static_cast<uint32_t>(args.num_leaves);
}

// Where what rank `from` has for token `token` is staged on rank `on`: in dispatch a token of its
// own, in combine its partial sum for one of `on`.
__device__ __forceinline__ std::byte* StagedRow(const MoveArgs& args, int32_t on, int32_t from,
                                                int32_t token) {
  const Workspace& workspace = args.common.workspace;
  const int64_t row = int64_t{from} * args.common.shape.max_tokens_per_rank + token;
  return workspace.base[on] + workspace.at.staging + row * args.staging_row_bytes;
}

// Fills row `row` of dispatch's results with a byte, by one warp.
__device__ __forceinline__ void FillPayloadRow(const MoveArgs& args, int64_t row, uint8_t value) {
  for (int32_t i = 0; i < args.num_leaves; ++i) {
    const Leaf& leaf = args.leaves[i];
    FillRow(leaf.rows + row * leaf.row_bytes, leaf.row_bytes, value);
    if (leaf.scales != nullptr) {
      FillRow(leaf.scales + row * leaf.scale_bytes, leaf.scale_bytes, value);
    }
  }
  if (args.values.rows == nullptr) return;
  const Shape& shape = args.common.shape;
  const int64_t bytes =
      int64_t{args.values.bytes} * (shape.layout == Layout::kRank ? shape.num_topk : 1);
  FillRow(args.values.rows + row * bytes, bytes, value);
}

// Poisons token `token` of combine's results, by one warp.
__device__ __forceinline__ void PoisonToken(const MoveArgs& args, int64_t token) {
  for (int32_t i = 0; i < args.num_leaves; ++i) {
    const Leaf& leaf = args.leaves[i];
    FillRow(leaf.tokens + token * leaf.row_bytes, leaf.row_bytes, kPoison);
  }
  if (args.values.tokens == nullptr) return;
  const int64_t bytes = int64_t{args.values.bytes} * args.common.shape.num_topk;
  FillRow(args.values.tokens + token * bytes, bytes, kPoison);
}

// Poisons this block's share of combine's results.
__device__ __forceinline__ void PoisonTokens(const MoveArgs& args) {
  const int64_t warps = int64_t{gridDim.x} * (blockDim.x / 32);
  for (int64_t token = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
       token < args.common.num_tokens; token += warps) {
    PoisonToken(args, token);
  }
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_PAYLOAD_CUH_
