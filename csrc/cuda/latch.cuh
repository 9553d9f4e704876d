#ifndef JAX_EP_CSRC_CUDA_LATCH_CUH_
#define JAX_EP_CSRC_CUDA_LATCH_CUH_

#include <cstdint>

#include "csrc/cuda/ptx/mbarrier.cuh"

namespace jax_ep::cuda {

// Something that some warps of a block do once and others wait for, like std::latch. In shared memory.
class Latch {
 public:
  // By one thread; a barrier of the block has to follow.
  __device__ __forceinline__ void Init(int32_t num_warps) {
    ptx::BarrierInit(&barrier_, static_cast<uint32_t>(num_warps));
  }

  // By all threads of one of the warps: what they have done before is seen by whoever waits.
  __device__ __forceinline__ void Arrive() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::BarrierArrive(&barrier_);
  }

  // By any thread, until all of the warps have arrived.
  __device__ __forceinline__ void Wait() {
    while (!ptx::BarrierTest(&barrier_, 0)) {
    }
  }

 private:
  uint64_t barrier_;
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_LATCH_CUH_
