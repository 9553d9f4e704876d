#ifndef JAX_EP_CSRC_CUDA_LOW_LATENCY_CUH_
#define JAX_EP_CSRC_CUDA_LOW_LATENCY_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/core/slots.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/divider.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/ptx/memory.cuh"
#include "csrc/cuda/row_pieces.cuh"
#include "csrc/cuda/signal.cuh"
#include "csrc/cuda/team.cuh"

// What the low-latency kernels share. All warps of a block work on the same few tokens, so that all
// of their bytes are under way at once. A rank pushes what the others need into one of their
// buffers; the ready word of a token follows the fence. docs/protocol.md has the argument.
namespace jax_ep::cuda {

// One of the buffers on all ranks, as a thread block of a low-latency operation uses it.
class LowLatencyChannel {
 public:
  __device__ __forceinline__ LowLatencyChannel(const MoveArgs& args, Operation& operation,
                                               const Split& split)
      : workspace_(args.common.workspace),
        row_bytes_(args.staging_row_bytes),
        operation_(operation),
        split_(split) {}

  // What this operation does. A start that finds no buffer leaves its part to its done.
  __device__ __forceinline__ bool sends() const { return sends_; }
  __device__ __forceinline__ bool receives() const { return split_.receives; }

  // Begins the operation with the buffer that it takes or has a ticket for; as Operation::Enter.
  // A sender waits until every peer has left the operation that read this buffer last; not for
  // later operations, which use another or none. A receiver waits for nothing.
  __device__ __forceinline__ bool Enter() {
    __shared__ uint32_t ticket[2];
    if (!split_.sends && threadIdx.x < 2) {
      ticket[threadIdx.x] = __ldcg(&split_.ticket[threadIdx.x]);
    }
    const bool entered = operation_.EnterIf([&](const RankState& state) {
      const bool starts = split_.sends && !split_.receives;
      const bool deferred = starts ? !MayStay(state) : !split_.sends && ticket[0] == kDeferred;
      sends_ = split_.sends != deferred;
      if (starts && deferred) {
        data_ = {operation_.epoch(), operation_.tag()};
        buffer_ = kDeferred;
        return true;
      }
      if (sends_) {
        TakeFree(state);
      } else if (!TakeGiven(state, ticket)) {
        if (threadIdx.x == 0) {
          operation_.Fail(Phase::kTicket, workspace_.rank, state.buffers[buffer_].epoch,
                          ticket[1]);
        }
        return false;
      }
      buffer_at_ = workspace_.at.buffers + buffer_ * workspace_.at.buffer_bytes;
      return !sends_ || operation_.PeersLeft(state.buffers[buffer_].read);
    });
    if (!entered || blockIdx.x != 0) return entered;
    for (int32_t peer = threadIdx.x; sends_ && peer < operation_.num_ranks();
         peer += blockDim.x) {
      ptx::StoreRelaxedSys(&Control(peer)->begun[workspace_.rank], data_.Encode());
    }
    if (split_.sends && !split_.receives && threadIdx.x == 0) {
      split_.ticket[0] = buffer_;
      split_.ticket[1] = data_.epoch;
    }
    return true;
  }

  __device__ __forceinline__ void Leave() {
    operation_.Leave([this](RankState* state) {
      if (!sends_ && !split_.receives) return;
      LowLatencyUse& use = state->buffers[buffer_];
      if (sends_) {
        state->last_buffer = buffer_;
        use.epoch = data_.epoch;
        use.tag = data_.tag;
      }
      if (split_.receives) use.read = operation_.epoch();
      use.in_flight = !split_.receives;
    });
  }

  // As those of Operation, for the operation that sends through the buffer.
  __device__ __forceinline__ void Ready(int32_t peer, int32_t token) const {
    ptx::StoreRelaxedSys(ReadyWord(peer, workspace_.rank, token), data_.Encode());
  }
  __device__ __forceinline__ bool WaitReady(int32_t peer, int32_t token) {
    const Equals awaited{data_.Encode(), Equals::kAll};
    return awaited(Wait(peer, ReadyWord(workspace_.rank, peer, token), awaited));
  }
  __device__ __forceinline__ uint64_t Word(int32_t value) const {
    return Signal{data_.epoch, static_cast<uint32_t>(value)}.Encode();
  }
  __device__ __forceinline__ bool WaitWord(int32_t peer, const uint64_t* word, uint64_t seen,
                                           int32_t* value) {
    if (!Came(seen)) seen = Wait(peer, word, Equals{data_.Encode(), Equals::kEpoch});
    *value = Value(seen);
    return Came(seen);
  }
  // How many tokens a rank sends: a word that also says in 16 bits what the rank sends, so that
  // ranks that exchange no row notice, too, if they do not run the same.
  __device__ __forceinline__ uint64_t CountWord(int32_t num_tokens) const {
    return Word(static_cast<int32_t>(TagBits() | static_cast<uint32_t>(num_tokens)));
  }
  __device__ __forceinline__ bool WaitCount(int32_t peer, int32_t* num_tokens) {
    const uint64_t* const word = &Control(workspace_.rank)->num_tokens[peer];
    const Equals awaited{Word(static_cast<int32_t>(TagBits())), Equals::kEpoch | kTagMask};
    const uint64_t seen = Wait(peer, word, awaited);
    *num_tokens = Value(seen) & 0xffff;
    return awaited(seen);
  }

  // Whether a word is of this operation, and what it says then.
  __device__ __forceinline__ bool Came(uint64_t word) const {
    return Signal::Decode(word).epoch == data_.epoch;
  }
  static __device__ __forceinline__ int32_t Value(uint64_t word) {
    return static_cast<int32_t>(Signal::Decode(word).tag);
  }

  // Whether something that this thread has waited for did not come, or must not be believed.
  __device__ __forceinline__ bool lost() const { return lost_; }
  __device__ __forceinline__ void Lose() { lost_ = true; }

  __device__ __forceinline__ LowLatencyControl* Control(int32_t rank) const {
    return reinterpret_cast<LowLatencyControl*>(Buffer(rank));
  }

  // Rank `to`'s words of all ranks' indices, [R, max_tokens_per_rank, K].
  __device__ __forceinline__ uint64_t* Topk(int32_t to) const {
    return reinterpret_cast<uint64_t*>(Buffer(to) + workspace_.at.buffer_topk);
  }

  // Where rank `from` puts its row for a token into rank `to`'s buffer.
  __device__ __forceinline__ std::byte* Row(int32_t to, int32_t from, int32_t token) const {
    return Buffer(to) + workspace_.at.buffer_rows + Entry(from, token) * row_bytes_;
  }

 private:
  static constexpr uint32_t kTagMask = 0xffff0000;

  __device__ __forceinline__ uint32_t TagBits() const {
    return data_.tag * 2654435761u & kTagMask;  // Knuth's multiplicative hash
  }

  // Whether one more operation may stay in flight: a buffer is left for others then.
  static __device__ __forceinline__ bool MayStay(const RankState& state) {
    uint32_t free = 0;
    for (const LowLatencyUse& use : state.buffers) free += !use.in_flight;
    return free > 1;
  }

  // Takes the free buffer that comes next after the one taken last; one always is free.
  __device__ __forceinline__ void TakeFree(const RankState& state) {
    data_ = {operation_.epoch(), operation_.tag()};
    buffer_ = state.last_buffer;
    for (uint32_t i = 0; i < kLowLatencyBuffers; ++i) {
      buffer_ = buffer_ + 1 == kLowLatencyBuffers ? 0 : buffer_ + 1;
      if (!state.buffers[buffer_].in_flight) return;
    }
  }

  // Takes that of the ticket; false if it is not in flight there.
  __device__ __forceinline__ bool TakeGiven(const RankState& state, const uint32_t (&ticket)[2]) {
    // A done's number is one above that of its start.
    data_ = {ticket[1], operation_.tag() - (1u << Signal::kOpShift)};
    const bool exists = ticket[0] < kLowLatencyBuffers;
    buffer_ = exists ? ticket[0] : 0;
    const LowLatencyUse& use = state.buffers[buffer_];
    return exists && use.in_flight && use.epoch == data_.epoch && use.tag == data_.tag;
  }

  __device__ __forceinline__ uint64_t* ReadyWord(int32_t to, int32_t from, int32_t token) const {
    return reinterpret_cast<uint64_t*>(Buffer(to) + workspace_.at.buffer_ready) +
           Entry(from, token);
  }

  __device__ __forceinline__ std::byte* Buffer(int32_t rank) const {
    return workspace_.base[rank] + buffer_at_;
  }

  // Of a token of rank `from` in tables [R, max_tokens_per_rank], which fit into an int32.
  __device__ __forceinline__ int32_t Entry(int32_t from, int32_t token) const {
    return from * workspace_.layout.max_tokens_per_rank + token;
  }

  __device__ __forceinline__ uint64_t Wait(int32_t peer, const uint64_t* word,
                                           const Equals& awaited) {
    const uint64_t seen = operation_.WaitUntil(Phase::kReady, peer, word, awaited,
                                               &Control(workspace_.rank)->begun[peer], data_);
    lost_ |= !awaited(seen);
    return seen;
  }

  const Workspace& workspace_;
  const int64_t row_bytes_;
  Operation& operation_;
  const Split& split_;
  Signal data_ = {};  // of the operation that sends
  uint32_t buffer_ = 0;
  int64_t buffer_at_ = 0;  // in a workspace
  bool sends_ = false;
  bool lost_ = false;
};

// The number of an operation of which this is the whole or a half.
__device__ __forceinline__ Op OpOf(Op whole, const Split& split) {
  return static_cast<Op>(static_cast<int32_t>(whole) +
                         (split.sends && split.receives ? 0 : split.sends ? 1 : 2));
}

// Divisions of a kernel by what it is launched with.
struct ShapeDividers {
  Divider topk;           // of pairs
  Divider local_experts;  // of experts

  __device__ explicit ShapeDividers(const Shape& shape)
      : topk(shape.num_topk), local_experts(shape.num_local_experts()) {}
};

// A team's threads and warps, numbered over the grid so that few of them are of many blocks.
inline __device__ int32_t SpreadWarp(const Team& team) {
  return team.warp() * gridDim.x + blockIdx.x;
}
inline __device__ int32_t SpreadThread(const Team& team) {
  return SpreadWarp(team) * 32 + static_cast<int32_t>(threadIdx.x % 32);
}
inline __device__ int32_t NumThreads(const Team& team) { return gridDim.x * team.num_threads(); }

// Copies rows 0 to `count` of `bytes` by a team's warps, of which this is number `warp`.
// `from(row)` is where a row lies, `to(row, n)`, for n from 0 to `places(row)`, where it goes. A
// warp loads `kUnroll` pieces of 32 vectors before it stores the first.
template <typename V, int kUnroll, typename From, typename Places, typename To>
__device__ __forceinline__ void CopyRowsBy(int32_t count, int64_t bytes, int32_t warp,
                                           int32_t num_warps, From from, Places places, To to) {
  const auto vectors = static_cast<int32_t>(bytes / static_cast<int64_t>(sizeof(V)));
  const RowPieces pieces(count, vectors);
#pragma unroll 1
  for (int32_t first = warp; first < pieces.number(); first += kUnroll * num_warps) {
    V values[kUnroll];
    int32_t rows[kUnroll];
    int32_t indices[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t piece = first + u * num_warps;
      rows[u] = pieces.Row(piece);
      indices[u] = pieces.Vector(piece);
      if (piece >= pieces.number() || indices[u] >= vectors) rows[u] = -1;
      if (rows[u] >= 0) values[u] = Load(reinterpret_cast<const V*>(from(rows[u])) + indices[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t copies = rows[u] >= 0 ? places(rows[u]) : 0;
#pragma unroll 1
      for (int32_t n = 0; n < copies; ++n) {
        Store(reinterpret_cast<V*>(to(rows[u], n)) + indices[u], values[u]);
      }
    }
  }
}

// The same by vectors of 16 bytes if `alignment`, the bits of all addresses and sizes, allows it.
template <typename From, typename Places, typename To>
__device__ __forceinline__ void CopyRows(int32_t count, int64_t bytes, uintptr_t alignment,
                                         int32_t warp, int32_t num_warps, From from,
                                         Places places, To to) {
  if (alignment % 16 == 0) {
    CopyRowsBy<uint4, 4>(count, bytes, warp, num_warps, from, places, to);
  } else {
    CopyRowsBy<uint8_t, 1>(count, bytes, warp, num_warps, from, places, to);
  }
}

// Blocks of a low-latency kernel: all are resident at once, and none without any token to work on.
inline int32_t LowLatencyBlocks(const Common& common) {
  const int64_t tokens = int64_t{common.shape.num_ranks} * common.shape.max_tokens_per_rank;
  const int64_t most = common.workspace.low_latency_sms;
  return static_cast<int32_t>(tokens < most ? (tokens > 0 ? tokens : 1) : most);
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_LOW_LATENCY_CUH_
