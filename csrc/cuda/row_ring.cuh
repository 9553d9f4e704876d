#ifndef JAX_EP_CSRC_CUDA_ROW_RING_CUH_
#define JAX_EP_CSRC_CUDA_ROW_RING_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/cuda/ptx/async_copy.cuh"
#include "csrc/cuda/ptx/tma.cuh"

// A warp's queue of row pieces, which travel into slots of shared memory while earlier ones are
// being summed. All lanes make all calls:
//
//   Load(from, bytes)  asks for a piece; or LoadNothing(). At most kSlots - 1 loads lie between a
//                      Front and the load that it waits for.
//   Front()            waits for the oldest piece and gives its address; lane l may read its vectors
//                      l, l + 32, ...
//   Pop()              is done with it.
//
// Addresses and sizes are multiples of 16 bytes.
namespace jax_ep::cuda {

inline constexpr int kRingSlots = 6;
inline constexpr int kRingPieceBytes = 2048;

// By the copy engine (sm_90).
class BulkRing {
 public:
  // The copy engine is slower where slots are not aligned to 128 bytes.
  static constexpr int64_t kSharedBytes = kRingSlots * kRingPieceBytes + 128;

  __device__ explicit BulkRing(std::byte* shared)
      : slots_(shared),
        barriers_(reinterpret_cast<uint64_t*>(shared + kRingSlots * kRingPieceBytes)) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < kRingSlots; ++i) ptx::BarrierInit(&barriers_[i], 1);
      ptx::FenceBarrierInit();
    }
    __syncwarp();
#endif
  }

  __device__ __forceinline__ void Load(const std::byte* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
      ptx::BarrierExpect(&barriers_[back_], bytes);
      ptx::BulkLoad(slots_ + back_ * kRingPieceBytes, from, bytes, &barriers_[back_]);
    }
    back_ = back_ + 1 == kRingSlots ? 0 : back_ + 1;
#endif
  }
  __device__ __forceinline__ void LoadNothing() {}

  __device__ __forceinline__ const std::byte* Front() {
#if __CUDA_ARCH__ >= 900
    ptx::BarrierWait(&barriers_[front_], round_);
#endif
    return slots_ + front_ * kRingPieceBytes;
  }

  __device__ __forceinline__ void Pop() {
    // The next load into the slot is by another proxy than the reads from it.
    ptx::FenceProxyAsyncShared();
    __syncwarp();
    front_ = front_ + 1 == kRingSlots ? 0 : front_ + 1;
    round_ ^= front_ == 0;
  }

 private:
  std::byte* const slots_;
  uint64_t* const barriers_;
  int front_ = 0;
  int back_ = 0;
  uint32_t round_ = 0;  // parity of the front slot's barrier
};

// By asynchronous copies of single vectors (sm_80): each lane copies what it reads itself.
class VectorRing {
 public:
  static constexpr int64_t kSharedBytes = kRingSlots * kRingPieceBytes;

  __device__ explicit VectorRing(std::byte* shared) : slots_(shared) {}

  __device__ __forceinline__ void Load(const std::byte* from, uint32_t bytes) {
    std::byte* const slot = slots_ + back_ * kRingPieceBytes;
    for (uint32_t offset = threadIdx.x % 32 * 16; offset < bytes; offset += 32 * 16) {
      ptx::AsyncCopy16(slot + offset, from + offset);
    }
    ptx::AsyncCommit();
    back_ = back_ + 1 == kRingSlots ? 0 : back_ + 1;
  }
  __device__ __forceinline__ void LoadNothing() { ptx::AsyncCommit(); }

  __device__ __forceinline__ const std::byte* Front() {
    ptx::AsyncWait<kRingSlots - 1>();
    return slots_ + front_ * kRingPieceBytes;
  }

  __device__ __forceinline__ void Pop() { front_ = front_ + 1 == kRingSlots ? 0 : front_ + 1; }

 private:
  std::byte* const slots_;
  int front_ = 0;
  int back_ = 0;
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_ROW_RING_CUH_
