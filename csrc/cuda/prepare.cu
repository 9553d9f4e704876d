#include <algorithm>

#include "csrc/core/slots.h"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/signal.cuh"

// Every rank sends its topk_idx to all others, and then computes the rows of all pairs by itself: a
// stable counting sort, in the order (rank, token, k), of the pairs by expert or, in layout rank, of
// the tokens by the ranks that they go to.
namespace jax_ep::cuda {
namespace {

constexpr int kPrepareBlocks = 32;
constexpr int kMaxWarps = 16;

// What is sorted by: the expert, or in layout rank the rank.
JAX_EP_HOST_DEVICE int32_t NumKeys(const Shape& shape) {
  return shape.layout == Layout::kRank ? shape.num_ranks : shape.num_experts;
}

// All ranks' indices, as they were sent to this one.
class Indices {
 public:
  __device__ Indices(const PrepareArgs& args, const int32_t* first_token)
      : shape_(args.common.shape),
        topk_(reinterpret_cast<const int32_t*>(
            args.common.workspace.base[args.common.workspace.rank] +
            args.common.workspace.layout.topk_offset())),
        first_token_(first_token) {}

  // The rank and token, as Source has them, of token number `index` among all ranks' tokens.
  __device__ Source Find(int32_t index) const {
    int32_t rank = 0;
    while (index >= first_token_[rank + 1]) ++rank;
    return {rank, index - first_token_[rank], 0};
  }

  // The entry of a pair in tables [R, max_tokens_per_rank, K].
  __device__ int64_t Entry(const Source& source) const {
    return (int64_t{source.rank} * shape_.max_tokens_per_rank + source.token) * shape_.num_topk +
           source.k;
  }

  __device__ int32_t Expert(const Source& source) const { return __ldcg(topk_ + Entry(source)); }

 private:
  const Shape& shape_;
  const int32_t* topk_;
  const int32_t* first_token_;
};

// Sends this rank's indices to every rank, and -1 for those that name no expert.
__device__ void SendIndices(const PrepareArgs& args, Operation& operation) {
  const Workspace& workspace = args.common.workspace;
  const Shape& shape = args.common.shape;
  const int64_t num_pairs = int64_t{args.common.num_tokens} * shape.num_topk;
  const int64_t mine = int64_t{workspace.rank} * shape.max_tokens_per_rank * shape.num_topk;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < num_pairs;
       i += int64_t{gridDim.x} * blockDim.x) {
    int32_t expert = args.topk_idx[i];
    if (expert < -1 || expert >= shape.num_experts) {
      operation.Fail(Phase::kInput, workspace.rank, shape.num_experts, expert);
      expert = -1;
    }
    for (int32_t peer = 0; peer < shape.num_ranks; ++peer) {
      auto* topk = reinterpret_cast<int32_t*>(workspace.base[peer] + workspace.layout.topk_offset());
      topk[mine + i] = expert;
    }
  }
  if (blockIdx.x == 0) {
    for (int32_t peer = threadIdx.x; peer < shape.num_ranks; peer += blockDim.x) {
      operation.Of(peer)->num_tokens[workspace.rank] = args.common.num_tokens;
    }
  }
  __syncthreads();
  for (int32_t peer = threadIdx.x; peer < shape.num_ranks; peer += blockDim.x) {
    operation.Ready(peer, 1);
  }
}

// Everything that is not written pair by pair.
__device__ void Clear(const PrepareArgs& args) {
  const Shape& shape = args.common.shape;
  const int64_t start = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = start; i < shape.num_rows(); i += stride) args.row_source[i] = -1;
  if (shape.layout == Layout::kRank) {
    const int64_t num_pairs = int64_t{args.common.num_tokens} * shape.num_topk;
    for (int64_t i = start; i < num_pairs; i += stride) args.slots[i] = kNoSlot;
    for (int64_t i = start; i < shape.num_rows() * shape.num_topk; i += stride) {
      args.row_topk_idx[i] = -1;
    }
    for (int64_t i = start; i < shape.num_local_experts(); i += stride) {
      args.group_sizes[i] = 0;
      args.expert_counts[i] = 0;
    }
  }
  const int64_t entries = int64_t{shape.num_ranks} * shape.max_tokens_per_rank * shape.num_topk;
  for (int64_t i = start; i < entries; i += stride) args.recv_slots[i] = kNoSlot;
  if (start == 0) *args.num_dropped = 0;
}

// In layouts expert and padded: this rank's sizes, and each expert's first row in `offsets`,
// clipped at capacity, beyond which rows do not matter. One warp a rank.
__device__ void PlaceExperts(const PrepareArgs& args, const int32_t* counts, int32_t* offsets) {
  const Shape& shape = args.common.shape;
  const int32_t num_local = shape.num_local_experts();
  const int32_t lane = threadIdx.x % 32;
  for (int32_t rank = threadIdx.x / 32; rank < shape.num_ranks; rank += blockDim.x / 32) {
    const bool writes = blockIdx.x == 0 && rank == args.common.workspace.rank;
    int64_t offset = 0;
    int32_t num_rows = 0;
    int32_t num_dropped = 0;
    for (int32_t begin = 0; begin < num_local; begin += 32) {
      const int32_t local = begin + lane;
      const int32_t count = local < num_local ? counts[rank * num_local + local] : 0;
      const int64_t rows = ExpertRows(shape, count);
      int64_t end = rows;  // inclusive prefix sum over the warp
      for (int32_t delta = 1; delta < 32; delta *= 2) {
        const int64_t below = __shfl_up_sync(~0u, end, delta);
        if (lane >= delta) end += below;
      }
      const int64_t first = shape.layout == Layout::kPadded ? 0 : offset + end - rows;
      offset += __shfl_sync(~0u, end, 31);
      if (local >= num_local) continue;
      const int64_t size = ClippedSize(first, rows, shape.capacity);
      offsets[rank * num_local + local] =
          static_cast<int32_t>(first < shape.capacity ? first : shape.capacity);
      if (writes) {
        args.group_sizes[local] = static_cast<int32_t>(size);
        args.expert_counts[local] = count;
        num_rows += static_cast<int32_t>(size);
        num_dropped += count - static_cast<int32_t>(ClippedSize(first, count, shape.capacity));
      }
    }
    if (!writes) continue;
    num_rows = __reduce_add_sync(~0u, num_rows);
    num_dropped = __reduce_add_sync(~0u, num_dropped);
    if (lane == 0) {
      *args.num_rows = num_rows;
      *args.num_dropped = num_dropped;
    }
  }
}

// A warp's share of all ranks' tokens, and its counter of each key in shared memory: first how
// many it has, then the position of the next.
struct Share {
  int32_t begin;
  int32_t end;
  int32_t* counters;
};

// Layouts expert and padded: the pairs, sorted by expert. A lane stands for a pair.
class PairSort {
 public:
  __device__ static void Count(const PrepareArgs& args, const Indices& indices,
                               const Share& share) {
    ForEach(args, indices, share, [&](const Source&, int32_t expert) {
      if (expert >= 0) atomicAdd(&share.counters[expert], 1);
    });
  }

  __device__ static void Place(const PrepareArgs& args, const Indices& indices,
                               const Share& share, const int32_t* offsets) {
    const Shape& shape = args.common.shape;
    const int32_t rank = args.common.workspace.rank;
    const int32_t lane = threadIdx.x % 32;
    ForEach(args, indices, share, [&](const Source& source, int32_t expert) {
      const uint32_t same = __match_any_sync(~0u, expert);
      int32_t position = 0;
      if (expert >= 0) position = share.counters[expert] + __popc(same & ((1u << lane) - 1));
      __syncwarp();
      if (expert >= 0 && lane == 31 - __clz(same)) share.counters[expert] += __popc(same);
      __syncwarp();
      if (source.rank < 0) return;
      int32_t slot = kNoSlot;
      if (expert >= 0) {
        slot = PairSlot(shape, expert % shape.num_local_experts(), offsets[expert], position);
      }
      if (source.rank == rank) {
        args.slots[int64_t{source.token} * shape.num_topk + source.k] = slot;
      }
      if (slot == kNoSlot || shape.rank_of_expert(expert) != rank) return;
      args.row_source[slot] = EncodeSource(shape, source);
      args.recv_slots[indices.Entry(source)] = slot;
    });
  }

 private:
  // Calls `visit` with 32 pairs at a time; lanes without one get rank and expert -1.
  template <typename Visit>
  __device__ static void ForEach(const PrepareArgs& args, const Indices& indices,
                                 const Share& share, Visit visit) {
    const int32_t num_topk = args.common.shape.num_topk;
    const int64_t end = int64_t{share.end} * num_topk;
    for (int64_t base = int64_t{share.begin} * num_topk; base < end; base += 32) {
      const int64_t index = base + threadIdx.x % 32;
      Source source{-1, 0, 0};
      if (index < end) {
        source = indices.Find(static_cast<int32_t>(index / num_topk));
        source.k = static_cast<int32_t>(index % num_topk);
      }
      visit(source, index < end ? indices.Expert(source) : -1);
    }
  }
};

// Layout rank: the tokens, sorted by each rank that they have a pair on. A lane stands for a token.
class TokenSort {
 public:
  __device__ static void Count(const PrepareArgs& args, const Indices& indices,
                               const Share& share) {
    ForEach(args, indices, share, [&](const Source&, int32_t target, uint32_t with_row) {
      if (threadIdx.x % 32 == 0) share.counters[target] += __popc(with_row);
    });
  }

  // `kept` and `routed` count this block's pairs of each local expert.
  __device__ static void Place(const PrepareArgs& args, const Indices& indices,
                               const Share& share, int32_t* kept, int32_t* routed,
                               int32_t* dropped) {
    const Shape& shape = args.common.shape;
    const int32_t rank = args.common.workspace.rank;
    const int32_t lane = threadIdx.x % 32;
    ForEach(args, indices, share, [&](Source source, int32_t target, uint32_t with_row) {
      const int32_t row = share.counters[target] + __popc(with_row & ((1u << lane) - 1));
      __syncwarp();
      if (lane == 0) share.counters[target] += __popc(with_row);
      __syncwarp();
      if ((with_row >> lane & 1) == 0) return;
      const int32_t slot = row < shape.capacity ? row : kNoSlot;
      const bool here = target == rank;
      if (here && slot != kNoSlot) args.row_source[slot] = EncodeSource(shape, source);
      for (source.k = 0; source.k < shape.num_topk; ++source.k) {
        const int32_t expert = indices.Expert(source);
        if (expert < 0 || shape.rank_of_expert(expert) != target) continue;
        const int64_t pair = int64_t{source.token} * shape.num_topk + source.k;
        if (source.rank == rank) args.slots[pair] = slot;
        if (!here) continue;
        const int32_t local = expert % shape.num_local_experts();
        atomicAdd(&routed[local], 1);
        if (slot == kNoSlot) {
          atomicAdd(dropped, 1);
          continue;
        }
        atomicAdd(&kept[local], 1);
        args.recv_slots[indices.Entry(source)] = slot;
        args.row_topk_idx[int64_t{slot} * shape.num_topk + source.k] = local;
      }
    });
  }

 private:
  // Calls `visit` for 32 tokens and a rank at a time, with the lanes that have a row there.
  template <typename Visit>
  __device__ static void ForEach(const PrepareArgs& args, const Indices& indices,
                                 const Share& share, Visit visit) {
    const Shape& shape = args.common.shape;
    for (int32_t base = share.begin; base < share.end; base += 32) {
      const int32_t index = base + threadIdx.x % 32;
      uint32_t targets[(kMaxRanks + 31) / 32] = {};  // a bit for each rank
      Source source{-1, 0, 0};
      if (index < share.end) {
        source = indices.Find(index);
        for (source.k = 0; source.k < shape.num_topk; ++source.k) {
          const int32_t expert = indices.Expert(source);
          if (expert < 0) continue;
          const int32_t target = shape.rank_of_expert(expert);
#pragma unroll
          for (int32_t word = 0; word < (kMaxRanks + 31) / 32; ++word) {
            if (target / 32 == word) targets[word] |= 1u << (target % 32);
          }
        }
      }
      for (int32_t target = 0; target < shape.num_ranks; ++target) {
        uint32_t bits = 0;
#pragma unroll
        for (int32_t word = 0; word < (kMaxRanks + 31) / 32; ++word) {
          if (target / 32 == word) bits = targets[word];
        }
        visit(source, target, __ballot_sync(~0u, bits >> (target % 32) & 1));
      }
    }
  }
};

__global__ void __launch_bounds__(kMaxWarps * 32)
    PrepareKernel(const __grid_constant__ PrepareArgs args) {
  extern __shared__ int32_t shared[];
  const Workspace& workspace = args.common.workspace;
  const Shape& shape = args.common.shape;
  const int32_t warp = threadIdx.x / 32;
  const int32_t num_warps = blockDim.x / 32;
  const int32_t num_blocks = gridDim.x;  // the same on all ranks
  const bool by_rank = shape.layout == Layout::kRank;
  const uint32_t site =
      static_cast<uint32_t>(shape.layout) * 5 + static_cast<uint32_t>(shape.capacity);
  Operation operation(workspace, Op::kPrepare, site, args.common.position);

  operation.Enter();
  SendIndices(args, operation);
  Clear(args);
  for (int32_t i = threadIdx.x; i < shape.num_ranks * num_blocks; i += blockDim.x) {
    operation.WaitReady(i / num_blocks, i % num_blocks, 1);
  }
  __syncthreads();

  // first_token[r] is the first of rank r's tokens among all. After a failure nothing is meant by
  // them: the operation only has to end.
  __shared__ int32_t first_token[kMaxRanks + 1];
  if (threadIdx.x == 0) {
    const bool failed = operation.Failed();
    int32_t total = 0;
    for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
      first_token[rank] = total;
      if (!failed) total += __ldcg(&operation.Own()->num_tokens[rank]);
    }
    first_token[shape.num_ranks] = total;
  }
  __syncthreads();

  // Each warp takes consecutive tokens and counts what it has of each key.
  const Indices indices(args, first_token);
  const int32_t num_keys = NumKeys(shape);
  const int32_t num_tokens = first_token[shape.num_ranks];
  const int32_t per_warp = (num_tokens + num_warps * num_blocks - 1) / (num_warps * num_blocks);
  int32_t* const offsets = shared;             // [num_keys]
  int32_t* const totals = shared + num_keys;   // [num_keys]
  int32_t* const counters = totals + num_keys;  // [num_warps, num_keys]
  Share share;
  share.begin = min(num_tokens, (static_cast<int32_t>(blockIdx.x) * num_warps + warp) * per_warp);
  share.end = min(num_tokens, share.begin + per_warp);
  share.counters = counters + warp * num_keys;
  for (int32_t key = threadIdx.x; key < num_warps * num_keys; key += blockDim.x) counters[key] = 0;
  __syncthreads();
  if (by_rank) {
    TokenSort::Count(args, indices, share);
  } else {
    PairSort::Count(args, indices, share);
  }
  __syncthreads();

  // Turns the counts into the first position of each key for each warp of all blocks.
  auto* const block_counts = reinterpret_cast<int32_t*>(workspace.base[workspace.rank] +
                                                        workspace.layout.counts_offset());
  for (int32_t key = threadIdx.x; key < num_keys; key += blockDim.x) {
    int32_t count = 0;
    for (int32_t w = 0; w < num_warps; ++w) count += counters[w * num_keys + key];
    __stcg(&block_counts[blockIdx.x * num_keys + key], count);
  }
  operation.GridBarrier();
  for (int32_t key = threadIdx.x; key < num_keys; key += blockDim.x) {
    int32_t total = 0;
    int32_t position = 0;
#pragma unroll 8
    for (int32_t block = 0; block < num_blocks; ++block) {
      const int32_t count = __ldcg(&block_counts[block * num_keys + key]);
      if (block < static_cast<int32_t>(blockIdx.x)) position += count;
      total += count;
    }
    totals[key] = total;
    for (int32_t w = 0; w < num_warps; ++w) {
      int32_t& counter = counters[w * num_keys + key];
      const int32_t count = counter;
      counter = position;
      position += count;
    }
  }
  __syncthreads();

  if (by_rank) {
    // This block's pairs of each local expert, and those dropped, after the counters.
    int32_t* const kept = counters + num_warps * num_keys;
    int32_t* const routed = kept + shape.num_local_experts();
    __shared__ int32_t dropped;
    for (int32_t i = threadIdx.x; i < 2 * shape.num_local_experts(); i += blockDim.x) kept[i] = 0;
    if (threadIdx.x == 0) dropped = 0;
    __syncthreads();
    TokenSort::Place(args, indices, share, kept, routed, &dropped);
    __syncthreads();
    for (int32_t i = threadIdx.x; i < shape.num_local_experts(); i += blockDim.x) {
      if (kept[i] != 0) atomicAdd(&args.group_sizes[i], kept[i]);
      if (routed[i] != 0) atomicAdd(&args.expert_counts[i], routed[i]);
    }
    if (threadIdx.x == 0) {
      if (dropped != 0) atomicAdd(args.num_dropped, dropped);
      const int64_t rows = totals[workspace.rank];
      if (blockIdx.x == 0) {
        *args.num_rows = static_cast<int32_t>(rows < shape.capacity ? rows : shape.capacity);
      }
    }
  } else {
    PlaceExperts(args, totals, offsets);
    __syncthreads();
    PairSort::Place(args, indices, share, offsets);
  }
  operation.Leave();
}

}  // namespace

Status Prepare(cudaStream_t stream, const PrepareArgs& args) {
  const Shape& shape = args.common.shape;
  const int64_t num_keys = NumKeys(shape);
  const int64_t limit = MaxSharedBytes(PrepareKernel);
  const int64_t fixed = 2 * num_keys + (shape.layout == Layout::kRank ? 2 * shape.num_local_experts() : 0);
  const int64_t num_warps = std::min<int64_t>(
      kMaxWarps, (limit / static_cast<int64_t>(sizeof(int32_t)) - fixed) / num_keys);
  if (num_warps < 1) {
    return Status::Error("prepare has room for fewer than " + std::to_string(num_keys) +
                         " experts in a block's " + std::to_string(limit) +
                         " bytes of shared memory");
  }
  const int64_t bytes = (fixed + num_warps * num_keys) * static_cast<int64_t>(sizeof(int32_t));
  const int32_t num_blocks = std::min<int32_t>(kPrepareBlocks, args.common.workspace.num_sms);
  return Launch(PrepareKernel, num_blocks, static_cast<int>(num_warps) * 32, bytes, stream, args);
}

Status LoadPrepare() { return Load(PrepareKernel); }

}  // namespace jax_ep::cuda
