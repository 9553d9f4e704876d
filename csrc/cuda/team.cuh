#ifndef JAX_EP_CSRC_CUDA_TEAM_CUH_
#define JAX_EP_CSRC_CUDA_TEAM_CUH_

#include <cstdint>

namespace jax_ep::cuda {

// Neighbouring warps of a block that do something together, while others may do something else.
class Team {
 public:
  __device__ __forceinline__ Team(int32_t first_warp, int32_t num_warps)
      : first_warp_(first_warp), num_warps_(num_warps) {}

  // All of the block.
  static __device__ __forceinline__ Team Block() {
    return Team(0, static_cast<int32_t>(blockDim.x / 32));
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

 private:
  const int32_t first_warp_;
  const int32_t num_warps_;
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_TEAM_CUH_
