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

// Where the parts of a workspace lie, in bytes from its start.
struct WorkspaceOffsets {
  int64_t ready;    // signal words [R, max_tokens_per_rank]: whose part of a token is in place
  int64_t topk;     // everyone's topk_idx, as words [R, max_tokens_per_rank, K]
  int64_t counts;   // per-block counts of prepare, int32 [kMaxBlocks, E]
  int64_t staging;  // rows under way, [R, max_tokens_per_rank]: a rank's tokens in dispatch, its
                    // partial sums in combine. The K values of its pairs follow each row
  int64_t buffers;  // the low-latency buffers, one after the other
  int64_t total;
  // In a low-latency buffer, from its start, where its LowLatencyControl is: as above, and rows
  // [R, max_tokens_per_rank] of the size of staged ones.
  int64_t buffer_ready;
  int64_t buffer_topk;
  int64_t buffer_rows;
  int64_t buffer_bytes;
};

// Sizes that all ranks agree on.
struct WorkspaceLayout {
  static constexpr int32_t kMaxLeaves = 8;

  int32_t num_ranks = 0;
  int32_t num_experts = 0;
  int32_t num_topk = 0;
  int32_t max_tokens_per_rank = 0;
  int64_t max_row_bytes = 0;
  bool low_latency = false;  // whether there are the low-latency buffers

  // The most bytes of a staged row: every leaf of it, and its scales, may be padded to 16 bytes; 8
  // bytes a pair value.
  JAX_EP_HOST_DEVICE int64_t staging_row_bytes() const {
    return (max_row_bytes + 15) / 16 * 16 + 32 * kMaxLeaves + (8 * num_topk + 15) / 16 * 16;
  }

  // For the host: kernels find the result in their Workspace.
  WorkspaceOffsets Offsets() const {
    const auto round_up = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
    const int64_t tokens = int64_t{num_ranks} * max_tokens_per_rank;
    const int64_t ready_bytes = round_up(8 * tokens);
    const int64_t topk_bytes = round_up(8 * tokens * num_topk);
    const int64_t rows_bytes = round_up(staging_row_bytes() * tokens);
    WorkspaceOffsets at;
    at.ready = round_up(sizeof(Control));
    at.topk = at.ready + ready_bytes;
    at.counts = at.topk + topk_bytes;
    at.staging = at.counts + round_up(int64_t{4} * kMaxBlocks * num_experts);
    at.buffers = at.staging + rows_bytes;
    at.buffer_ready = round_up(sizeof(LowLatencyControl));
    at.buffer_topk = at.buffer_ready + ready_bytes;
    at.buffer_rows = at.buffer_topk + topk_bytes;
    at.buffer_bytes = at.buffer_rows + rows_bytes;
    at.total = at.buffers + (low_latency ? kLowLatencyBuffers * at.buffer_bytes : 0);
    return at;
  }

  int64_t total_bytes() const { return Offsets().total; }
};

// A rank's view, passed to kernels by value.
struct Workspace {
  WorkspaceLayout layout;
  WorkspaceOffsets at = {};
  int64_t group = 0;  // id
  RankState* state = nullptr;
  int32_t subgroup = 0;  // which of the mesh's independent groups this is
  int32_t rank = 0;      // in it
  int32_t ranks_per_device = 1;  // the most ranks of the mesh that share a GPU
  int32_t num_sms = 0;          // blocks of the kernels that move rows
  int32_t low_latency_sms = 0;  // the most blocks of a low-latency kernel
  uint64_t timeout_ns = 0;
  ErrorRecord* error = nullptr;     // pinned host memory, as the device sees it
  std::byte* base[kMaxRanks] = {};  // every rank's workspace, its own included
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_WORKSPACE_H_
