#include <algorithm>

#include "csrc/core/slots.h"
#include "csrc/cuda/divider.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/placement.cuh"
#include "csrc/cuda/signal.cuh"

// Every rank sends its topk_idx to all others, and then computes the rows of all pairs by itself: a
// stable counting sort, in the order (rank, token, k), of the pairs by expert or, in layout rank, of
// the tokens by the ranks that they go to.
namespace jax_ep::cuda {
namespace {

constexpr int kPrepareBlocks = 32;
constexpr int kMaxWarps = 16;
// Loads of a lane that are under way together, in either sort.
constexpr int kPairsAtOnce = 4;
constexpr int kTokenWordsAtOnce = 8;

__device__ int64_t Thread() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ int64_t NumThreads() { return int64_t{gridDim.x} * blockDim.x; }

// What is sorted by: the expert, or in layout rank the rank.
JAX_EP_HOST_DEVICE int32_t NumKeys(const Shape& shape) {
  return shape.layout == Layout::kRank ? shape.num_ranks : shape.num_experts;
}

// Sends this rank's indices, and how many tokens it has, to every rank.
__device__ void Send(const PrepareArgs& args, Operation& operation) {
  const Workspace& workspace = args.common.workspace;
  const Shape& shape = args.common.shape;
  if (blockIdx.x == 0) {
    for (int32_t peer = threadIdx.x; peer < shape.num_ranks; peer += blockDim.x) {
      ptx::StoreRelaxedSys(&operation.Of(peer)->num_tokens[workspace.rank],
                           operation.Word(args.common.num_tokens));
      operation.Ready(peer, 0);  // says what this rank prepares
    }
  }
  const int64_t mine = int64_t{workspace.rank} * shape.max_tokens_per_rank * shape.num_topk;
  SendIndices(args.common, args.topk_idx, operation, operation, Thread(), NumThreads(),
              [&](int32_t peer) {
                std::byte* const topk = workspace.base[peer] + workspace.at.topk;
                return reinterpret_cast<uint64_t*>(topk) + mine;
              });
}

// All ranks' indices, as they are sent to this one: words [R, max_tokens_per_rank, K]. A pair's
// entry is where its word is.
class Indices {
 public:
  __device__ Indices(Operation& operation, const uint64_t* words)
      : operation_(operation), words_(words) {}

  // A pair's expert, in two steps, so that several loads can be under way together.
  __device__ uint64_t Load(int32_t entry) const { return ptx::LoadRelaxedSys(words_ + entry); }
  // Less than 0 if it has none, or did not come; the operation has failed then.
  __device__ int32_t Expert(int32_t rank, int32_t entry, uint64_t loaded) const {
    int32_t expert;
    return operation_.WaitWord(rank, words_ + entry, loaded, &expert) ? expert : -1;
  }

 private:
  Operation& operation_;
  const uint64_t* const words_;
};

// A warp's share of all ranks' tokens, one after the other, and its counter of each key in shared
// memory: first how many it has, then the position of the next.
struct Share {
  const int32_t* first_token;  // of each rank, [R + 1]
  int32_t begin;
  int32_t end;
  int32_t rank;  // of the first token
  int32_t* counters;

  // Calls `visit(rank, begin, end)` for what is of each rank: the rows [begin, end) of tables that
  // have max_tokens_per_rank rows of every rank.
  template <typename Visit>
  __device__ void ForEachRank(const Shape& shape, Visit visit) const {
    int32_t r = rank;
    for (int32_t token = begin; token < end; token = first_token[r + 1]) {
      r = RankOfToken(first_token, token, r);
      const int32_t shift = r * shape.max_tokens_per_rank - first_token[r];
      visit(r, token + shift, min(end, first_token[r + 1]) + shift);
    }
  }
};

// Integers in shared memory that a warp has: the counters, and what TokenSort keeps after them.
JAX_EP_HOST_DEVICE int32_t WarpInts(const Shape& shape) {
  return shape.layout == Layout::kRank ? 2 * shape.num_ranks + 32 * shape.num_topk
                                       : shape.num_experts;
}

// Layouts expert and padded: the pairs, sorted by expert. A lane stands for a pair.
class PairSort {
 public:
  __device__ PairSort(const PrepareArgs& args, const Indices& indices, const Share& share)
      : args_(args),
        indices_(indices),
        share_(share),
        local_experts_(args.common.shape.num_local_experts()) {}

  __device__ void Count() {
    ForEach([&](int32_t, int32_t, int32_t expert) {
      if (expert >= 0) atomicAdd(&share_.counters[expert], 1);
    });
  }

  __device__ void Place(const int32_t* offsets) {
    const Shape& shape = args_.common.shape;
    const int32_t own = args_.common.workspace.rank;
    const int32_t own_entries = own * shape.max_tokens_per_rank * shape.num_topk;
    ForEach([&](int32_t rank, int32_t entry, int32_t expert) {
      const int32_t position = NextPosition(share_.counters, shape.num_experts, expert);
      if (expert < 0) return;
      const bool here = local_experts_.Quotient(expert) == own;
      if (!here && rank != own) return;
      const int32_t slot =
          PairSlot(shape, local_experts_.Remainder(expert), offsets[expert], position);
      if (slot == kNoSlot) return;
      if (rank == own) args_.routing.slots[entry - own_entries] = slot;
      if (!here) return;
      args_.routing.row_source[slot] = entry;  // as EncodeSource has it
      args_.routing.recv_slots[entry] = slot;
    });
  }

 private:
  // Calls `visit(rank, entry, expert)` with 32 pairs of a rank at a time; lanes without one get
  // expert -1. A share of one batch is loaded once for both passes.
  template <typename Visit>
  __device__ void ForEach(Visit visit) {
    const int32_t num_topk = args_.common.shape.num_topk;
    share_.ForEachRank(args_.common.shape, [&](int32_t rank, int32_t begin, int32_t end_token) {
      const int32_t end = end_token * num_topk;
      for (int32_t base = begin * num_topk; base < end; base += 32 * kPairsAtOnce) {
        if (base != loaded_) Load(rank, base, end);
        // Not unrolled: what runs once is as slow as its instructions are many, for they must be
        // loaded.
#pragma unroll 1
        for (int u = 0; u < kPairsAtOnce; ++u) {
          const int32_t first = base + u * 32;
          if (first < end) visit(rank, first + static_cast<int32_t>(threadIdx.x % 32), experts_[0]);
          Rotate();
        }
      }
    });
  }

  __device__ void Load(int32_t rank, int32_t base, int32_t end) {
    const int32_t first = base + static_cast<int32_t>(threadIdx.x % 32);
    uint64_t words[kPairsAtOnce];
#pragma unroll
    for (int u = 0; u < kPairsAtOnce; ++u) {
      if (first + u * 32 < end) words[u] = indices_.Load(first + u * 32);
    }
#pragma unroll
    for (int u = 0; u < kPairsAtOnce; ++u) {
      const int32_t entry = first + u * 32;
      experts_[u] = entry < end ? indices_.Expert(rank, entry, words[u]) : -1;
    }
    __syncwarp();
    loaded_ = base;
  }

  // The batch's next 32 pairs come first; after all of them, it is as before.
  __device__ __forceinline__ void Rotate() {
    const int32_t expert = experts_[0];
#pragma unroll
    for (int u = 0; u + 1 < kPairsAtOnce; ++u) experts_[u] = experts_[u + 1];
    experts_[kPairsAtOnce - 1] = expert;
  }

  const PrepareArgs& args_;
  const Indices& indices_;
  const Share& share_;
  const Divider local_experts_;
  // The batch loaded last, and where it begins.
  int32_t experts_[kPairsAtOnce];
  int32_t loaded_ = -1;
};

// Layout rank: the tokens, sorted by each rank that they have a pair on. A lane stands for a token.
class TokenSort {
 public:
  __device__ TokenSort(const PrepareArgs& args, const Indices& indices, const Share& share)
      : args_(args),
        indices_(indices),
        share_(share),
        local_experts_(args.common.shape.num_local_experts()),
        with_row_(reinterpret_cast<uint32_t*>(share.counters + args.common.shape.num_ranks)),
        experts_(share.counters + 2 * args.common.shape.num_ranks) {}

  __device__ void Count() {
    ForEach([](int32_t, int32_t, int32_t) {});
  }

  // `kept` and `routed` count this block's pairs of each local expert.
  __device__ void Place(int32_t* kept, int32_t* routed, int32_t* dropped) {
    const Shape& shape = args_.common.shape;
    const Routing& routing = args_.routing;
    const int32_t num_topk = shape.num_topk;
    const int32_t own = args_.common.workspace.rank;
    const int32_t own_entries = own * shape.max_tokens_per_rank * num_topk;
    const uint32_t before = (1u << threadIdx.x % 32) - 1;
    ForEach([&](int32_t rank, int32_t token, int32_t first) {
#pragma unroll 1
      for (int32_t k = 0; k < num_topk; ++k) {
        const int32_t expert = experts_[first + k];
        if (expert < 0) continue;
        const int32_t target = local_experts_.Quotient(expert);
        if (target != own && rank != own) continue;
        const int32_t row = share_.counters[target] + __popc(with_row_[target] & before);
        const int32_t slot = row < shape.capacity ? row : kNoSlot;
        const int32_t entry = token * num_topk + k;
        if (rank == own) routing.slots[entry - own_entries] = slot;
        if (target != own) continue;
        const int32_t local = local_experts_.Remainder(expert);
        atomicAdd(&routed[local], 1);
        if (slot == kNoSlot) {
          atomicAdd(dropped, 1);
          continue;
        }
        atomicAdd(&kept[local], 1);
        routing.row_source[slot] = token;  // as EncodeSource has it
        routing.recv_slots[entry] = slot;
        routing.row_topk_idx[int64_t{slot} * num_topk + k] = local;
      }
    });
  }

 private:
  // Loads 32 tokens of a rank at a time, and calls `visit(rank, token, first)` on the lanes that
  // stand for one: the token's row in tables, as Share has it, and where its experts begin. Then
  // counts their rows on every rank.
  template <typename Visit>
  __device__ void ForEach(Visit visit) {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t num_ranks = args_.common.shape.num_ranks;
    share_.ForEachRank(args_.common.shape, [&](int32_t rank, int32_t begin, int32_t end) {
      for (int32_t base = begin; base < end; base += 32) {
        const int32_t count = min(32, end - base);
        if (base != loaded_) Load(rank, base, count);
        if (lane < count) visit(rank, base + lane, lane * args_.common.shape.num_topk);
        __syncwarp();
        for (int32_t target = lane; target < num_ranks; target += 32) {
          share_.counters[target] += __popc(with_row_[target]);
        }
        __syncwarp();
      }
    });
  }

  // Loads the experts of `count` tokens, and finds out which of these have a row where.
  __device__ void Load(int32_t rank, int32_t base, int32_t count) {
    const Shape& shape = args_.common.shape;
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t num_words = count * shape.num_topk;
    const int32_t first_entry = base * shape.num_topk;
    for (int32_t first = lane; first < num_words; first += 32 * kTokenWordsAtOnce) {
      uint64_t words[kTokenWordsAtOnce];
#pragma unroll
      for (int u = 0; u < kTokenWordsAtOnce; ++u) {
        const int32_t i = first + u * 32;
        if (i < num_words) words[u] = indices_.Load(first_entry + i);
      }
#pragma unroll
      for (int u = 0; u < kTokenWordsAtOnce; ++u) {
        const int32_t i = first + u * 32;
        if (i < num_words) experts_[i] = indices_.Expert(rank, first_entry + i, words[u]);
      }
    }
    __syncwarp();
    // 32 ranks at a time: first each lane's own token, then all tokens of each lane's rank.
    for (int32_t first = 0; first < shape.num_ranks; first += 32) {
      uint32_t targets = 0;
      for (int32_t k = 0; k < shape.num_topk && lane < count; ++k) {
        const int32_t expert = experts_[lane * shape.num_topk + k];
        const int32_t target = expert < 0 ? -1 : local_experts_.Quotient(expert) - first;
        if (target >= 0 && target < 32) targets |= 1u << target;
      }
      uint32_t tokens = 0;
      for (int32_t i = 0; i < 32 && first + i < shape.num_ranks; ++i) {
        const uint32_t all = __ballot_sync(~0u, (targets >> i & 1) != 0);
        if (i == lane) tokens = all;
      }
      if (first + lane < shape.num_ranks) with_row_[first + lane] = tokens;
    }
    __syncwarp();
    loaded_ = base;
  }

  const PrepareArgs& args_;
  const Indices& indices_;
  const Share& share_;
  const Divider local_experts_;
  uint32_t* const with_row_;  // by rank: which of the loaded tokens have a row there
  int32_t* const experts_;    // of the loaded tokens, [32, K]
  int32_t loaded_ = -1;       // the first of the loaded tokens; loaded once if there are no more
};

__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    PrepareKernel(const __grid_constant__ PrepareArgs args) {
  extern __shared__ int32_t shared[];
  const Workspace& workspace = args.common.workspace;
  const Shape& shape = args.common.shape;
  const int32_t warp = threadIdx.x / 32;
  const int32_t num_warps = blockDim.x / 32;
  const int32_t num_blocks = gridDim.x;
  const bool by_rank = shape.layout == Layout::kRank;
  Operation operation(args.common, Op::kPrepare, RoutingSite(shape));
  if (!operation.Enter()) return ClearRouting(args.common, args.routing, Thread(), NumThreads());

  Send(args, operation);
  ClearRouting(args.common, args.routing, Thread(), NumThreads());

  // first_token[r] is the first of rank r's tokens among all.
  __shared__ int32_t first_token[kMaxRanks + 1];
  for (int32_t rank = threadIdx.x; rank < shape.num_ranks; rank += blockDim.x) {
    const uint64_t* const word = &operation.Own()->num_tokens[rank];
    int32_t num_tokens;
    const bool came = operation.WaitReady(rank, 0) &&
                      operation.WaitWord(rank, word, ptx::LoadRelaxedSys(word), &num_tokens);
    first_token[rank + 1] = came ? num_tokens : 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    first_token[0] = 0;
    for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
      first_token[rank + 1] += first_token[rank];
    }
  }
  __syncthreads();

  // Each warp takes consecutive tokens and counts what it has of each key.
  const auto* const words = reinterpret_cast<const uint64_t*>(workspace.base[workspace.rank] +
                                                             workspace.at.topk);
  const Indices indices(operation, words);
  const int32_t num_keys = NumKeys(shape);
  const int32_t num_tokens = first_token[shape.num_ranks];
  const int32_t per_warp = (num_tokens + num_warps * num_blocks - 1) / (num_warps * num_blocks);
  int32_t* const offsets = shared;             // [num_keys]
  int32_t* const totals = shared + num_keys;   // [num_keys]
  int32_t* const counters = totals + num_keys;  // [num_warps, WarpInts()]
  const int32_t warp_ints = WarpInts(shape);
  Share share;
  share.first_token = first_token;
  share.begin = min(num_tokens, (static_cast<int32_t>(blockIdx.x) * num_warps + warp) * per_warp);
  share.end = min(num_tokens, share.begin + per_warp);
  share.rank = share.begin < share.end ? RankOfToken(first_token, share.begin, 0) : 0;
  share.counters = counters + warp * warp_ints;
  for (int32_t i = threadIdx.x; i < num_warps * warp_ints; i += blockDim.x) counters[i] = 0;
  __syncthreads();
  PairSort pairs(args, indices, share);
  TokenSort tokens(args, indices, share);
  if (by_rank) {
    tokens.Count();
  } else {
    pairs.Count();
  }
  __syncthreads();

  // Turns the counts into the first position of each key for each warp of all blocks.
  auto* const block_counts = reinterpret_cast<int32_t*>(workspace.base[workspace.rank] +
                                                        workspace.at.counts);
  for (int32_t key = threadIdx.x; key < num_keys; key += blockDim.x) {
    int32_t count = 0;
    for (int32_t w = 0; w < num_warps; ++w) count += counters[w * warp_ints + key];
    __stcg(&block_counts[blockIdx.x * num_keys + key], count);
  }
  operation.GridBarrier();
  // A peer may have sent kBadIndex, and said before that it failed.
  if (blockIdx.x == 0 && threadIdx.x + 1 == blockDim.x) operation.Failed();
  for (int32_t key = threadIdx.x; key < num_keys; key += blockDim.x) {
    int32_t total = 0;
    int32_t position = 0;
#pragma unroll 16
    for (int32_t block = 0; block < num_blocks; ++block) {
      const int32_t count = __ldcg(&block_counts[block * num_keys + key]);
      if (block < static_cast<int32_t>(blockIdx.x)) position += count;
      total += count;
    }
    totals[key] = total;
    for (int32_t w = 0; w < num_warps; ++w) {
      int32_t& counter = counters[w * warp_ints + key];
      const int32_t count = counter;
      counter = position;
      position += count;
    }
  }
  __syncthreads();

  if (by_rank) {
    // This block's pairs of each local expert, and those dropped, after the counters.
    int32_t* const kept = counters + num_warps * warp_ints;
    int32_t* const routed = kept + shape.num_local_experts();
    __shared__ int32_t dropped;
    for (int32_t i = threadIdx.x; i < 2 * shape.num_local_experts(); i += blockDim.x) kept[i] = 0;
    if (threadIdx.x == 0) dropped = 0;
    __syncthreads();
    tokens.Place(kept, routed, &dropped);
    __syncthreads();
    for (int32_t i = threadIdx.x; i < shape.num_local_experts(); i += blockDim.x) {
      if (kept[i] != 0) atomicAdd(&args.routing.group_sizes[i], kept[i]);
      if (routed[i] != 0) atomicAdd(&args.routing.expert_counts[i], routed[i]);
    }
    if (threadIdx.x == 0) {
      if (dropped != 0) atomicAdd(args.routing.num_dropped, dropped);
      const int64_t rows = totals[workspace.rank];
      if (blockIdx.x == 0) {
        *args.routing.num_rows =
            static_cast<int32_t>(rows < shape.capacity ? rows : shape.capacity);
      }
    }
  } else {
    PlaceExperts(
        Team::Block(), args.common, args.routing, [&](int32_t expert) { return totals[expert]; },
        [&](int32_t expert, int32_t, int32_t first) { offsets[expert] = first; });
    __syncthreads();
    pairs.Place(offsets);
  }
  operation.Leave();
}

}  // namespace

Status Prepare(cudaStream_t stream, const PrepareArgs& args) {
  const Shape& shape = args.common.shape;
  const int64_t num_keys = NumKeys(shape);
  const int64_t limit = MaxSharedBytes(PrepareKernel);
  const int64_t fixed =
      2 * num_keys + (shape.layout == Layout::kRank ? 2 * shape.num_local_experts() : 0);
  const int64_t num_warps = std::min<int64_t>(
      kMaxWarps, (limit / static_cast<int64_t>(sizeof(int32_t)) - fixed) / WarpInts(shape));
  if (num_warps < 1) {
    return Status::Error("prepare has room for fewer than " + std::to_string(num_keys) +
                         " experts in a block's " + std::to_string(limit) +
                         " bytes of shared memory");
  }
  const int64_t bytes =
      (fixed + num_warps * WarpInts(shape)) * static_cast<int64_t>(sizeof(int32_t));
  const int32_t num_blocks = std::min<int32_t>(kPrepareBlocks, args.common.workspace.num_sms);
  return Launch(PrepareKernel, num_blocks, static_cast<int>(num_warps) * 32, bytes, stream, args);
}

Status LoadPrepare() { return Load(PrepareKernel); }

}  // namespace jax_ep::cuda
