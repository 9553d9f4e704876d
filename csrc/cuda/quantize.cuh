#ifndef JAX_EP_CSRC_CUDA_QUANTIZE_CUH_
#define JAX_EP_CSRC_CUDA_QUANTIZE_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/core/quantize.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/ptx/fp8.cuh"
#include "csrc/cuda/row_ring.cuh"
#include "csrc/cuda/vector.cuh"

// The cast of a token's row to fp8 by one warp.
namespace jax_ep::cuda {

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

// A row of dtype T, by vectors. Every block lies in the vectors of a group of neighbouring lanes.
template <typename T, typename Ring>
__device__ void CastVectors(Ring& ring, const Leaf& leaf, const std::byte* token,
                            std::byte* values, std::byte* scales) {
  using Storage = typename T::Storage;
  constexpr int kElements = kVectorElements<T>;
  constexpr int kAtOnce = 2;
  constexpr int kGroup = kBlockColumns / kElements;      // lanes
  constexpr int kVectors = kRingPieceBytes / (32 * 16);  // of a lane
  const int32_t lane = threadIdx.x % 32;
  const auto bytes = static_cast<int32_t>(leaf.row_bytes * sizeof(Storage));
  int32_t load_offset = 0;
  auto load_next = [&] {
    if (load_offset >= bytes) return ring.LoadNothing();
    ring.Load(token + load_offset, min(kRingPieceBytes, bytes - load_offset));
    load_offset += kRingPieceBytes;
  };
  for (int i = 0; i < kRingSlots - 1; ++i) load_next();
  for (int32_t offset = 0; offset < bytes; offset += kRingPieceBytes) {
    load_next();
    const auto* const piece = reinterpret_cast<const uint4*>(ring.Front());
    for (int first = 0; first < kVectors; first += kAtOnce) {
      // Step by step for some vectors together, so that they seldom wait for results.
      const int32_t begin = offset + (first * 32 + lane) * 16;
      float x[kAtOnce][kElements];
      uint32_t magnitude[kAtOnce] = {};
      BlockScale scale[kAtOnce];
#pragma unroll
      for (int v = 0; v < kAtOnce; ++v) {
        Unpack<T>(piece[(first + v) * 32 + lane], x[v]);
#pragma unroll
        for (int i = 0; i < kElements; ++i) magnitude[v] = max(magnitude[v], Magnitude(x[v][i]));
        if (begin + v * 512 >= bytes) magnitude[v] = 0;
      }
#pragma unroll
      for (int delta = 1; delta < kGroup; delta *= 2) {
#pragma unroll
        for (int v = 0; v < kAtOnce; ++v) {
          magnitude[v] = max(magnitude[v], __shfl_xor_sync(~0u, magnitude[v], delta));
        }
      }
#pragma unroll
      for (int v = 0; v < kAtOnce; ++v) scale[v] = ScaleOf(leaf.quantize, magnitude[v]);
#pragma unroll
      for (int v = 0; v < kAtOnce; ++v) {
        if (begin + v * 512 >= bytes) break;
        const int32_t column = (begin + v * 512) / static_cast<int32_t>(sizeof(Storage));
        const uint32_t low = CastFour(&x[v][0], scale[v].inverse);
        if constexpr (kElements == 8) {
          *reinterpret_cast<uint2*>(values + column) = {low, CastFour(&x[v][4], scale[v].inverse)};
        } else {
          *reinterpret_cast<uint32_t*>(values + column) = low;
        }
        if (lane % kGroup == 0) StoreScale(leaf, scales, column / kBlockColumns, scale[v]);
      }
    }
    ring.Pop();
  }
}

// Any row of dtype T, a block at a time.
template <typename T>
__device__ void CastBlocks(const Leaf& leaf, const std::byte* token, std::byte* values,
                           std::byte* scales) {
  constexpr int kLaneColumns = kBlockColumns / 32;
  const auto* const from = reinterpret_cast<const typename T::Storage*>(token);
  const int32_t lane = threadIdx.x % 32;
  int32_t block = 0;
  for (int64_t line = 0; line < leaf.row_bytes; line += leaf.columns) {
    for (int32_t first = 0; first < leaf.columns; first += kBlockColumns, ++block) {
      float x[kLaneColumns] = {};
      uint32_t magnitude = 0;
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        const int32_t column = first + i * 32 + lane;
        if (column < leaf.columns) x[i] = T::Load(from[line + column]);
        magnitude = max(magnitude, Magnitude(x[i]));
      }
      const BlockScale scale = ScaleOf(leaf.quantize, __reduce_max_sync(~0u, magnitude));
      const uint32_t cast = CastFour(x, scale.inverse);
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        const int32_t column = first + i * 32 + lane;
        if (column < leaf.columns) values[line + column] = static_cast<std::byte>(cast >> (8 * i));
      }
      if (lane == 0) StoreScale(leaf, scales, block, scale);
    }
  }
}

template <typename T, typename Ring>
__device__ void CastRow(Ring& ring, const Leaf& leaf, int64_t token, std::byte* values,
                        std::byte* scales) {
  const int64_t bytes = leaf.row_bytes * static_cast<int64_t>(sizeof(typename T::Storage));
  const std::byte* const from = leaf.tokens + token * bytes;
  const bool whole_blocks = leaf.columns % kBlockColumns == 0 || leaf.columns == leaf.row_bytes;
  const bool aligned =
      (reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(bytes)) % 16 == 0;
  if (whole_blocks && aligned) {
    CastVectors<T>(ring, leaf, from, values, scales);
  } else {
    CastBlocks<T>(leaf, from, values, scales);
  }
}

// Casts a token's row to `values` and `scales`, which are aligned to 16 bytes.
template <typename Ring>
__device__ void CastRow(Ring& ring, const Leaf& leaf, int64_t token, std::byte* values,
                        std::byte* scales) {
  switch (leaf.dtype) {
    case DType::kBF16: return CastRow<BF16>(ring, leaf, token, values, scales);
    case DType::kF16: return CastRow<F16>(ring, leaf, token, values, scales);
    default: return CastRow<F32>(ring, leaf, token, values, scales);
  }
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_QUANTIZE_CUH_
