#ifndef JAX_EP_CSRC_CUDA_PAIRS_CUH_
#define JAX_EP_CSRC_CUDA_PAIRS_CUH_

#include <cstdint>

#include "csrc/core/slots.h"
#include "csrc/cuda/kernels.h"

namespace jax_ep::cuda {

// The pairs of a token as one warp holds them: a lane stands for k = lane and k = lane + 32.
struct Pairs {
  int32_t values[2];
  __device__ int32_t& operator[](int half) { return values[half]; }
  __device__ int32_t operator[](int half) const { return values[half]; }
};

// The slots on this rank of the pairs of a token of rank `source`.
__device__ __forceinline__ Pairs ReceivedSlots(const MoveArgs& args, int32_t source,
                                               int32_t token) {
  const Shape& shape = args.common.shape;
  const int64_t first = (int64_t{source} * shape.max_tokens_per_rank + token) * shape.num_topk;
  Pairs slots;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t k = half * 32 + static_cast<int32_t>(threadIdx.x % 32);
    slots[half] = k < shape.num_topk ? args.recv_slots[first + k] : kNoSlot;
  }
  return slots;
}

// The rows of a token of this rank's: the ranks that have them, num_ranks for pairs without one,
// and their slots there.
struct SentRows {
  Pairs ranks;
  Pairs slots;
};

__device__ __forceinline__ SentRows RowsOfToken(const MoveArgs& args, int32_t token) {
  const Shape& shape = args.common.shape;
  SentRows rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t k = half * 32 + static_cast<int32_t>(threadIdx.x % 32);
    const int64_t pair = int64_t{token} * shape.num_topk + k;
    const bool in_range = k < shape.num_topk;
    const int32_t expert = in_range ? args.topk_idx[pair] : -1;
    const int32_t slot = in_range ? args.slots[pair] : kNoSlot;
    rows.slots[half] = slot;
    rows.ranks[half] = slot != kNoSlot ? shape.rank_of_expert(expert) : shape.num_ranks;
  }
  return rows;
}

// The least of these ranks above `after`, by all lanes; num_ranks if there is none.
__device__ __forceinline__ int32_t NextRank(const Pairs& ranks, int32_t after, int32_t num_ranks) {
  auto least = static_cast<uint32_t>(num_ranks);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (ranks[half] > after) least = min(least, static_cast<uint32_t>(ranks[half]));
  }
  return static_cast<int32_t>(__reduce_min_sync(~0u, least));
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_PAIRS_CUH_
