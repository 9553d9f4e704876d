#ifndef JAX_EP_CSRC_CUDA_PUBLISHER_CUH_
#define JAX_EP_CSRC_CUDA_PUBLISHER_CUH_

#include <cstdint>

#include "csrc/cuda/ptx/memory.cuh"

// Some warps of a block put things in place for other ranks, and one warp tells those. It alone
// waits for fences at system scope: they take 5 to 10 us where there is traffic, which would be most
// of the producers' time.
namespace jax_ep::cuda {

class Publisher {
 public:
  struct Shared {
    int32_t queue[32];   // 1 + what is finished and not yet published; 0 where nothing is
    uint32_t tail;       // places taken so far
    uint32_t head;       // places emptied so far
    uint32_t producers;  // warps that may still finish things
  };

  // All threads of the block call this together.
  __device__ Publisher(Shared* shared, uint32_t num_producers) : shared_(shared) {
    if (threadIdx.x < 32) shared->queue[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
      shared->tail = 0;
      shared->head = 0;
      shared->producers = num_producers;
    }
    __syncthreads();
  }

  // By a producer warp: `thing` is in place.
  __device__ __forceinline__ void Finished(int32_t thing) {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    __threadfence_block();
    const uint32_t place = atomicAdd(&shared_->tail, 1);
    // The publisher may be 32 things behind.
    while (place - Read(&shared_->head) >= 32) __nanosleep(100);
    atomicExch(&shared_->queue[place % 32], thing + 1);
  }

  // By a producer warp that has finished all of its things.
  __device__ __forceinline__ void End() {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    __threadfence_block();
    atomicSub(&shared_->producers, 1);
  }

  // By the publishing warp, until all producers have ended: calls `tell(thing)` on one lane for
  // each. What its producer had written is visible to whoever sees a word stored there.
  template <typename Tell>
  __device__ __forceinline__ void Run(Tell tell) {
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t head = 0;;) {
      const uint32_t producers = lane == 0 ? Read(&shared_->producers) : 0;
      __threadfence_block();
      int32_t* const place = &shared_->queue[(head + lane) % 32];
      const int32_t thing = Read(place) - 1;
      const uint32_t finished = __ballot_sync(~0u, thing >= 0);
      const uint32_t count = finished == ~0u ? 32 : __ffs(~finished) - 1;
      if (count == 0) {
        if (__shfl_sync(~0u, producers, 0) == 0) return;
        __nanosleep(100);
        continue;
      }
      if (lane < count) atomicExch(place, 0);
      head += count;
      ptx::FenceSys();
      __syncwarp();
      if (lane == 0) atomicExch(&shared_->head, head);
      if (lane < count) tell(thing);
      __syncwarp();
    }
  }

 private:
  // Atomically, as all accesses are between threads that no barrier orders.
  template <typename T>
  static __device__ __forceinline__ T Read(T* word) {
    return atomicOr(word, 0);
  }

  Shared* const shared_;
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_PUBLISHER_CUH_
