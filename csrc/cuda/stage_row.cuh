#ifndef JAX_EP_CSRC_CUDA_STAGE_ROW_CUH_
#define JAX_EP_CSRC_CUDA_STAGE_ROW_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/quantize.cuh"
#include "csrc/cuda/stage_queue.cuh"
#include "csrc/cuda/vector.cuh"

// How a warp puts a row of a token from its StageQueue in place, cast to fp8 or as it is. What
// takes time in a cast is not its instructions but that they wait for one another: so a lane casts
// parts of several blocks together.
namespace jax_ep::cuda {

// The largest magnitude in a block, of which kGroup neighbouring lanes have four vectors each.
template <typename T, int kGroup>
__device__ __forceinline__ uint32_t LargestMagnitude(const uint4 (&vectors)[4]) {
  uint32_t most = 0;
  if constexpr (sizeof(typename T::Storage) == 2) {
    // Two magnitudes a word: they are ordered as their bits are.
    constexpr uint32_t kBoth = 0x7fff7fff;
#pragma unroll
    for (const uint4& x : vectors) {
      most = __vmaxu2(most, __vmaxu2(__vmaxu2(x.x & kBoth, x.y & kBoth),
                                     __vmaxu2(x.z & kBoth, x.w & kBoth)));
    }
    most = Magnitude(T::Load(static_cast<uint16_t>(max(most & 0xffff, most >> 16))));
  } else {
    constexpr uint32_t kAll = 0x7fffffff;
#pragma unroll
    for (const uint4& x : vectors) {
      most = max(most, max(max(x.x & kAll, x.y & kAll), max(x.z & kAll, x.w & kAll)));
    }
  }
#pragma unroll
  for (int delta = 1; delta < kGroup; delta *= 2) {
    most = max(most, __shfl_xor_sync(~0u, most, delta));
  }
  return most;
}

// Casts a row of dtype T by vectors. Unless kWholeBlocks the last block may be shorter than others.
template <typename T, bool kWholeBlocks, typename Queue>
__device__ __forceinline__ void CastVectors(Queue& queue, const Leaf& leaf, std::byte* values,
                                            std::byte* scales) {
  using Storage = typename T::Storage;
  constexpr int kElements = kVectorElements<T>;
  constexpr int kGroup = kBlockColumns / kElements / 4;  // lanes that have a block
  constexpr int kBlockBytes = kBlockColumns * sizeof(Storage);
  constexpr int kPieceBlocks = Queue::kPieceBytes / kBlockBytes;
  static_assert(Queue::kPieceBytes == 4 * 32 * 16);
  const uint32_t block = threadIdx.x % 32 / kGroup;  // of those in a piece
  // A lane's first vectors, and the distance to others. Eight lanes read at a time: where these
  // have two blocks, they take the two halves of 128 bytes in another order, to read from different
  // banks.
  constexpr uint32_t kNext = kGroup * 16;
  const uint32_t first = block * kBlockBytes + threadIdx.x % kGroup * 16;
  const uint32_t swaps = kGroup == 4 ? block % 2 * kNext : 0;
  const uint32_t even = first + swaps;
  const uint32_t odd = first + kNext - swaps;
  const auto place = [&](int piece, int v) {
    return (v % 2 == 0 ? even : odd) + (piece * Queue::kPieceBytes + v / 2 * 2 * kNext);
  };
  auto left = static_cast<int32_t>(leaf.row_bytes * sizeof(Storage));
  for (; left > 0; left -= Queue::kBatchBytes) {
    const std::byte* const batch = queue.Front();
    uint4 vectors[Queue::kBatch][4];
#pragma unroll
    for (int p = 0; p < Queue::kBatch; ++p) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const bool there = kWholeBlocks || static_cast<int32_t>(place(p, v)) < left;
        vectors[p][v] =
            there ? *reinterpret_cast<const uint4*>(batch + place(p, v)) : uint4{0, 0, 0, 0};
      }
    }
    queue.Pop();

    float inverses[Queue::kBatch];
#pragma unroll
    for (int p = 0; p < Queue::kBatch; ++p) {
      const BlockScale scale =
          BlockScaleOf(leaf.quantize, LargestMagnitude<T, kGroup>(vectors[p]));
      inverses[p] = scale.inverse;
      const int32_t in_batch = p * kPieceBlocks + static_cast<int32_t>(block);
      if (in_batch * kBlockBytes < left && threadIdx.x % kGroup == 0) {
        StoreScale(leaf, scales, in_batch, scale);
      }
    }
#pragma unroll
    for (int p = 0; p < Queue::kBatch; ++p) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        float x[kElements];
        Unpack<T>(vectors[p][v], x);
        const uint32_t low = CastFour(&x[0], inverses[p]);
        std::byte* const to = values + place(p, v) / sizeof(Storage);
        if (static_cast<int32_t>(place(p, v)) >= left) continue;
        if constexpr (kElements == 8) {
          *reinterpret_cast<uint2*>(to) = {low, CastFour(&x[4], inverses[p])};
        } else {
          *reinterpret_cast<uint32_t*>(to) = low;
        }
      }
    }
    values += Queue::kBatchBytes / sizeof(Storage);
    scales += Queue::kBatch * kPieceBlocks * ScaleBytes(leaf.quantize);
  }
}

// Casts any row of dtype T, a block at a time.
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

template <typename T, typename Queue>
__device__ void CastRow(Queue& queue, const Leaf& leaf, int64_t token, std::byte* values,
                        std::byte* scales) {
  if (!CastsVectors(leaf)) {
    const int64_t bytes = leaf.row_bytes * static_cast<int64_t>(sizeof(typename T::Storage));
    CastBlocks<T>(leaf, leaf.tokens + token * bytes, values, scales);
  } else if (leaf.row_bytes % kBlockColumns == 0) {
    CastVectors<T, true>(queue, leaf, values, scales);
  } else {
    CastVectors<T, false>(queue, leaf, values, scales);
  }
}

// Casts a leaf of the queue's token to `values` and `scales`, which are aligned to 16 bytes.
template <typename Queue>
__device__ void CastRow(Queue& queue, const Leaf& leaf, int64_t token, std::byte* values,
                        std::byte* scales) {
  switch (leaf.dtype) {
    case DType::kBF16: return CastRow<BF16>(queue, leaf, token, values, scales);
    case DType::kF16: return CastRow<F16>(queue, leaf, token, values, scales);
    default: return CastRow<F32>(queue, leaf, token, values, scales);
  }
}

// Copies a leaf of the queue's token that is not cast. `for_each_row(store)`, by all lanes, calls
// `store(row)` for every staged row that gets it.
template <typename Queue, typename ForEachRow>
__device__ void CopyRow(Queue& queue, const Leaf& leaf, int64_t token, ForEachRow for_each_row) {
  const std::byte* const from = leaf.tokens + token * leaf.row_bytes;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (!TravelsInBatches(leaf)) {
    // VectorMover, which has many loads under way, would spill registers here.
    const auto all = reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(leaf.row_bytes) | 8;
    const auto unit = static_cast<int32_t>(all & -all);
    for (int64_t base = 0; base < leaf.row_bytes; base += 32 * unit) {
      const int64_t at = base + lane * unit;
      const bool there = at < leaf.row_bytes;
      const uint64_t value = there ? LoadValue(from + at, unit) : 0;
      for_each_row([&](std::byte* row) {
        if (there) StoreValue(row + leaf.staging_offset + at, value, unit);
      });
    }
    return;
  }
  constexpr int kVectors = Queue::kPieceBytes / (32 * 16);  // of a lane
  int64_t offset = leaf.staging_offset;
  for (auto left = static_cast<int32_t>(leaf.row_bytes); left > 0; left -= Queue::kBatchBytes) {
    const std::byte* const batch = queue.Front();
#pragma unroll
    for (int32_t piece = 0; piece < Queue::kBatchBytes; piece += Queue::kPieceBytes) {
      uint4 vectors[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        vectors[v] = *reinterpret_cast<const uint4*>(batch + piece + (v * 32 + lane) * 16);
      }
      for_each_row([&](std::byte* row) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int32_t at = piece + (v * 32 + lane) * 16;
          if (at < left) Store(reinterpret_cast<uint4*>(row + offset + at), vectors[v]);
        }
      });
    }
    queue.Pop();
    offset += Queue::kBatchBytes;
  }
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_STAGE_ROW_CUH_
