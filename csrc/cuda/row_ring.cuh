#ifndef JAX_EP_CSRC_CUDA_ROW_RING_CUH_
#define JAX_EP_CSRC_CUDA_ROW_RING_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/cuda/ptx/async_copy.cuh"
#include "csrc/cuda/ptx/tma.cuh"

// A warp's queue of row pieces, which travel into shared memory while earlier ones are being used.
// They come and go in batches, because waiting for one takes as many instructions as adding it. All
// lanes make all calls:
//
//   Load(from, bytes)  asks for a batch: each of the lanes below kBatch names a piece, or none by 0
//                      bytes; or LoadNothing(). kStages - 1 loads, none more, lie between a Front
//                      and the load that it waits for.
//   Front()            waits for the oldest batch and gives its address; its pieces are kPieceBytes
//                      apart.
//   Pop()              is done with it.
//
// Addresses and sizes are multiples of 16 bytes.
namespace jax_ep::cuda {

// Pieces of a batch, and batches for which there is room.
template <int kBatchPieces, int kBatches>
struct RingShape {
  static constexpr int kPieceBytes = 2048;
  static constexpr int kBatch = kBatchPieces;
  static constexpr int kBatchBytes = kBatch * kPieceBytes;
  static constexpr int kStages = kBatches;
  static constexpr int kLoadsAhead = kStages - 1;
};

// By the copy engine (sm_90).
template <int kBatchPieces, int kBatches>
class BulkRing : public RingShape<kBatchPieces, kBatches> {
 public:
  using Shape = RingShape<kBatchPieces, kBatches>;
  using Shape::kBatch, Shape::kBatchBytes, Shape::kPieceBytes, Shape::kStages;

  // The copy engine is slower where slots are not aligned to 128 bytes.
  static constexpr int64_t kSharedBytes = kStages * kBatchBytes + 128;

  __device__ explicit BulkRing(std::byte* shared)
      : batches_(shared),
        barriers_(reinterpret_cast<uint64_t*>(shared + kStages * kBatchBytes)) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < kStages; ++i) ptx::BarrierInit(&barriers_[i], kBatch);
      ptx::FenceBarrierInit();
    }
    __syncwarp();
#endif
  }

  // Leaves its shared memory to others.
  __device__ ~BulkRing() {
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < kStages; ++i) ptx::BarrierInvalidate(&barriers_[i]);
    }
    ptx::FenceProxyAsyncShared();
    __syncwarp();
#endif
  }
  BulkRing(const BulkRing&) = delete;

  __device__ __forceinline__ void Load(const std::byte* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    const uint32_t lane = threadIdx.x % 32;
    if (lane < kBatch) {
      ptx::BarrierExpect(&barriers_[back_], bytes);
      if (bytes != 0) {
        ptx::BulkLoad(batches_ + back_ * kBatchBytes + lane * kPieceBytes, from,
                      bytes, &barriers_[back_]);
      }
    }
    back_ = back_ + 1 == kStages ? 0 : back_ + 1;
#endif
  }
  __device__ __forceinline__ void LoadNothing() {}

  __device__ __forceinline__ const std::byte* Front() {
#if __CUDA_ARCH__ >= 900
    ptx::BarrierWait(&barriers_[front_], round_);
#endif
    return batches_ + front_ * kBatchBytes;
  }

  __device__ __forceinline__ void Pop() {
    // The next load into the batch's place is by another proxy than the reads from it.
    ptx::FenceProxyAsyncShared();
    __syncwarp();
    front_ = front_ + 1 == kStages ? 0 : front_ + 1;
    round_ ^= front_ == 0;
  }

 private:
  std::byte* const batches_;
  uint64_t* const barriers_;
  int front_ = 0;
  int back_ = 0;
  uint32_t round_ = 0;  // parity of the front batch's barrier
};

// By asynchronous copies of single vectors (sm_80).
template <int kBatchPieces, int kBatches>
class VectorRing : public RingShape<kBatchPieces, kBatches> {
 public:
  using Shape = RingShape<kBatchPieces, kBatches>;
  using Shape::kBatch, Shape::kBatchBytes, Shape::kPieceBytes, Shape::kStages;

  static constexpr int64_t kSharedBytes = kStages * kBatchBytes;

  __device__ explicit VectorRing(std::byte* shared) : batches_(shared) {}

  __device__ __forceinline__ void Load(const std::byte* from, uint32_t bytes) {
    for (int i = 0; i < kBatch; ++i) {
      std::byte* const to = batches_ + back_ * kBatchBytes + i * kPieceBytes;
      const auto* const piece = reinterpret_cast<const std::byte*>(
          __shfl_sync(~0u, reinterpret_cast<uint64_t>(from), i));
      const uint32_t end = __shfl_sync(~0u, bytes, i);
      for (uint32_t offset = threadIdx.x % 32 * 16; offset < end; offset += 32 * 16) {
        ptx::AsyncCopy16(to + offset, piece + offset);
      }
    }
    ptx::AsyncCommit();
    back_ = back_ + 1 == kStages ? 0 : back_ + 1;
  }
  __device__ __forceinline__ void LoadNothing() { ptx::AsyncCommit(); }

  __device__ __forceinline__ const std::byte* Front() {
    ptx::AsyncWait<kStages - 1>();
    __syncwarp();  // each lane has waited for what it copied itself
    return batches_ + front_ * kBatchBytes;
  }

  __device__ __forceinline__ void Pop() {
    __syncwarp();
    front_ = front_ + 1 == kStages ? 0 : front_ + 1;
  }

 private:
  std::byte* const batches_;
  int front_ = 0;
  int back_ = 0;
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_ROW_RING_CUH_
