#ifndef JAX_EP_CSRC_CUDA_COPY_CUH_
#define JAX_EP_CSRC_CUDA_COPY_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/cuda/ptx/memory.cuh"

// Rows moved by one warp.
namespace jax_ep::cuda {

// Vectors that a lane loads before it stores the first: enough bytes in flight to hide the link's
// latency with a few warps on each of a few SMs.
inline constexpr int kUnroll = 8;

__device__ __forceinline__ uint4 Load(const uint4* p) { return ptx::LoadStreaming(p); }
__device__ __forceinline__ void Store(uint4* p, const uint4& v) { ptx::StoreStreaming(p, v); }
template <typename T>
__device__ __forceinline__ T Load(const T* p) {
  return *reinterpret_cast<const volatile T*>(p);
}
template <typename T>
__device__ __forceinline__ void Store(T* p, const T& v) {
  *p = v;
}

// Copies `bytes`, a multiple of sizeof(T), from `from` to every row that `targets` names: bit i
// stands for row `slot` of lane i, at `to + slot * stride`. All lanes call it with the same values
// but for `slot`.
template <typename T>
__device__ __forceinline__ void CopyToSlots(std::byte* to, int64_t stride, uint32_t targets,
                                            int32_t slot, const std::byte* from, int64_t bytes) {
  const int32_t lane = threadIdx.x % 32;
  const int64_t count = bytes / static_cast<int64_t>(sizeof(T));
  const T* source = reinterpret_cast<const T*>(from);
  for (int64_t base = 0; base < count; base += 32 * kUnroll) {
    T values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t index = base + i * 32 + lane;
      if (index < count) values[i] = Load(source + index);
    }
    for (uint32_t left = targets; left != 0; left &= left - 1) {
      const int64_t row = __shfl_sync(~0u, slot, __ffs(left) - 1);
      T* target = reinterpret_cast<T*>(to + row * stride);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t index = base + i * 32 + lane;
        if (index < count) Store(target + index, values[i]);
      }
    }
  }
}

// The widest access that both ends and the size allow.
__device__ __forceinline__ void CopyRow(std::byte* to, int64_t stride, uint32_t targets,
                                        int32_t slot, const std::byte* from, int64_t bytes) {
  const auto all = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) |
                   static_cast<uintptr_t>(stride) | static_cast<uintptr_t>(bytes);
  if (all % 16 == 0) {
    CopyToSlots<uint4>(to, stride, targets, slot, from, bytes);
  } else if (all % 4 == 0) {
    CopyToSlots<uint32_t>(to, stride, targets, slot, from, bytes);
  } else if (all % 2 == 0) {
    CopyToSlots<uint16_t>(to, stride, targets, slot, from, bytes);
  } else {
    CopyToSlots<uint8_t>(to, stride, targets, slot, from, bytes);
  }
}

// Fills one row with a byte: 0, or 0xff where the true values could not be had (a NaN).
__device__ __forceinline__ void FillRow(std::byte* to, int64_t bytes, uint8_t value) {
  const int32_t lane = threadIdx.x % 32;
  if ((reinterpret_cast<uintptr_t>(to) | static_cast<uintptr_t>(bytes)) % 16 == 0) {
    const uint32_t word = value * 0x01010101u;
    for (int64_t i = lane; i < bytes / 16; i += 32) {
      Store(reinterpret_cast<uint4*>(to) + i, uint4{word, word, word, word});
    }
  } else {
    for (int64_t i = lane; i < bytes; i += 32) to[i] = static_cast<std::byte>(value);
  }
}

// One value of 1, 2, 4 or 8 bytes, by one thread.
__device__ __forceinline__ void CopyValue(std::byte* to, const std::byte* from, int32_t bytes) {
  for (int32_t i = 0; i < bytes; ++i) to[i] = reinterpret_cast<const volatile std::byte*>(from)[i];
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_COPY_CUH_
