#ifndef JAX_EP_CSRC_CUDA_PTX_MATH_CUH_
#define JAX_EP_CSRC_CUDA_PTX_MATH_CUH_

namespace jax_ep::cuda::ptx {

// 1 / x to within an ulp or so; subnormal numbers are zero to it.
__device__ __forceinline__ float Reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace jax_ep::cuda::ptx

#endif  // JAX_EP_CSRC_CUDA_PTX_MATH_CUH_
