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

// The largest Magnitude in the block of vector `threadIdx.x % 4` of this lane's four. A block lies in
// one vector each of `kGroup` neighbouring lanes.
template <typename T, int kGroup>
__device__ __forceinline__ uint32_t LargestMagnitude(const uint4 (&vectors)[4]) {
  const uint32_t mine = threadIdx.x % 4;
  if constexpr (sizeof(typename T::Storage) == 2) {
    // Two magnitudes a word: they are ordered as their bits are.
    uint32_t most[4];
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      most[v] = __vmaxu2(__vmaxu2(vectors[v].x & 0x7fff7fff, vectors[v].y & 0x7fff7fff),
                         __vmaxu2(vectors[v].z & 0x7fff7fff, vectors[v].w & 0x7fff7fff));
    }
    // Of vectors 0 and 1, and of 2 and 3.
    uint32_t low = __vmaxu2(__byte_perm(most[0], most[1], 0x5410),
                            __byte_perm(most[0], most[1], 0x7632));
    uint32_t high = __vmaxu2(__byte_perm(most[2], most[3], 0x5410),
                             __byte_perm(most[2], most[3], 0x7632));
#pragma unroll
    for (int delta = 1; delta < kGroup; delta *= 2) {
      low = __vmaxu2(low, __shfl_xor_sync(~0u, low, delta));
      high = __vmaxu2(high, __shfl_xor_sync(~0u, high, delta));
    }
    const uint32_t both = mine < 2 ? low : high;
    return Magnitude(T::Load(static_cast<uint16_t>(mine % 2 == 0 ? both : both >> 16)));
  } else {
    uint32_t most[4];
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      most[v] = max(max(vectors[v].x & 0x7fffffff, vectors[v].y & 0x7fffffff),
                    max(vectors[v].z & 0x7fffffff, vectors[v].w & 0x7fffffff));
#pragma unroll
      for (int delta = 1; delta < kGroup; delta *= 2) {
        most[v] = max(most[v], __shfl_xor_sync(~0u, most[v], delta));
      }
    }
    const uint32_t low = mine % 2 == 0 ? most[0] : most[1];
    const uint32_t high = mine % 2 == 0 ? most[2] : most[3];
    return mine < 2 ? low : high;
  }
}

// A row of dtype T, by vectors, four of each lane together.
template <typename T, typename Ring>
__device__ void CastVectors(Ring& ring, const Leaf& leaf, const std::byte* token,
                            std::byte* values, std::byte* scales) {
  using Storage = typename T::Storage;
  constexpr int kElements = kVectorElements<T>;
  constexpr int kGroup = kBlockColumns / kElements;  // lanes
  static_assert(Ring::kPieceBytes == 4 * 32 * 16);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const auto bytes = static_cast<int32_t>(leaf.row_bytes * sizeof(Storage));
  int32_t load_offset = 0;
  auto load_next = [&] {
    if (load_offset >= bytes) return ring.LoadNothing();
    const int32_t from = load_offset + lane * Ring::kPieceBytes;
    ring.Load(token + from, max(0, min(Ring::kPieceBytes, bytes - from)));
    load_offset += Ring::kBatchBytes;
  };
  for (int i = 0; i < Ring::kLoadsAhead; ++i) load_next();
  const uint4* batch = nullptr;
  for (int32_t offset = 0; offset < bytes; offset += Ring::kPieceBytes) {
    const int32_t in_batch = offset % Ring::kBatchBytes;
    if (in_batch == 0) {
      load_next();
      batch = reinterpret_cast<const uint4*>(ring.Front());
    }
    const auto place = [&](int v) { return offset + (v * 32 + lane) * 16; };
    uint4 vectors[4];
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      vectors[v] = place(v) < bytes ? batch[in_batch / 16 + v * 32 + lane] : uint4{};
    }
    if (in_batch + Ring::kPieceBytes == Ring::kBatchBytes ||
        offset + Ring::kPieceBytes >= bytes) {
      ring.Pop();
    }
    // A division is long: each lane computes one scale of its group's four. The row may end in that
    // block before this lane's vector of it.
    const BlockScale scale = ScaleOf(leaf.quantize, LargestMagnitude<T, kGroup>(vectors));
    const int32_t block_begin = place(lane % 4) - lane % kGroup * 16;
    if (lane % kGroup < 4 && block_begin < bytes) {
      const int32_t column = block_begin / static_cast<int32_t>(sizeof(Storage));
      StoreScale(leaf, scales, column / kBlockColumns, scale);
    }
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const float inverse = __shfl_sync(~0u, scale.inverse, v, 4);
      float x[kElements];
      Unpack<T>(vectors[v], x);
      const uint32_t low = CastFour(&x[0], inverse);
      if (place(v) >= bytes) continue;
      std::byte* const to = values + place(v) / static_cast<int32_t>(sizeof(Storage));
      if constexpr (kElements == 8) {
        *reinterpret_cast<uint2*>(to) = {low, CastFour(&x[4], inverse)};
      } else {
        *reinterpret_cast<uint32_t*>(to) = low;
      }
    }
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
