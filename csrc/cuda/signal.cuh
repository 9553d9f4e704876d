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
// by telling the peers so. In between, `ready[peer][token]` says that the peer has put what it owes
// for the token in place in this epoch.
namespace jax_ep::cuda {

__device__ __forceinline__ Control* ControlOf(const Workspace& workspace, int32_t rank) {
  return reinterpret_cast<Control*>(workspace.base[rank]);
}

// A signal word: epoch, and what is being run.
struct Signal {
  static constexpr int kOpShift = 28;  // of the tag; below it is what the ranks must agree on

  uint32_t epoch;
  uint32_t tag;

  __device__ __forceinline__ uint64_t Encode() const {
    return static_cast<uint64_t>(epoch) << 32 | tag;
  }
  static __device__ __forceinline__ Signal Decode(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word)};
  }
};

// What a word is waited to be: equal in the bits of a mask.
struct Equals {
  static constexpr uint64_t kEpoch = ~uint64_t{0} << 32;
  static constexpr uint64_t kAll = ~uint64_t{0};

  uint64_t expected;
  uint64_t mask;
  __device__ __forceinline__ bool operator()(uint64_t word) const {
    return ((word ^ expected) & mask) == 0;
  }
  __device__ __forceinline__ uint64_t ForError() const { return expected; }
};

// Or a signal at most `behind` epochs before this one; as distances, which stay right when epochs
// wrap around.
struct HasLeft {
  uint32_t epoch;
  uint32_t behind;
  __device__ __forceinline__ bool operator()(uint64_t word) const {
    const uint32_t distance = epoch - Signal::Decode(word).epoch;
    return static_cast<int32_t>(distance) <= 0 || distance <= behind;
  }
  __device__ __forceinline__ uint64_t ForError() const { return epoch; }
};

// How an operation fails. These are no members of Operation: what is not inlined would force that out
// of registers.

// Notes a rank's first failure for the host, and tells all ranks, itself included.
inline __device__ __noinline__ void Fail(const Workspace& workspace, Op op, Phase phase,
                                         int32_t peer, uint64_t expected, uint64_t seen) {
  if (atomicExch(&workspace.state->reported, 1u) != 0) return;
  ErrorRecord* error = workspace.error;
  error->op = static_cast<int32_t>(op);
  error->phase = static_cast<int32_t>(phase);
  error->rank = workspace.rank;
  error->peer = peer;
  error->expected = expected;
  error->seen = seen;
  ptx::FenceSys();
  *reinterpret_cast<volatile int32_t*>(&error->set) = 1;
  const uint32_t failed = phase == Phase::kPeerFailed ? peer + 1 : workspace.rank + 1;
  for (int32_t rank = 0; rank < workspace.layout.num_ranks; ++rank) {
    *reinterpret_cast<volatile uint32_t*>(&ControlOf(workspace, rank)->failed) = failed;
  }
  ptx::FenceSys();
}

// Whether this rank has given up, now or before, or a peer has: nothing may be believed any more.
__device__ __forceinline__ bool Failed(const Workspace& workspace, Op op) {
  const Control* const own = ControlOf(workspace, workspace.rank);
  const uint32_t failed = *reinterpret_cast<const volatile uint32_t*>(&own->failed);
  const int32_t rank = static_cast<int32_t>(failed) - 1;
  if (failed != 0 && rank != workspace.rank) Fail(workspace, op, Phase::kPeerFailed, rank, 0, 0);
  return failed != 0;
}

__device__ __forceinline__ bool Expired(const Workspace& workspace, Op op, uint64_t start) {
  return ptx::GlobalTimer() - start > workspace.timeout_ns || Failed(workspace, op);
}

// Waits until `awaited` holds of a word that `peer` writes, and gives what the word is at the end:
// `awaited` does not hold of that if it must not be believed. `begun` is the word by which the peer
// says what it runs: if that is not `mine`, in the same epoch, waiting is in vain.
// Not inlined: a kernel that runs for microseconds takes as long as its instructions take to load.
template <typename Awaited>
__device__ __noinline__ uint64_t Poll(const Workspace& workspace, Op op, Phase phase,
                                      int32_t peer, const uint64_t* word, Awaited awaited,
                                      const uint64_t* begun, Signal mine) {
  const uint64_t start = ptx::GlobalTimer();
  while (true) {
    const uint64_t seen = ptx::LoadAcquireSys(word);
    if (awaited(seen)) return seen;
    const Signal running = Signal::Decode(*reinterpret_cast<const volatile uint64_t*>(begun));
    if (running.epoch == mine.epoch && running.tag != mine.tag) {
      Fail(workspace, op, Phase::kMismatch, peer, mine.tag, running.tag);
      return seen;
    }
    if (Expired(workspace, op, start)) {
      // A word with data does not say what the peer runs.
      const uint64_t last = phase == Phase::kReady ? running.Encode() : seen;
      Fail(workspace, op, phase, peer, awaited.ForError(), last);
      return seen;
    }
  }
}

// One operation in flight, as one thread block sees it. `site` is what the ranks must agree on.
class Operation {
 public:
  __device__ __forceinline__ Operation(const Common& common, Op op, uint32_t site)
      : workspace_(common.workspace),
        position_(common.position),
        op_(op),
        tag_(static_cast<uint32_t>(op) << Signal::kOpShift |
             (site & ((1u << Signal::kOpShift) - 1))) {}

  __device__ __forceinline__ Control* Of(int32_t rank) const {
    return ControlOf(workspace_, rank);
  }
  __device__ __forceinline__ Control* Own() const { return Of(workspace_.rank); }
  __device__ __forceinline__ int32_t num_ranks() const { return workspace_.layout.num_ranks; }

  __device__ __forceinline__ uint32_t epoch() const { return epoch_; }
  __device__ __forceinline__ uint32_t tag() const { return tag_; }

  // Waits until every peer has left the operation before. False, for all threads of the block, if
  // the group is closed or has failed: then outputs are to be poisoned and nothing else is to be
  // touched. All threads of the block call it.
  __device__ __forceinline__ bool Enter() {
    return EnterIf([this](const RankState&) { return PeersLeft(epoch_ - 1); });
  }

  // The same, with `check` for what a thread waits for; it is given the rank's state.
  template <typename Check>
  __device__ __forceinline__ bool EnterIf(Check check) {
    // Once for all threads: loads of the same words by all of a grid's queue up for a microsecond.
    __shared__ RankState state;
    if (threadIdx.x < sizeof(state) / sizeof(uint4)) {
      reinterpret_cast<uint4*>(&state)[threadIdx.x] =
          __ldcg(reinterpret_cast<const uint4*>(workspace_.state) + threadIdx.x);
    }
    const bool last = threadIdx.x + 1 == blockDim.x;
    const int32_t subgroup = last ? __ldg(&position_[0]) : 0;
    const int32_t rank = last ? __ldg(&position_[1]) : 0;
    __syncthreads();
    epoch_ = state.epoch + 1;
    if (state.group != workspace_.group) return false;  // its workspace may be gone
    const uint64_t word = Signal{epoch_, tag_}.Encode();
    if (blockIdx.x == 0) {
      for (int32_t peer = threadIdx.x; peer < num_ranks(); peer += blockDim.x) {
        *reinterpret_cast<volatile uint64_t*>(&Of(peer)->running[workspace_.rank]) = word;
      }
    }
    bool good = true;
    if (last) {
      good = subgroup == workspace_.subgroup && rank == workspace_.rank;
      if (!good) Fail(Phase::kPosition, subgroup, workspace_.rank, rank);
      good &= !Failed();
    }
    good &= check(state);
    return __syncthreads_and(good);
  }

  // Waits, as this thread's part of the block, until every peer has left `operation`, one before
  // this.
  __device__ __forceinline__ bool PeersLeft(uint32_t operation) {
    const uint32_t before = epoch_ - 1;
    bool left = true;
    for (int32_t peer = threadIdx.x; peer < num_ranks(); peer += blockDim.x) {
      const HasLeft awaited{before, before - operation};
      left &= awaited(WaitUntil(Phase::kEnter, peer, &Own()->done[peer], awaited));
    }
    return left;
  }

  // Tells `peer` that what this rank owes it for a token is in place: what the calling thread has
  // seen written before its last FenceSys.
  __device__ __forceinline__ void Ready(int32_t peer, int32_t token) const {
    ptx::StoreRelaxedSys(ReadyWord(peer, workspace_.rank, token), Signal{epoch_, tag_}.Encode());
  }

  // Waits for that of `peer`; false if it must not be believed.
  __device__ __forceinline__ bool WaitReady(int32_t peer, int32_t token) {
    const Equals awaited{Signal{epoch_, tag_}.Encode(), Equals::kAll};
    return awaited(
        WaitUntil(Phase::kReady, peer, ReadyWord(workspace_.rank, peer, token), awaited));
  }

  // A word that says by itself in which operation it was written, so that it needs neither a fence
  // nor a signal: epoch and value.
  __device__ __forceinline__ uint64_t Word(int32_t value) const {
    return Signal{epoch_, static_cast<uint32_t>(value)}.Encode();
  }

  // The value of a word that `peer` writes; `seen` is what it was a moment ago. False if it must not
  // be believed.
  __device__ __forceinline__ bool WaitWord(int32_t peer, const uint64_t* word, uint64_t seen,
                                           int32_t* value) {
    const Equals awaited{Signal{epoch_, tag_}.Encode(), Equals::kEpoch};
    if (!awaited(seen)) seen = WaitUntil(Phase::kReady, peer, word, awaited);
    *value = static_cast<int32_t>(Signal::Decode(seen).tag);
    return awaited(seen);
  }

  // The next task of a queue, from 0. Who takes which decides nothing but when the work is done.
  __device__ __forceinline__ uint32_t TakeTask(int queue) const {
    return atomicAdd(&workspace_.state->tasks[queue], 1);
  }

  // Waits until so many tasks of a queue have been taken. All lanes of a warp call it.
  __device__ __forceinline__ void WaitUntilTaken(int queue, int64_t count) const {
    const auto* const taken =
        reinterpret_cast<const volatile uint32_t*>(&workspace_.state->tasks[queue]);
    while (count > 0 && *taken < count) __nanosleep(200);
    __syncwarp();
  }

  // Waits for all blocks of this grid, once in an operation. All threads of the block call it.
  __device__ __forceinline__ void GridBarrier() {
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t* const barrier = &workspace_.state->barrier;
      ptx::AddAcqRelGpu(barrier, 1);
      const uint64_t start = ptx::GlobalTimer();
      uint32_t seen;
      while ((seen = ptx::LoadAcquireGpu(barrier)) < gridDim.x) {
        if (!Expired(workspace_, op_, start)) continue;
        Fail(Phase::kBarrier, workspace_.rank, gridDim.x, seen);
        break;
      }
    }
    __syncthreads();
  }

  // Ends the operation for this block; the last block tells the peers. All threads call it.
  __device__ __forceinline__ void Leave() {
    Leave([](RankState*) {});
  }

  // The same; one thread of the last block calls `update` with the rank's state.
  template <typename Update>
  __device__ __forceinline__ void Leave(Update update) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
      RankState* const state = workspace_.state;
      last = ptx::AddAcqRelGpu(&state->blocks_ended, 1) + 1 == gridDim.x;
      if (last) {
        state->blocks_ended = 0;
        state->barrier = 0;
        state->tasks[0] = state->tasks[1] = 0;
        state->epoch = epoch_;
        update(state);
      }
    }
    __syncthreads();
    if (!last) return;
    for (int32_t peer = threadIdx.x; peer < num_ranks(); peer += blockDim.x) {
      ptx::FenceSys();
      ptx::StoreRelaxedSys(&Of(peer)->done[workspace_.rank], Signal{epoch_, tag_}.Encode());
    }
  }

  __device__ __forceinline__ bool Failed() const { return cuda::Failed(workspace_, op_); }
  __device__ __forceinline__ void Fail(Phase phase, int32_t peer, uint64_t expected,
                                       uint64_t seen) const {
    cuda::Fail(workspace_, op_, phase, peer, expected, seen);
  }

  // As Poll, which is called where the word is not there yet.
  template <typename Awaited>
  __device__ __forceinline__ uint64_t WaitUntil(Phase phase, int32_t peer, const uint64_t* word,
                                                const Awaited& awaited, const uint64_t* begun,
                                                const Signal& mine) const {
    const uint64_t seen = ptx::LoadAcquireSys(word);
    return awaited(seen) ? seen
                         : Poll(workspace_, op_, phase, peer, word, awaited, begun, mine);
  }

 private:
  // The word by which `from` tells `to` of a token.
  __device__ __forceinline__ uint64_t* ReadyWord(int32_t to, int32_t from, int32_t token) const {
    const WorkspaceLayout& layout = workspace_.layout;
    return reinterpret_cast<uint64_t*>(workspace_.base[to] + workspace_.at.ready) +
           int64_t{from} * layout.max_tokens_per_rank + token;
  }

  template <typename Awaited>
  __device__ __forceinline__ uint64_t WaitUntil(Phase phase, int32_t peer, const uint64_t* word,
                                                const Awaited& awaited) const {
    return WaitUntil(phase, peer, word, awaited, &Own()->running[peer], Signal{epoch_, tag_});
  }

  const Workspace& workspace_;
  const int32_t* const position_;
  const Op op_;
  const uint32_t tag_;
  uint32_t epoch_ = 0;
};

// Those of a queue's `count` tasks, numbered from 0, that a warp gets to take. The next one is asked
// for while the warp works on the one before. All lanes make all calls.
class Tasks {
 public:
  __device__ __forceinline__ Tasks(const Operation& operation, int queue, int64_t count)
      : operation_(operation), queue_(queue), count_(static_cast<uint32_t>(count)) {
    Ask();
  }

  // The task that Take will give; false where it will give none.
  __device__ __forceinline__ bool Peek(int32_t* task) const {
    const uint32_t next = __shfl_sync(~0u, asked_, 0);
    *task = static_cast<int32_t>(next);
    return next < count_;
  }

  // False when all tasks have been taken.
  __device__ __forceinline__ bool Take(int32_t* task) {
    if (!Peek(task)) return false;
    Ask();
    return true;
  }

 private:
  __device__ __forceinline__ void Ask() {
    if (threadIdx.x % 32 == 0) asked_ = operation_.TakeTask(queue_);
  }

  const Operation& operation_;
  const int queue_;
  const uint32_t count_;
  uint32_t asked_ = 0;  // in lane 0
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_SIGNAL_CUH_
