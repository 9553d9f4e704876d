#ifndef JAX_EP_CSRC_CUDA_PTX_FP8_CUH_
#define JAX_EP_CSRC_CUDA_PTX_FP8_CUH_

#include <cstdint>

// The cast to 8-bit floats in hardware (sm_89).
namespace jax_ep::cuda::ptx {

// Two float8_e4m3fn, rounded to nearest even, `low` in the low byte; NaN is 0x7f.
__device__ __forceinline__ uint16_t CastE4M3(float low, float high) {
  uint16_t result;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
  return result;
}

}  // namespace jax_ep::cuda::ptx

#endif  // JAX_EP_CSRC_CUDA_PTX_FP8_CUH_
