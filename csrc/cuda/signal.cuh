#ifndef JAX_EP_CSRC_CUDA_SIGNAL_CUH_
#define JAX_EP_CSRC_CUDA_SIGNAL_CUH_

#include <cstdint>

#include "csrc/cuda/kernels.h"
#include "csrc/cuda/ptx/memory.cuh"
#include "csrc/cuda/workspace.h"

// How ranks wait for one another. docs/protocol.md has the argument; in short:
//
// Operations of a group are numbered by `epoch`, which lives in device memory. An operation begins
// when every peer has left the one before (`done`), so that all of the workspace is free; it ends
// by telling the peers so. In between, `ready[peer][block]` counts what that block of the peer has
// put in place in this epoch.
namespace jax_ep::cuda {

// A signal word: epoch, what is being run, and a count.
struct Signal {
  static constexpr int kCountBits = 22;
  static constexpr int kTagBits = 10;

  uint32_t epoch;
  uint32_t tag;
  uint32_t count;

  __device__ __forceinline__ uint64_t Encode() const {
    return static_cast<uint64_t>(epoch) << 32 | tag << kCountBits | count;
  }
  static __device__ __forceinline__ Signal Decode(uint64_t word) {
    const auto low = static_cast<uint32_t>(word);
    return {static_cast<uint32_t>(word >> 32), low >> kCountBits, low & ((1u << kCountBits) - 1)};
  }
};

// One operation in flight, as one thread block sees it. `site` is what the ranks must agree on.
class Operation {
 public:
  __device__ __forceinline__ Operation(const Common& common, Op op, uint32_t site)
      : workspace_(common.workspace),
        position_(common.position),
        op_(op),
        tag_(static_cast<uint32_t>(op) << (Signal::kTagBits - 2) |
             site % ((1u << (Signal::kTagBits - 2)) - 1)) {}

  __device__ __forceinline__ Control* Of(int32_t rank) const {
    return reinterpret_cast<Control*>(workspace_.base[rank]);
  }
  __device__ __forceinline__ Control* Own() const { return Of(workspace_.rank); }
  __device__ __forceinline__ int32_t num_ranks() const { return workspace_.layout.num_ranks; }

  // Waits until every peer has left the operation before. False, for all threads of the block, if
  // the group is closed or has failed: then outputs are to be poisoned and nothing else is to be
  // touched. All threads of the block call it.
  __device__ __forceinline__ bool Enter() {
    const RankState& state = *workspace_.state;
    epoch_ = __ldcg(&state.epoch) + 1;
    if (__ldcg(&state.group) != workspace_.group) return false;  // the same for all threads
    const uint64_t word = Signal{epoch_, tag_, 0}.Encode();
    if (blockIdx.x == 0) {
      for (int32_t peer = threadIdx.x; peer < num_ranks(); peer += blockDim.x) {
        *reinterpret_cast<volatile uint64_t*>(&Of(peer)->running[workspace_.rank]) = word;
      }
    }
    bool good = true;
    if (threadIdx.x + 1 == blockDim.x) {
      const int32_t rank = __ldg(&position_[1]);
      if (rank != workspace_.rank) Fail(Phase::kPosition, rank, workspace_.rank, rank);
      good = !Failed();
    }
    for (int32_t peer = threadIdx.x; peer < num_ranks(); peer += blockDim.x) {
      good &= WaitUntil(Phase::kEnter, peer, epoch_ - 1, &Own()->done[peer], [this](uint64_t word) {
        return static_cast<int32_t>(Signal::Decode(word).epoch - (epoch_ - 1)) >= 0;
      });
    }
    return __syncthreads_and(good);
  }

  // Tells `peer` that this block has put `count` things in place for it. What the calling thread has
  // seen written, by itself or through a barrier, is visible to whoever sees the count. Where there
  // is traffic this takes 5 to 10 us: see Producers.
  __device__ __forceinline__ void Ready(int32_t peer, uint32_t count) const {
    ptx::FenceSys();
    ptx::StoreReleaseSys(&Of(peer)->ready[workspace_.rank][blockIdx.x],
                         Signal{epoch_, tag_, count}.Encode());
  }

  // Waits for that count from block `block` of `peer`; false if it must not be believed.
  __device__ __forceinline__ bool WaitReady(int32_t peer, int32_t block, uint32_t count) {
    return WaitUntil(Phase::kReady, peer, Signal{epoch_, tag_, count}.Encode(),
                     &Own()->ready[peer][block], [&](uint64_t word) {
                       const Signal seen = Signal::Decode(word);
                       return seen.epoch == epoch_ && seen.tag == tag_ && seen.count >= count;
                     });
  }

  // The next of this operation's tasks, from 0. Who takes which decides nothing but when the work is
  // done.
  __device__ __forceinline__ uint32_t TakeTask() const {
    return atomicAdd(&workspace_.state->tasks, 1);
  }

  // Waits for all blocks of this grid. All threads of the block call it.
  __device__ __forceinline__ void GridBarrier() {
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t* const barrier = &workspace_.state->barrier;
      const uint32_t old = ptx::AddAcqRelGpu(barrier, 1);
      const uint32_t target = old / gridDim.x * gridDim.x + gridDim.x;
      const uint64_t start = ptx::GlobalTimer();
      uint32_t seen;
      while (static_cast<int32_t>((seen = ptx::LoadAcquireGpu(barrier)) - target) < 0) {
        if (!Expired(start)) continue;
        Fail(Phase::kBarrier, workspace_.rank, target, seen);
        break;
      }
    }
    __syncthreads();
  }

  // Ends the operation for this block; the last block tells the peers. All threads call it.
  __device__ __forceinline__ void Leave() {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
      RankState* const state = workspace_.state;
      last = ptx::AddAcqRelGpu(&state->blocks_ended, 1) + 1 == gridDim.x;
      if (last) {
        state->blocks_ended = 0;
        state->tasks = 0;
        state->epoch = epoch_;
      }
    }
    __syncthreads();
    if (!last) return;
    for (int32_t peer = threadIdx.x; peer < num_ranks(); peer += blockDim.x) {
      ptx::FenceSys();
      ptx::StoreReleaseSys(&Of(peer)->done[workspace_.rank], Signal{epoch_, tag_, 0}.Encode());
    }
  }

  // Whether this rank has given up, now or before, or a peer has: nothing may be believed any more.
  __device__ __forceinline__ bool Failed() {
    const uint32_t failed = *reinterpret_cast<volatile uint32_t*>(&Own()->failed);
    const int32_t rank = static_cast<int32_t>(failed) - 1;
    if (failed != 0 && rank != workspace_.rank) Fail(Phase::kPeerFailed, rank, 0, 0);
    return failed != 0;
  }

  // Notes this rank's first failure for the host, and tells all ranks, itself included.
  __device__ __noinline__ void Fail(Phase phase, int32_t peer, uint64_t expected, uint64_t seen) {
    if (atomicExch(&workspace_.state->reported, 1u) != 0) return;
    ErrorRecord* error = workspace_.error;
    error->op = static_cast<int32_t>(op_);
    error->phase = static_cast<int32_t>(phase);
    error->rank = workspace_.rank;
    error->peer = peer;
    error->expected = expected;
    error->seen = seen;
    ptx::FenceSys();
    *reinterpret_cast<volatile int32_t*>(&error->set) = 1;
    const uint32_t failed = phase == Phase::kPeerFailed ? peer + 1 : workspace_.rank + 1;
    for (int32_t rank = 0; rank < num_ranks(); ++rank) {
      *reinterpret_cast<volatile uint32_t*>(&Of(rank)->failed) = failed;
    }
    ptx::FenceSys();
  }

 private:
  __device__ __forceinline__ bool Expired(uint64_t start) {
    return ptx::GlobalTimer() - start > workspace_.timeout_ns || Failed();
  }

  template <typename Condition>
  __device__ __forceinline__ bool WaitUntil(Phase phase, int32_t peer, uint64_t expected,
                                            const uint64_t* word, Condition condition) {
    if (condition(ptx::LoadAcquireSys(word))) return true;
    const uint64_t start = ptx::GlobalTimer();
    while (true) {
      const uint64_t value = ptx::LoadAcquireSys(word);
      if (condition(value)) return true;
      const Signal running =
          Signal::Decode(*reinterpret_cast<volatile uint64_t*>(&Own()->running[peer]));
      if (running.epoch == epoch_ && running.tag != tag_) {
        Fail(Phase::kMismatch, peer, tag_, running.tag);
        return false;
      }
      if (Expired(start)) {
        Fail(phase, peer, expected, value);
        return false;
      }
    }
  }

  const Workspace& workspace_;
  const int32_t* const position_;
  const Op op_;
  const uint32_t tag_;
  uint32_t epoch_ = 0;
};

// Warps of a block that put things in place for other ranks, and the one warp that tells those: it
// pays for the fences, which would otherwise take most of the producers' time. The block's things
// are numbered; warp w of n makes the numbers w, w + n, ...
class Producers {
 public:
  static constexpr int kMaxWarps = 16;
  struct Shared {
    uint32_t finished[kMaxWarps];  // numbers by each warp
  };

  // All threads of the block call this together, with the same `shared`.
  __device__ Producers(Shared* shared, int num_warps, uint32_t total)
      : finished_(shared->finished), num_warps_(num_warps), total_(total) {
    if (threadIdx.x < kMaxWarps) finished_[threadIdx.x] = 0;
    __syncthreads();
  }

  // By producer warp `warp`: calls `make` with each of its numbers.
  template <typename Make>
  __device__ __forceinline__ void Produce(int warp, Make make) {
    uint32_t finished = 0;
    for (uint32_t number = warp; number < total_; number += num_warps_) {
      make(number);
      __syncwarp();
      if (threadIdx.x % 32 != 0) continue;
      __threadfence_block();
      *const_cast<volatile uint32_t*>(&finished_[warp]) = ++finished;
    }
  }

  // By the publishing warp: tells all ranks, or all but this one, as numbers are finished, how many
  // there are without a gap.
  __device__ __forceinline__ void Publish(const Operation& operation, int32_t except) {
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t published = 0; published < total_;) {
      uint32_t next = total_;
      if (lane < num_warps_) {
        next = *const_cast<volatile uint32_t*>(&finished_[lane]) * num_warps_ + lane;
      }
      next = min(total_, __reduce_min_sync(~0u, next));
      if (next == published) {
        __nanosleep(100);
        continue;
      }
      __syncwarp();
      for (int32_t peer = lane; peer < operation.num_ranks(); peer += 32) {
        if (peer != except) operation.Ready(peer, next);
      }
      published = next;
    }
  }

 private:
  uint32_t* const finished_;
  const uint32_t num_warps_;
  const uint32_t total_;
};

// How many of `count` things, given out to blocks in turn, this block has.
__device__ __forceinline__ uint32_t BlockShare(int32_t count) {
  const auto block = static_cast<int32_t>(blockIdx.x);
  return count <= block ? 0 : (count - block - 1) / static_cast<int32_t>(gridDim.x) + 1;
}

// Calls `work` with those of an operation's `count` tasks that this warp gets to take.
template <typename Work>
__device__ __forceinline__ void ForEachTask(const Operation& operation, int64_t count, Work work) {
  auto take = [&] { return threadIdx.x % 32 == 0 ? operation.TakeTask() : 0; };
  uint32_t task = __shfl_sync(~0u, take(), 0);
  while (task < count) {
    const uint32_t next = take();  // arrives while this one is worked on
    work(static_cast<int32_t>(task));
    task = __shfl_sync(~0u, next, 0);
  }
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_SIGNAL_CUH_
