#ifndef JAX_EP_CSRC_CUDA_SUM_CUH_
#define JAX_EP_CSRC_CUDA_SUM_CUH_

#include <cstdint>

#include "csrc/core/dtype.h"
#include "csrc/cuda/kernels.h"

// The arithmetic of combine.
namespace jax_ep::cuda {

// The weight by which a row enters its sum.
template <typename Acc>
__device__ __forceinline__ Acc RowWeight(const MoveArgs& args, int32_t slot) {
  if (args.row_weights == nullptr) return 1;
  if (args.weight_dtype == DType::kF64) {
    return static_cast<Acc>(reinterpret_cast<const double*>(args.row_weights)[slot]);
  }
  return reinterpret_cast<const float*>(args.row_weights)[slot];
}

// With weight 1 this is the plain sum: the product is exact.
__device__ __forceinline__ float MultiplyAdd(float weight, float x, float sum) {
  return __fmaf_rn(weight, x, sum);
}
__device__ __forceinline__ double MultiplyAdd(double weight, double x, double sum) {
  return __fma_rn(weight, x, sum);
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_SUM_CUH_
