#ifndef JAX_EP_CSRC_CUDA_COPY_CUH_
#define JAX_EP_CSRC_CUDA_COPY_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/cuda/ptx/memory.cuh"

// Accesses to row data, and the simple ways to write a row.
namespace jax_ep::cuda {

__device__ __forceinline__ uint4 Load(const uint4* p) { return ptx::LoadStreaming(p); }
__device__ __forceinline__ void Store(uint4* p, const uint4& v) { ptx::StoreStreaming(p, v); }
template <typename T>
__device__ __forceinline__ T Load(const T* p) {
  return __ldcg(p);  // from L2: another GPU or block may have written it
}
template <typename T>
__device__ __forceinline__ void Store(T* p, const T& v) {
  *p = v;
}

// What fills results that could not be had: a NaN in every float dtype, -1 in integers.
inline constexpr uint8_t kPoison = 0xff;

// Fills one row with a byte.
__device__ __forceinline__ void FillRow(std::byte* to, int64_t bytes, uint8_t value) {
  const int32_t lane = threadIdx.x % 32;
  if ((reinterpret_cast<uintptr_t>(to) | static_cast<uintptr_t>(bytes)) % 16 == 0) {
    const uint32_t word = value * 0x01010101u;
#pragma unroll 1
    for (int64_t i = lane; i < bytes / 16; i += 32) {
      Store(reinterpret_cast<uint4*>(to) + i, uint4{word, word, word, word});
    }
  } else {
#pragma unroll 1
    for (int64_t i = lane; i < bytes; i += 32) to[i] = static_cast<std::byte>(value);
  }
}

// One value of 1, 2, 4 or 8 bytes, by one thread.
__device__ __forceinline__ uint64_t LoadValue(const std::byte* from, int32_t bytes) {
  switch (bytes) {
    case 8: return Load(reinterpret_cast<const uint64_t*>(from));
    case 4: return Load(reinterpret_cast<const uint32_t*>(from));
    case 2: return Load(reinterpret_cast<const uint16_t*>(from));
    default: return Load(reinterpret_cast<const uint8_t*>(from));
  }
}

__device__ __forceinline__ void StoreValue(std::byte* to, uint64_t value, int32_t bytes) {
  switch (bytes) {
    case 8: *reinterpret_cast<uint64_t*>(to) = value; break;
    case 4: *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(value); break;
    case 2: *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(value); break;
    default: *reinterpret_cast<uint8_t*>(to) = static_cast<uint8_t>(value); break;
  }
}

__device__ __forceinline__ void CopyValue(std::byte* to, const std::byte* from, int32_t bytes) {
  StoreValue(to, LoadValue(from, bytes), bytes);
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_COPY_CUH_
