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
  const BlockScale scale = ScaleOf(quantize, __reduce_max_sync(~0u, magnitude));
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

// Any row of dtype T, a block at a time.
template <typename T>
__device__ void CastBlocks(const Leaf& leaf, const std::byte* token, std::byte* values,
                           std::byte* scales) {
  const auto* const from = reinterpret_cast<const typename T::Storage*>(token);
  int32_t block = 0;
  for (int64_t line = 0; line < leaf.row_bytes; line += leaf.columns) {
    for (int32_t first = 0; first < leaf.columns; first += kBlockColumns, ++block) {
      const int32_t columns = leaf.columns - first;
      uint32_t cast;
      const BlockScale scale =
          CastBlock<T>(leaf.quantize, from + line + first, columns, &cast);
      StoreBlock(cast, columns, values + line + first);
      if (threadIdx.x % 32 == 0) StoreScale(leaf, scales, block, scale);
    }
  }
}

// Whether every block of the leaf's rows lies in whole vectors of them.
__device__ __forceinline__ bool CastsVectors(const Leaf& leaf) {
  const bool whole_blocks = leaf.columns % kBlockColumns == 0 || leaf.columns == leaf.row_bytes;
  return whole_blocks && (reinterpret_cast<uintptr_t>(leaf.tokens) |
                          static_cast<uintptr_t>(leaf.row_bytes * StorageBytes(leaf.dtype))) %
                                 16 ==
                             0;
}

template <typename T, typename Ring>
__device__ void CastRow(Ring& ring, const Leaf& leaf, int64_t token, std::byte* values,
                        std::byte* scales) {
  const int64_t bytes = leaf.row_bytes * static_cast<int64_t>(sizeof(typename T::Storage));
  const std::byte* const from = leaf.tokens + token * bytes;
  if (CastsVectors(leaf)) {
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
