#ifndef JAX_EP_CSRC_CUDA_TEAM_CUH_
#define JAX_EP_CSRC_CUDA_TEAM_CUH_

#include <cstdint>

#include "csrc/cuda/ptx/barrier.cuh"

namespace jax_ep::cuda {

// Neighbouring warps of a block that work together, while others may do something else. All threads
// of a team make all calls.
class Team {
 public:
  // `barrier` is one of the block's, from 0, that no other team uses; 0 is __syncthreads'.
  __device__ __forceinline__ Team(int32_t first_warp, int32_t num_warps, int32_t barrier)
      : first_warp_(first_warp), num_warps_(num_warps), barrier_(barrier) {}

  // All of the block.
  static __device__ __forceinline__ Team Block() {
    return Team(0, static_cast<int32_t>(blockDim.x / 32), 0);
  }

  // The calling thread's number in the team, and its warp's.
  __device__ __forceinline__ int32_t thread() const {
    return static_cast<int32_t>(threadIdx.x) - first_warp_ * 32;
  }
  __device__ __forceinline__ int32_t warp() const {
    return static_cast<int32_t>(threadIdx.x / 32) - first_warp_;
  }
  __device__ __forceinline__ int32_t num_threads() const { return num_warps_ * 32; }
  __device__ __forceinline__ int32_t num_warps() const { return num_warps_; }

  __device__ __forceinline__ bool Has() const { return warp() >= 0 && warp() < num_warps_; }

  // What __syncthreads and __syncthreads_and are to a block.
  __device__ __forceinline__ void Sync() const { ptx::BarrierSync(barrier_, num_threads()); }
  __device__ __forceinline__ bool SyncAnd(bool mine) const {
    return ptx::BarrierSyncAnd(barrier_, num_threads(), mine);
  }

 private:
  const int32_t first_warp_;
  const int32_t num_warps_;
  const int32_t barrier_;
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_TEAM_CUH_
