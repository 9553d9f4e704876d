#include <algorithm>

#include "csrc/core/slots.h"
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
// Loads of a lane that are under way together.
constexpr int kPairsAtOnce = 4;
constexpr int kTopkAtOnce = 8;

__device__ int64_t Thread() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ int64_t NumThreads() { return int64_t{gridDim.x} * blockDim.x; }

using AllIndices = Indices<Operation>;

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

// A warp's share of all ranks' tokens, and its counter of each key in shared memory: first how
// many it has, then the position of the next.
struct Share {
  int32_t begin;
  int32_t end;
  int32_t rank;  // of the first token
  int32_t* counters;
};

// Integers in shared memory that a warp has: the counters, and what TokenSort keeps after them.
JAX_EP_HOST_DEVICE int32_t WarpInts(const Shape& shape) {
  return shape.layout == Layout::kRank ? 2 * shape.num_ranks + 32 * shape.num_topk
                                       : shape.num_experts;
}

// Layouts expert and padded: the pairs, sorted by expert. A lane stands for a pair.
class PairSort {
 public:
  __device__ PairSort(const PrepareArgs& args, const AllIndices& indices, const Share& share)
      : args_(args), indices_(indices), share_(share) {}

  __device__ void Count() {
    ForEach([&](const Source&, int32_t expert) {
      if (expert >= 0) atomicAdd(&share_.counters[expert], 1);
    });
  }

  __device__ void Place(const int32_t* offsets) {
    const Shape& shape = args_.common.shape;
    const int32_t rank = args_.common.workspace.rank;
    ForEach([&](const Source& source, int32_t expert) {
      const int32_t position = NextPosition(share_.counters, expert);
      if (expert < 0) return;
      const int32_t slot =
          PairSlot(shape, expert % shape.num_local_experts(), offsets[expert], position);
      if (slot == kNoSlot) return;
      if (source.rank == rank) {
        args_.routing.slots[int64_t{source.token} * shape.num_topk + source.k] = slot;
      }
      if (shape.rank_of_expert(expert) != rank) return;
      args_.routing.row_source[slot] = EncodeSource(shape, source);
      args_.routing.recv_slots[indices_.Entry(source)] = slot;
    });
  }

 private:
  // Calls `visit` with 32 pairs at a time; lanes without one get expert -1. A share of one batch is
  // loaded once for both passes.
  template <typename Visit>
  __device__ void ForEach(Visit visit) {
    const int32_t num_topk = args_.common.shape.num_topk;
    const int32_t end = share_.end * num_topk;
    for (int32_t base = share_.begin * num_topk; base < end; base += 32 * kPairsAtOnce) {
      if (base != loaded_) Load(base, end);
      // Not unrolled: what runs once is as slow as its instructions are many, for they must be loaded.
#pragma unroll 1
      for (int u = 0; u < kPairsAtOnce; ++u) {
        if (base + u * 32 < end) visit(sources_[0], experts_[0]);
        Rotate();
      }
    }
  }

  __device__ void Load(int32_t base, int32_t end) {
    const int32_t num_topk = args_.common.shape.num_topk;
    uint64_t words[kPairsAtOnce];
#pragma unroll
    for (int u = 0; u < kPairsAtOnce; ++u) {
      const int32_t index = base + u * 32 + static_cast<int32_t>(threadIdx.x % 32);
      sources_[u] = {-1, 0, 0};
      if (index >= end) continue;
      sources_[u] = indices_.Find(index / num_topk, share_.rank);
      sources_[u].k = index % num_topk;
      words[u] = indices_.Load(sources_[u]);
    }
#pragma unroll
    for (int u = 0; u < kPairsAtOnce; ++u) {
      experts_[u] = sources_[u].rank < 0 ? -1 : indices_.Expert(sources_[u], words[u]);
    }
    __syncwarp();
    loaded_ = base;
  }

  // The batch's next 32 pairs come first; after all of them, it is as before.
  __device__ __forceinline__ void Rotate() {
    const Source source = sources_[0];
    const int32_t expert = experts_[0];
#pragma unroll
    for (int u = 0; u + 1 < kPairsAtOnce; ++u) {
      sources_[u] = sources_[u + 1];
      experts_[u] = experts_[u + 1];
    }
    sources_[kPairsAtOnce - 1] = source;
    experts_[kPairsAtOnce - 1] = expert;
  }

  const PrepareArgs& args_;
  const AllIndices& indices_;
  const Share& share_;
  // The batch loaded last, and where it begins.
  Source sources_[kPairsAtOnce];
  int32_t experts_[kPairsAtOnce];
  int32_t loaded_ = -1;
};

// Layout rank: the tokens, sorted by each rank that they have a pair on. A lane stands for a token.
class TokenSort {
 public:
  __device__ TokenSort(const PrepareArgs& args, const AllIndices& indices, const Share& share)
      : args_(args),
        indices_(indices),
        share_(share),
        with_row_(reinterpret_cast<uint32_t*>(share.counters + args.common.shape.num_ranks)),
        experts_(share.counters + 2 * args.common.shape.num_ranks) {}

  __device__ void Count() {
    for (int32_t base = share_.begin; base < share_.end; base += 32) {
      Load(base);
      AddRows();
    }
  }

  // `kept` and `routed` count this block's pairs of each local expert.
  __device__ void Place(int32_t* kept, int32_t* routed, int32_t* dropped) {
    const Shape& shape = args_.common.shape;
    const Routing& routing = args_.routing;
    const int32_t rank = args_.common.workspace.rank;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t before = (1u << lane) - 1;
    for (int32_t base = share_.begin; base < share_.end; base += 32) {
      if (base != loaded_) Load(base);
      Source source = token_;
#pragma unroll 1
      for (source.k = 0; source.k < shape.num_topk; ++source.k) {
        const int32_t expert = experts_[source.k * 32 + lane];
        if (expert < 0) continue;
        const int32_t target = shape.rank_of_expert(expert);
        const int32_t row = share_.counters[target] + __popc(with_row_[target] & before);
        const int32_t slot = row < shape.capacity ? row : kNoSlot;
        if (source.rank == rank) {
          routing.slots[int64_t{source.token} * shape.num_topk + source.k] = slot;
        }
        if (target != rank) continue;
        const int32_t local = expert - rank * shape.num_local_experts();
        atomicAdd(&routed[local], 1);
        if (slot == kNoSlot) {
          atomicAdd(dropped, 1);
          continue;
        }
        atomicAdd(&kept[local], 1);
        routing.row_source[slot] = EncodeSource(shape, source);
        routing.recv_slots[indices_.Entry(source)] = slot;
        routing.row_topk_idx[int64_t{slot} * shape.num_topk + source.k] = local;
      }
      __syncwarp();
      AddRows();
    }
  }

 private:
  // Finds out which of 32 tokens have a row where. Lanes without a token have no experts.
  __device__ void Load(int32_t base) {
    const Shape& shape = args_.common.shape;
    const uint32_t lane = threadIdx.x % 32;
    const int32_t index = base + static_cast<int32_t>(lane);
    __syncwarp();
    for (int32_t target = lane; target < shape.num_ranks; target += 32) with_row_[target] = 0;
    __syncwarp();
    token_ = index < share_.end ? indices_.Find(index, share_.rank) : Source{-1, 0, 0};
    Source source = token_;
    for (int32_t first = 0; first < shape.num_topk; first += kTopkAtOnce) {
      uint64_t words[kTopkAtOnce];
#pragma unroll
      for (int u = 0; u < kTopkAtOnce; ++u) {
        source.k = first + u;
        if (token_.rank >= 0 && source.k < shape.num_topk) words[u] = indices_.Load(source);
      }
#pragma unroll
      for (int u = 0; u < kTopkAtOnce; ++u) {
        source.k = first + u;
        if (source.k >= shape.num_topk) break;
        const int32_t expert = token_.rank >= 0 ? indices_.Expert(source, words[u]) : -1;
        experts_[source.k * 32 + lane] = expert;
        if (expert >= 0) atomicOr(&with_row_[shape.rank_of_expert(expert)], 1u << lane);
      }
    }
    __syncwarp();
    loaded_ = base;
  }

  // Counts the loaded tokens' rows on every rank.
  __device__ void AddRows() {
    for (int32_t target = threadIdx.x % 32; target < args_.common.shape.num_ranks; target += 32) {
      share_.counters[target] += __popc(with_row_[target]);
    }
    __syncwarp();
  }

  const PrepareArgs& args_;
  const AllIndices& indices_;
  const Share& share_;
  uint32_t* const with_row_;  // by rank: which of the loaded tokens have a row there
  int32_t* const experts_;    // of the loaded tokens, [K, 32]
  Source token_;              // this lane's
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
  const AllIndices indices(shape, operation, words, first_token);
  const int32_t num_keys = NumKeys(shape);
  const int32_t num_tokens = first_token[shape.num_ranks];
  const int32_t per_warp = (num_tokens + num_warps * num_blocks - 1) / (num_warps * num_blocks);
  int32_t* const offsets = shared;             // [num_keys]
  int32_t* const totals = shared + num_keys;   // [num_keys]
  int32_t* const counters = totals + num_keys;  // [num_warps, WarpInts()]
  const int32_t warp_ints = WarpInts(shape);
  Share share;
  share.begin = min(num_tokens, (static_cast<int32_t>(blockIdx.x) * num_warps + warp) * per_warp);
  share.end = min(num_tokens, share.begin + per_warp);
  share.counters = counters + warp * warp_ints;
  share.rank = share.begin < share.end ? indices.Find(share.begin, 0).rank : 0;
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
