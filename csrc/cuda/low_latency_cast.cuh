#ifndef JAX_EP_CSRC_CUDA_LOW_LATENCY_CAST_CUH_
#define JAX_EP_CSRC_CUDA_LOW_LATENCY_CAST_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/core/quantize.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/quantize.cuh"
#include "csrc/cuda/row_pieces.cuh"
#include "csrc/cuda/team.cuh"
#include "csrc/cuda/vector.cuh"

// The cast of few tokens' rows to fp8, each by all warps of a team.
namespace jax_ep::cuda {

// Casts by vectors, of which a warp loads kUnroll pieces of 32 before it casts the first.
template <typename T, typename From, typename Places, typename To>
__device__ __forceinline__ void CastRowVectors(const Team& team, const Leaf& leaf, int32_t count,
                                               From from, Places places, To to) {
  constexpr int kElements = kVectorElements<T>;
  constexpr int kGroup = kBlockColumns / kElements;  // lanes that have a block
  constexpr int kUnroll = 3;
  const int32_t lane = threadIdx.x % 32;
  const auto vectors = static_cast<int32_t>(
      leaf.row_bytes * static_cast<int64_t>(sizeof(typename T::Storage)) / 16);
  const RowPieces pieces(count, vectors);
#pragma unroll 1
  for (int32_t first = team.warp(); first < pieces.number(); first += kUnroll * team.num_warps()) {
    uint4 loaded[kUnroll];
    int32_t rows[kUnroll];
    int32_t indices[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t piece = first + u * team.num_warps();
      rows[u] = pieces.Row(piece);
      indices[u] = pieces.Vector(piece);
      if (piece >= pieces.number() || indices[u] >= vectors) rows[u] = -1;
      loaded[u] = uint4{0, 0, 0, 0};
      if (rows[u] >= 0) {
        loaded[u] = Load(reinterpret_cast<const uint4*>(from(rows[u])) + indices[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float x[kElements];
      Unpack<T>(loaded[u], x);
      uint32_t magnitude = 0;
#pragma unroll
      for (int i = 0; i < kElements; ++i) magnitude = max(magnitude, Magnitude(x[i]));
#pragma unroll
      for (int delta = 1; delta < kGroup; delta *= 2) {
        magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, delta));
      }
      const BlockScale scale = BlockScaleOf(leaf.quantize, magnitude);
      const uint32_t low = CastFour(&x[0], scale.inverse);
      const uint32_t high = kElements == 8 ? CastFour(&x[kElements - 4], scale.inverse) : 0;
      const int32_t column = indices[u] * kElements;
      const int32_t copies = rows[u] >= 0 ? places(rows[u]) : 0;
#pragma unroll 1
      for (int32_t n = 0; n < copies; ++n) {
        std::byte* const staged = to(rows[u], n);
        std::byte* const values = staged + leaf.staging_offset + column;
        if constexpr (kElements == 8) {
          *reinterpret_cast<uint2*>(values) = {low, high};
        } else {
          *reinterpret_cast<uint32_t*>(values) = low;
        }
        if (lane % kGroup == 0) {
          StoreScale(leaf, staged + leaf.scales_offset, column / kBlockColumns, scale);
        }
      }
    }
  }
}

// Casts any rows, a block of columns a warp.
template <typename T, typename From, typename Places, typename To>
__device__ __forceinline__ void CastRowBlocks(const Team& team, const Leaf& leaf, int32_t count,
                                              From from, Places places, To to) {
  const int32_t lane = threadIdx.x % 32;
  const int32_t line_blocks = NumBlocks(leaf.columns);
  const auto blocks = static_cast<int32_t>(
      leaf.columns == 0 ? 0 : leaf.row_bytes / leaf.columns * line_blocks);
#pragma unroll 1
  for (int32_t unit = team.warp(); unit < count * blocks; unit += team.num_warps()) {
    const int32_t row = unit / blocks;
    const int32_t block = unit % blocks;
    const int32_t first = block % line_blocks * kBlockColumns;
    const int64_t begin = int64_t{block / line_blocks} * leaf.columns + first;
    uint32_t cast;
    const BlockScale scale = CastBlock<T>(
        leaf.quantize, reinterpret_cast<const typename T::Storage*>(from(row)) + begin,
        leaf.columns - first, &cast);
#pragma unroll 1
    for (int32_t n = 0; n < places(row); ++n) {
      std::byte* const staged = to(row, n);
      StoreBlock(cast, leaf.columns - first, staged + leaf.staging_offset + begin);
      if (lane == 0) StoreScale(leaf, staged + leaf.scales_offset, block, scale);
    }
  }
}

template <typename T, typename From, typename Places, typename To>
__device__ __forceinline__ void CastRows(const Team& team, const Leaf& leaf, int32_t count,
                                         From from, Places places, To to) {
  if (CastsVectors(leaf)) {
    CastRowVectors<T>(team, leaf, count, from, places, to);
  } else {
    CastRowBlocks<T>(team, leaf, count, from, places, to);
  }
}

// Casts a leaf of `count` tokens. `from(row)` is a token's row, `to(row, n)`, for n from 0 to
// `places(row)`, a staged row that gets it.
template <typename From, typename Places, typename To>
__device__ __forceinline__ void CastRows(const Team& team, const Leaf& leaf, int32_t count,
                                         From from, Places places, To to) {
  switch (leaf.dtype) {
    case DType::kBF16: return CastRows<BF16>(team, leaf, count, from, places, to);
    case DType::kF16: return CastRows<F16>(team, leaf, count, from, places, to);
    default: return CastRows<F32>(team, leaf, count, from, places, to);
  }
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_LOW_LATENCY_CAST_CUH_
