#ifndef JAX_EP_CSRC_CUDA_WORKSPACE_H_
#define JAX_EP_CSRC_CUDA_WORKSPACE_H_

#include <cstddef>
#include <cstdint>

#include "csrc/core/macros.h"

// The symmetric workspace of a group: what lies where in it, and the view of it that kernels get.
// docs/protocol.md says who writes what and who waits for what.
namespace jax_ep::cuda {

inline constexpr int32_t kMaxRanks = 72;    // an NVLink domain of a GB200 rack
inline constexpr int32_t kMaxBlocks = 256;  // of a grid; more than any GPU has SMs
inline constexpr int32_t kMaxTopk = 64;     // two pairs for each lane of a warp

// Low-latency buffers. Operations may be in flight in all but one, which is for those that are not.
inline constexpr uint32_t kLowLatencyBuffers = 3;
// In a ticket, instead of a buffer: the start has left all work to its done.
inline constexpr uint32_t kDeferred = kLowLatencyBuffers;

// The two halves of a low-latency operation follow it, so that one number leads to the others.
enum class Op : int32_t {
  kPrepare = 1,
  kDispatch = 2,
  kCombine = 3,
  kLowLatencyDispatch = 4,
  kLowLatencyDispatchStart = 5,
  kLowLatencyDispatchDone = 6,
  kLowLatencyCombine = 7,
  kLowLatencyCombineStart = 8,
  kLowLatencyCombineDone = 9,
};

// What a kernel was doing when it gave up.
enum class Phase : int32_t {
  kEnter = 1,       // waiting for a peer to leave an operation before
  kReady = 2,       // waiting for a peer's data
  kBarrier = 3,     // waiting for the other blocks of its own grid
  kMismatch = 4,    // a peer runs another operation
  kPosition = 5,    // the program's mesh is not the group's
  kInput = 6,       // a topk_idx outside [-1, E)
  kPeerFailed = 7,  // a peer gave up and said so
  kTicket = 8,      // a done without its start
};

// What a kernel writes in pinned host memory when it gives up. The first one stays.
struct alignas(64) ErrorRecord {
  int32_t set = 0;  // written last
  int32_t op = 0;
  int32_t phase = 0;
  int32_t rank = 0;
  int32_t peer = 0;
  uint64_t expected = 0;
  uint64_t seen = 0;
};

// What a rank knows of one of its low-latency buffers.
struct alignas(16) LowLatencyUse {
  uint32_t epoch;      // of the operation that sent through it last
  uint32_t tag;        // of that
  uint32_t read;       // the last operation that read it
  uint32_t in_flight;  // sent, and not read yet
};

// What a rank keeps between its kernels, in device memory, for itself. It outlives its group
// (rank_states.h): a program that is replayed after the group was closed reads here that it was.
struct alignas(128) RankState {
  int64_t group;          // the id of the group that owns it; another's or 0 once that is closed
  uint32_t epoch;         // operations that this rank has ended
  uint32_t blocks_ended;  // of the operation in flight
  uint32_t barrier;       // arrivals at the grid barrier of the operation in flight
  uint32_t reported;      // the error record is taken
  uint32_t tasks[2];      // given out so far of each queue, in the operation in flight
  LowLatencyUse buffers[kLowLatencyBuffers];
  uint32_t last_buffer;  // that a low-latency operation took
};

// The start of every rank's workspace, written by the peers. Zero when the group is created.
struct Control {
  uint64_t running[kMaxRanks];     // signal words (signal.cuh): what the peer has begun last
  uint64_t done[kMaxRanks];        // what the peer has ended last
  uint64_t num_tokens[kMaxRanks];  // words: of the peer in the handle being made
  uint32_t failed;                 // 1 + a rank that gave up
};

// The start of each of a rank's low-latency buffers, written by the peers. Zero when the group is
// created.
struct LowLatencyControl {
  uint64_t begun[kMaxRanks];       // signal words: the operation that the peer sends, or sent last
  uint64_t num_tokens[kMaxRanks];  // words: of the peer in that, if it is a dispatch
};

// Sizes that all ranks agree on, and what follows from them.
struct WorkspaceLayout {
  int32_t num_ranks = 0;
  int32_t num_experts = 0;
  int32_t num_topk = 0;
  int32_t max_tokens_per_rank = 0;
  int64_t max_row_bytes = 0;
  bool low_latency = false;  // whether there are the low-latency buffers

  static JAX_EP_HOST_DEVICE int64_t RoundUp(int64_t bytes) { return (bytes + 255) / 256 * 256; }

  // Signal words [R, max_tokens_per_rank]: for which tokens each peer has put its part in place.
  JAX_EP_HOST_DEVICE int64_t ready_offset() const { return RoundUp(sizeof(Control)); }
  JAX_EP_HOST_DEVICE int64_t ready_bytes() const {
    return RoundUp(int64_t{8} * num_ranks * max_tokens_per_rank);
  }
  // Everyone's topk_idx, as words [R, max_tokens_per_rank, K].
  JAX_EP_HOST_DEVICE int64_t topk_offset() const { return ready_offset() + ready_bytes(); }
  JAX_EP_HOST_DEVICE int64_t topk_bytes() const {
    return RoundUp(int64_t{8} * num_ranks * max_tokens_per_rank * num_topk);
  }
  // Per-block counts of prepare, int32 [kMaxBlocks, E].
  JAX_EP_HOST_DEVICE int64_t counts_offset() const { return topk_offset() + topk_bytes(); }
  JAX_EP_HOST_DEVICE int64_t counts_bytes() const {
    return RoundUp(int64_t{4} * kMaxBlocks * num_experts);
  }
  // Rows under way: a rank's own tokens in dispatch, [T]; every other rank's partial sums in
  // combine, [R, T]. Each row is followed by the K values of its pairs.
  JAX_EP_HOST_DEVICE int64_t staging_offset() const { return counts_offset() + counts_bytes(); }
  JAX_EP_HOST_DEVICE int64_t staging_row_bytes() const {
    // Every leaf of a row, and its scales, may be padded to 16 bytes; 8 bytes a pair value.
    return (max_row_bytes + 15) / 16 * 16 + 32 * kMaxLeaves + (8 * num_topk + 15) / 16 * 16;
  }
  JAX_EP_HOST_DEVICE int64_t staging_bytes() const {
    return RoundUp(staging_row_bytes() * num_ranks * max_tokens_per_rank);
  }
  // The low-latency buffers. Each has a LowLatencyControl, ready words and indices as above, and
  // rows [R, T] of the size of staged ones.
  JAX_EP_HOST_DEVICE int64_t low_latency_offset(int32_t buffer) const {
    return staging_offset() + staging_bytes() + buffer * low_latency_bytes();
  }
  JAX_EP_HOST_DEVICE int64_t low_latency_ready_offset(int32_t buffer) const {
    return low_latency_offset(buffer) + RoundUp(sizeof(LowLatencyControl));
  }
  JAX_EP_HOST_DEVICE int64_t low_latency_topk_offset(int32_t buffer) const {
    return low_latency_ready_offset(buffer) + ready_bytes();
  }
  JAX_EP_HOST_DEVICE int64_t low_latency_rows_offset(int32_t buffer) const {
    return low_latency_topk_offset(buffer) + topk_bytes();
  }
  JAX_EP_HOST_DEVICE int64_t low_latency_bytes() const {
    return RoundUp(sizeof(LowLatencyControl)) + ready_bytes() + topk_bytes() + staging_bytes();
  }
  JAX_EP_HOST_DEVICE int64_t total_bytes() const {
    return low_latency_offset(low_latency ? kLowLatencyBuffers : 0);
  }

  static constexpr int32_t kMaxLeaves = 8;
};

// A rank's view, passed to kernels by value.
struct Workspace {
  WorkspaceLayout layout;
  int64_t group = 0;  // id
  RankState* state = nullptr;
  int32_t subgroup = 0;  // which of the mesh's independent groups this is
  int32_t rank = 0;      // in it
  int32_t num_sms = 0;          // blocks of the kernels that move rows
  int32_t low_latency_sms = 0;  // the most blocks of a low-latency kernel
  uint64_t timeout_ns = 0;
  ErrorRecord* error = nullptr;     // pinned host memory, as the device sees it
  std::byte* base[kMaxRanks] = {};  // every rank's workspace, its own included
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_WORKSPACE_H_
