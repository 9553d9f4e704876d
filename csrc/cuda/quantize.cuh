#ifndef JAX_EP_CSRC_CUDA_QUANTIZE_CUH_
#define JAX_EP_CSRC_CUDA_QUANTIZE_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/core/quantize.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/ptx/fp8.cuh"
#include "csrc/cuda/ptx/math.cuh"

// The cast to fp8, by blocks of columns.
namespace jax_ep::cuda {

// 448 / amax, rounded to nearest: the steps by which the compiler divides, without its branch for
// special exponents. So they are taken with the number between 128 and 256 that has amax's
// mantissa.
__device__ __forceinline__ float InverseOf(float amax) {
  const uint32_t bits = __float_as_uint(amax);
  const float x = __uint_as_float((bits & 0x7fffff) | (127u + 7) << 23);
  float reciprocal = ptx::Reciprocal(x);
  reciprocal = __fmaf_rn(reciprocal, __fmaf_rn(-x, reciprocal, 1.0f), reciprocal);
  const float quotient = 448.0f * reciprocal;
  const float corrected = __fmaf_rn(reciprocal, __fmaf_rn(-x, quotient, 448.0f), quotient);
  return corrected * __uint_as_float(((127u + 7 + 127) << 23) - (bits & 0x7f800000));
}

// The scale of a block from the largest Magnitude in it.
__device__ __forceinline__ BlockScale BlockScaleOf(Quantize quantize, uint32_t magnitude) {
  return ScaleOf(quantize, magnitude, InverseOf);
}

// Four columns, the first in the low byte.
__device__ __forceinline__ uint32_t CastFour(const float* x, float inverse) {
#if __CUDA_ARCH__ >= 890
  return ptx::CastE4M3(x[0] * inverse, x[1] * inverse) |
         static_cast<uint32_t>(ptx::CastE4M3(x[2] * inverse, x[3] * inverse)) << 16;
#else
  uint32_t columns = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    columns |= static_cast<uint32_t>(QuantizeValue(x[i], inverse)) << (8 * i);
  }
  return columns;
#endif
}

__device__ __forceinline__ void StoreScale(const Leaf& leaf, std::byte* scales, int32_t block,
                                           const BlockScale& scale) {
  const int32_t bytes = ScaleBytes(leaf.quantize);
  StoreValue(scales + block * bytes, scale.bits, bytes);
}

// Columns of a lane when a warp casts a block.
inline constexpr int kLaneColumns = kBlockColumns / 32;

// Casts a block of up to 128 columns by one warp: this lane's columns lane, lane + 32, ... into
// `cast`, the first in the low byte.
template <typename T>
__device__ __forceinline__ BlockScale CastBlock(Quantize quantize,
                                                const typename T::Storage* block,
                                                int32_t columns, uint32_t* cast) {
  float x[kLaneColumns] = {};
  uint32_t magnitude = 0;
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    const int32_t column = i * 32 + static_cast<int32_t>(threadIdx.x % 32);
    if (column < columns) x[i] = T::Load(block[column]);
    magnitude = max(magnitude, Magnitude(x[i]));
  }
  const BlockScale scale = BlockScaleOf(quantize, __reduce_max_sync(~0u, magnitude));
  *cast = CastFour(x, scale.inverse);
  return scale;
}

// Stores what CastBlock has given this lane.
__device__ __forceinline__ void StoreBlock(uint32_t cast, int32_t columns, std::byte* values) {
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    const int32_t column = i * 32 + static_cast<int32_t>(threadIdx.x % 32);
    if (column < columns) values[column] = static_cast<std::byte>(cast >> (8 * i));
  }
}

// Whether the leaf is cast by vectors: every block of its rows lies in whole vectors of them.
__device__ __forceinline__ bool CastsVectors(const Leaf& leaf) {
  const bool whole_blocks = leaf.columns % kBlockColumns == 0 || leaf.columns == leaf.row_bytes;
  return leaf.quantize != Quantize::kNone && leaf.row_bytes != 0 && whole_blocks &&
         (reinterpret_cast<uintptr_t>(leaf.tokens) |
          static_cast<uintptr_t>(leaf.row_bytes * StorageBytes(leaf.dtype))) %
                 16 ==
             0;
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_QUANTIZE_CUH_
