#ifndef JAX_EP_CSRC_CUDA_VECTOR_CUH_
#define JAX_EP_CSRC_CUDA_VECTOR_CUH_

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "csrc/core/dtype.h"

// Vectors of 16 bytes as elements of dtype T (csrc/core/dtype.h), and back. Where T has a case of its
// own it gives the same numbers in fewer instructions.
namespace jax_ep::cuda {

template <typename T>
inline constexpr int kVectorElements = 16 / sizeof(typename T::Storage);

template <typename T>
__device__ __forceinline__ void Unpack(const uint4& vector,
                                       typename T::Acc (&elements)[kVectorElements<T>]) {
  if constexpr (std::is_same_v<T, BF16>) {
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      elements[2 * i] = __uint_as_float(words[i] << 16);
      elements[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000);
    }
  } else {
    typename T::Storage stored[kVectorElements<T>];
    memcpy(stored, &vector, sizeof(vector));
#pragma unroll
    for (int i = 0; i < kVectorElements<T>; ++i) elements[i] = T::Load(stored[i]);
  }
}

template <typename T>
__device__ __forceinline__ uint4 Pack(const typename T::Acc (&elements)[kVectorElements<T>]) {
  uint4 vector;
  if constexpr (std::is_same_v<T, BF16>) {
    __nv_bfloat162 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = __floats2bfloat162_rn(elements[2 * i], elements[2 * i + 1]);
    }
    memcpy(&vector, pairs, sizeof(vector));
  } else {
    typename T::Storage stored[kVectorElements<T>];
#pragma unroll
    for (int i = 0; i < kVectorElements<T>; ++i) stored[i] = T::Round(elements[i]);
    memcpy(&vector, stored, sizeof(vector));
  }
  return vector;
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_VECTOR_CUH_
