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
  // latency with a few warps on each of a few SMs.
  static constexpr int kUnroll = 8;

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
// Some pieces are being loaded, those before them are being stored.
class BulkMover {
 public:
  static constexpr int64_t kMaxBytes = 1792;  // of one piece
  static constexpr int kStages = 7;
  static constexpr int kLoading = 5;  // pieces at most
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
    StoreOldest();
    // What was stored last from the buffer that is to be loaded has been read.
    ptx::BulkWaitRead<kStages - kLoading>();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::BarrierExpect(&barriers_[load_stage_], static_cast<uint32_t>(bytes));
      ptx::BulkLoad(buffers_ + load_stage_ * kMaxBytes, from, static_cast<uint32_t>(bytes),
                    &barriers_[load_stage_]);
    }
    load_stage_ = load_stage_ + 1 == kStages ? 0 : load_stage_ + 1;
    pieces_[kLoading - 1] = {to, static_cast<uint32_t>(bytes)};
#endif
  }

  __device__ void Finish() {
#if __CUDA_ARCH__ >= 900
    for (int i = 0; i < kLoading; ++i) StoreOldest();
    ptx::BulkWait();
    ptx::FenceProxyAsync();
    __syncwarp();
#endif
  }

 private:
  struct Piece {
    std::byte* to = nullptr;
    uint32_t bytes = 0;
  };

#if __CUDA_ARCH__ >= 900
  // Sends the piece that has been loading longest, if there is one, to its places.
  __device__ __forceinline__ void StoreOldest() {
    if (pieces_[0].bytes != 0) {
      ptx::BarrierWait(&barriers_[store_stage_], round_);
      if (pieces_[0].to != nullptr) {
        ptx::BulkStore(pieces_[0].to, buffers_ + store_stage_ * kMaxBytes, pieces_[0].bytes);
      }
      store_stage_ = store_stage_ + 1 == kStages ? 0 : store_stage_ + 1;
      round_ ^= store_stage_ == 0;
    }
    ptx::BulkCommit();
#pragma unroll
    for (int i = 0; i + 1 < kLoading; ++i) pieces_[i] = pieces_[i + 1];
    pieces_[kLoading - 1] = {};
  }
#endif

  std::byte* const buffers_;
  uint64_t* const barriers_;
  Piece pieces_[kLoading] = {};  // being loaded, the oldest first
  int load_stage_ = 0;
  int store_stage_ = 0;
  uint32_t round_ = 0;  // parity of the stored stage's barrier
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
