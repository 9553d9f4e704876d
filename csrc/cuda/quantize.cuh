#ifndef JAX_EP_CSRC_CUDA_QUANTIZE_CUH_
#define JAX_EP_CSRC_CUDA_QUANTIZE_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/core/quantize.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/ptx/fp8.cuh"

// The cast of a token's row to fp8 by one warp, a lane for four columns of a block.
namespace jax_ep::cuda {

inline constexpr int kLaneColumns = kBlockColumns / 32;

__device__ __forceinline__ uint32_t CastColumns(const float (&x)[kLaneColumns], float inverse) {
#if __CUDA_ARCH__ >= 890
  return ptx::CastE4M3(x[0] * inverse, x[1] * inverse) |
         static_cast<uint32_t>(ptx::CastE4M3(x[2] * inverse, x[3] * inverse)) << 16;
#else
  uint32_t columns = 0;
  for (int i = 0; i < kLaneColumns; ++i) {
    columns |= static_cast<uint32_t>(QuantizeValue(x[i], inverse)) << (8 * i);
  }
  return columns;
#endif
}

// Casts a line of `columns` elements of dtype T. kAligned: every lane's columns are all there or none
// of them, and their addresses allow one access for all.
template <typename T, bool kAligned>
__device__ void CastLine(Quantize quantize, const typename T::Storage* from, int32_t columns,
                         std::byte* values, std::byte* scales) {
  using Storage = typename T::Storage;
  struct alignas(kLaneColumns * sizeof(Storage)) Columns {
    Storage elements[kLaneColumns];
  };
  // Blocks whose loads are under way together.
  constexpr int kUnroll = kAligned ? 16 / sizeof(Storage) : 1;
  const int32_t lane_column = threadIdx.x % 32 * kLaneColumns;
  for (int32_t first = lane_column; first - lane_column < columns;
       first += kUnroll * kBlockColumns) {
    Columns x[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t column = first + u * kBlockColumns;
      if (kAligned) {
        if (column < columns) x[u] = *reinterpret_cast<const Columns*>(from + column);
      } else {
        for (int i = 0; i < kLaneColumns; ++i) {
          if (column + i < columns) x[u].elements[i] = from[column + i];
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t column = first + u * kBlockColumns;
      if (column - lane_column >= columns) break;
      float loaded[kLaneColumns];
      uint32_t magnitude = 0;
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        loaded[i] = T::Load(x[u].elements[i]);
        magnitude = max(magnitude, Magnitude(loaded[i]));
      }
      const BlockScale scale = ScaleOf(quantize, __reduce_max_sync(~0u, magnitude));
      const uint32_t cast = CastColumns(loaded, scale.inverse);
      if (kAligned) {
        if (column < columns) *reinterpret_cast<uint32_t*>(values + column) = cast;
      } else {
        for (int i = 0; i < kLaneColumns; ++i) {
          if (column + i < columns) values[column + i] = static_cast<std::byte>(cast >> (8 * i));
        }
      }
      if (lane_column == 0) {
        const int32_t bytes = ScaleBytes(quantize);
        StoreValue(scales + column / kBlockColumns * bytes, scale.bits, bytes);
      }
    }
  }
}

// Casts a row of dtype T at `token` to `values` and `scales`, which are aligned to 16 bytes.
template <typename T>
__device__ void CastRow(const Leaf& leaf, int64_t token, std::byte* values,
                                     std::byte* scales) {
  using Storage = typename T::Storage;
  const int32_t columns = leaf.columns;
  const auto* from = reinterpret_cast<const Storage*>(leaf.tokens) + token * leaf.row_bytes;
  const bool aligned = columns % kLaneColumns == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
  for (int64_t line = 0; line < leaf.row_bytes; line += columns) {
    if (aligned) {
      CastLine<T, true>(leaf.quantize, from + line, columns, values + line, scales);
    } else {
      CastLine<T, false>(leaf.quantize, from + line, columns, values + line, scales);
    }
    scales += NumBlocks(columns) * ScaleBytes(leaf.quantize);
  }
}

__device__ inline void CastRow(const Leaf& leaf, int64_t token, std::byte* values,
                               std::byte* scales) {
  switch (leaf.dtype) {
    case DType::kBF16: return CastRow<BF16>(leaf, token, values, scales);
    case DType::kF16: return CastRow<F16>(leaf, token, values, scales);
    default: return CastRow<F32>(leaf, token, values, scales);
  }
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_QUANTIZE_CUH_
