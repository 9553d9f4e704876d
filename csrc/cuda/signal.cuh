#ifndef JAX_EP_CSRC_CUDA_SIGNAL_CUH_
#define JAX_EP_CSRC_CUDA_SIGNAL_CUH_

#include <cstdint>

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
  uint32_t epoch;
  uint16_t tag;
  uint16_t count;

  __device__ __forceinline__ uint64_t Encode() const {
    return static_cast<uint64_t>(epoch) << 32 | static_cast<uint32_t>(tag) << 16 | count;
  }
  static __device__ __forceinline__ Signal Decode(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint16_t>(word >> 16),
            static_cast<uint16_t>(word)};
  }
};

// One operation in flight, as one thread block sees it.
class Operation {
 public:
  __device__ __forceinline__ Operation(const Workspace& workspace, Op op, uint32_t site,
                                       const int32_t* position)
      : workspace_(workspace), op_(op) {
    Control* control = Own();
    epoch_ = control->epoch + 1;
    tag_ = static_cast<uint16_t>(static_cast<uint32_t>(op) << 12 | (site & 0xfff));
    if (position[1] != workspace.rank) Fail(Phase::kPosition, position[1], workspace.rank, position[1]);
  }

  __device__ __forceinline__ Control* Of(int32_t rank) const {
    return reinterpret_cast<Control*>(workspace_.base[rank]);
  }
  __device__ __forceinline__ Control* Own() const { return Of(workspace_.rank); }
  __device__ __forceinline__ int32_t num_ranks() const { return workspace_.layout.num_ranks; }

  // Whether this rank has failed, now or before: nothing may be believed any more.
  __device__ __forceinline__ bool Failed() const {
    return *reinterpret_cast<volatile uint32_t*>(&Own()->failed) != 0;
  }

  // Waits until every peer has left the operation before. All threads of the block call it.
  __device__ __forceinline__ void Enter() {
    for (int32_t peer = threadIdx.x; peer < num_ranks(); peer += blockDim.x) {
      const uint64_t* word = &Own()->done[peer];
      WaitUntil(Phase::kEnter, peer, epoch_ - 1, word, [this](uint64_t value) {
        return static_cast<int32_t>(Signal::Decode(value).epoch - (epoch_ - 1)) >= 0;
      });
    }
    __syncthreads();
  }

  // Tells `peer` that this block has put `count` things in place for it. What the calling thread
  // has seen written, by itself or through a barrier, is visible to whoever sees the count.
  __device__ __forceinline__ void Ready(int32_t peer, int32_t count) const {
    ptx::FenceSys();
    ptx::StoreReleaseSys(&Of(peer)->ready[workspace_.rank][blockIdx.x],
                         Signal{epoch_, tag_, static_cast<uint16_t>(count)}.Encode());
  }

  // Waits for that count from block `block` of `peer`; false if it must not be believed.
  __device__ __forceinline__ bool WaitReady(int32_t peer, int32_t block, int32_t count) {
    bool mismatch = false;
    const bool came = WaitUntil(
        Phase::kReady, peer, Signal{epoch_, tag_, static_cast<uint16_t>(count)}.Encode(),
        &Own()->ready[peer][block], [&](uint64_t value) {
          const Signal seen = Signal::Decode(value);
          mismatch = seen.epoch == epoch_ && seen.tag != tag_;
          return mismatch || (seen.epoch == epoch_ && seen.count >= count);
        });
    if (mismatch) {
      Fail(Phase::kMismatch, peer, tag_, Signal::Decode(Own()->ready[peer][block]).tag);
    }
    return came && !mismatch;
  }

  // Waits for all blocks of this grid. All threads of the block call it.
  __device__ __forceinline__ void GridBarrier() {
    __syncthreads();
    if (threadIdx.x == 0) {
      const uint32_t old = ptx::AddAcqRelGpu(&Own()->barrier, 1);
      const uint32_t target = old / gridDim.x * gridDim.x + gridDim.x;
      const uint64_t start = ptx::GlobalTimer();
      while (static_cast<int32_t>(ptx::LoadAcquireGpu(&Own()->barrier) - target) < 0) {
        if (Expired(start)) {
          Fail(Phase::kBarrier, workspace_.rank, target, Own()->barrier);
          break;
        }
      }
    }
    __syncthreads();
  }

  // Ends the operation for this block; the last block tells the peers. All threads call it.
  __device__ __forceinline__ void Leave() {
    __syncthreads();
    if (threadIdx.x != 0) return;
    Control* control = Own();
    if (ptx::AddAcqRelGpu(&control->blocks_ended, 1) + 1 != gridDim.x) return;
    control->blocks_ended = 0;
    control->epoch = epoch_;
    ptx::FenceSys();
    for (int32_t peer = 0; peer < num_ranks(); ++peer) {
      ptx::StoreReleaseSys(&Of(peer)->done[workspace_.rank], Signal{epoch_, tag_, 0}.Encode());
    }
  }

  // Notes the first failure for the host and stops this rank from believing anything.
  __device__ __noinline__ void Fail(Phase phase, int32_t peer, uint64_t expected, uint64_t seen) {
    if (atomicExch(&Own()->failed, 1u) != 0) return;
    ErrorRecord* error = workspace_.error;
    error->op = static_cast<int32_t>(op_);
    error->phase = static_cast<int32_t>(phase);
    error->rank = workspace_.rank;
    error->peer = peer;
    error->expected = expected;
    error->seen = seen;
    ptx::FenceSys();
    *reinterpret_cast<volatile int32_t*>(&error->set) = 1;
  }

 private:
  __device__ __forceinline__ bool Expired(uint64_t start) const {
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
      if (Expired(start)) {
        Fail(phase, peer, expected, value);
        return false;
      }
    }
  }

  const Workspace& workspace_;
  const Op op_;
  uint32_t epoch_;
  uint16_t tag_;
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_SIGNAL_CUH_
