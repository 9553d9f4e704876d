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

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_PAIRS_CUH_
