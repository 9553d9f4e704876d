#ifndef JAX_EP_CSRC_CUDA_MOVER_CUH_
#define JAX_EP_CSRC_CUDA_MOVER_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/ptx/tma.cuh"

// The two ways by which a warp moves a piece of a row to several places: `to` differs by lane, and
// null is no place. A mover may still be at work when Move returns; Finish waits for all of it.
namespace jax_ep::cuda {

// Through registers: any alignment, any GPU.
class VectorMover {
 public:
  static constexpr int64_t kMaxBytes = int64_t{1} << 40;  // of one piece
  static constexpr int64_t kSharedBytes = 0;  // of one warp

  __device__ explicit VectorMover(std::byte* /*shared*/) {}

  static __device__ bool Takes(const std::byte*, int64_t, const std::byte*) { return true; }

  static __device__ void Move(const std::byte* from, int64_t bytes, std::byte* to) {
    const uint32_t targets = __ballot_sync(~0u, to != nullptr);
    const uintptr_t all = reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(bytes) |
                          __reduce_or_sync(~0u, static_cast<uint32_t>(
                                                    reinterpret_cast<uintptr_t>(to)));
    if (all % 16 == 0) {
      CopyToAll<uint4>(from, bytes, targets, to);
    } else if (all % 4 == 0) {
      CopyToAll<uint32_t>(from, bytes, targets, to);
    } else if (all % 2 == 0) {
      CopyToAll<uint16_t>(from, bytes, targets, to);
    } else {
      CopyToAll<uint8_t>(from, bytes, targets, to);
    }
  }

  __device__ void Finish() {}

 private:
  // Vectors that a lane loads before it stores the first: enough bytes in flight to hide the link's
  // latency with a few warps on each of a few SMs, and as many as sm_80 has registers for.
  static constexpr int kUnroll = 7;

  template <typename T>
  static __device__ void CopyToAll(const std::byte* from, int64_t bytes, uint32_t targets,
                                   std::byte* to) {
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
        T* target = reinterpret_cast<T*>(
            __shfl_sync(~0u, reinterpret_cast<uint64_t>(to), __ffs(left) - 1));
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const int64_t index = base + i * 32 + lane;
          if (index < count) Store(target + index, values[i]);
        }
      }
    }
  }
};

// Through shared memory by the copy engine (sm_90): addresses and sizes are multiples of 16 bytes.
// While a piece is stored, the next ones are already loading.
class BulkMover {
 public:
  static constexpr int64_t kMaxBytes = 3584;  // of one piece
  static constexpr int kStages = 4;
  // The copy engine is slower, by 40 %, where buffers are not aligned to 128 bytes.
  static constexpr int64_t kSharedBytes = kStages * kMaxBytes + 128;

  __device__ explicit BulkMover(std::byte* shared)
      : buffers_(shared),
        barriers_(reinterpret_cast<uint64_t*>(shared + kStages * kMaxBytes)) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < kStages; ++i) ptx::BarrierInit(&barriers_[i], 1);
      ptx::FenceBarrierInit();
    }
    __syncwarp();
#endif
  }

  // Whether all places allow it.
  static __device__ bool Takes(const std::byte* from, int64_t bytes, const std::byte* to) {
    const auto places = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(to));
    return (__reduce_or_sync(~0u, places) | reinterpret_cast<uintptr_t>(from) |
            static_cast<uintptr_t>(bytes)) % 16 == 0;
  }

  __device__ void Move(const std::byte* from, int64_t bytes, std::byte* to) {
#if __CUDA_ARCH__ >= 900
    const int stage = count_ % kStages;
    ptx::BulkWaitRead<kStages - 1 - kLoading>();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::BarrierExpect(&barriers_[stage], static_cast<uint32_t>(bytes));
      ptx::BulkLoad(buffers_ + stage * kMaxBytes, from, static_cast<uint32_t>(bytes),
                    &barriers_[stage]);
    }
    StoreOldest();
    to_[0] = to;
    bytes_[0] = static_cast<uint32_t>(bytes);
    ++count_;
#endif
  }

  __device__ void Finish() {
#if __CUDA_ARCH__ >= 900
    for (int i = 0; i < kLoading; ++i) {
      StoreOldest();
      ++count_;
    }
    ptx::BulkWait();
    ptx::FenceProxyAsyncGlobal();
    __syncwarp();
#endif
  }

 private:
  static constexpr int kLoading = 2;  // pieces that are loading between calls

#if __CUDA_ARCH__ >= 900
  // Sends the piece that has been loading longest to its places.
  __device__ void StoreOldest() {
    const uint32_t bytes = bytes_[kLoading - 1];
    if (bytes != 0) {
      const uint32_t piece = count_ - kLoading;
      ptx::BarrierWait(&barriers_[piece % kStages], piece / kStages % 2);
      std::byte* const to = to_[kLoading - 1];
      if (to != nullptr) ptx::BulkStore(to, buffers_ + piece % kStages * kMaxBytes, bytes);
      ptx::BulkCommit();
    }
#pragma unroll
    for (int i = kLoading - 1; i > 0; --i) {
      to_[i] = to_[i - 1];
      bytes_[i] = bytes_[i - 1];
    }
    bytes_[0] = 0;
  }
#endif

  std::byte* const buffers_;
  uint64_t* const barriers_;
  // Of the pieces that are loading, the latest first; no bytes where there is none.
  std::byte* to_[kLoading] = {};
  uint32_t bytes_[kLoading] = {};
  uint32_t count_ = 0;  // pieces so far
};

// Moves a whole row.
template <typename Mover>
__device__ void MoveRow(Mover& mover, const std::byte* from, int64_t bytes, std::byte* to) {
  if (!Mover::Takes(from, bytes, to)) return VectorMover::Move(from, bytes, to);
  for (int64_t offset = 0; offset < bytes; offset += Mover::kMaxBytes) {
    const int64_t left = bytes - offset;
    mover.Move(from + offset, left < Mover::kMaxBytes ? left : Mover::kMaxBytes,
               to == nullptr ? nullptr : to + offset);
  }
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_MOVER_CUH_
