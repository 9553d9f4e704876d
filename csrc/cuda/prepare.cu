#include <algorithm>

#include "csrc/core/slots.h"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/signal.cuh"

// Every rank sends its topk_idx to all others, and then computes the rows of all pairs by itself: a
// stable counting sort of the pairs, in the order (rank, token, k), by the expert or, in layout
// rank, by the rank that they go to.
namespace jax_ep::cuda {
namespace {

constexpr int kBlocks = 32;
constexpr int kMaxWarps = 16;

// What a pair is sorted by; -1 for pairs that take no row of their own.
struct Pair {
  int32_t rank;   // source
  int32_t token;
  int32_t k;
  int32_t expert;
  int32_t key;
  int32_t first_k;  // in layout rank, the pair whose row this one shares
};

class Sorter {
 public:
  __device__ Sorter(const PrepareArgs& args, const int32_t* first_token)
      : shape_(args.common.shape),
        topk_(reinterpret_cast<const int32_t*>(
            args.common.workspace.base[args.common.workspace.rank] +
            args.common.workspace.layout.topk_offset())),
        first_token_(first_token) {}

  __device__ int32_t num_keys() const {
    return shape_.layout == Layout::kRank ? shape_.num_ranks : shape_.num_experts;
  }

  // Pair number `index` among all ranks' pairs. `rank` is a lower bound of its rank.
  __device__ Pair Get(int64_t index, int32_t rank) const {
    const int32_t token = static_cast<int32_t>(index / shape_.num_topk);
    Pair pair;
    pair.k = static_cast<int32_t>(index % shape_.num_topk);
    while (token >= first_token_[rank + 1]) ++rank;
    pair.rank = rank;
    pair.token = token - first_token_[rank];
    const int32_t* experts =
        topk_ + (int64_t{rank} * shape_.max_tokens_per_rank + pair.token) * shape_.num_topk;
    pair.expert = __ldcg(experts + pair.k);
    pair.key = pair.expert;
    pair.first_k = pair.k;
    if (shape_.layout == Layout::kRank && pair.expert >= 0) {
      const int32_t target = shape_.rank_of_expert(pair.expert);
      pair.key = target;
      for (int32_t k = 0; k < pair.k; ++k) {
        const int32_t other = __ldcg(experts + k);
        if (other < 0 || shape_.rank_of_expert(other) != target) continue;
        pair.key = -1;
        pair.first_k = k;
        break;
      }
    }
    return pair;
  }

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

__global__ void __launch_bounds__(kMaxWarps * 32) PrepareKernel(const __grid_constant__ PrepareArgs args) {
  extern __shared__ int32_t shared[];
  const Workspace& workspace = args.common.workspace;
  const Shape& shape = args.common.shape;
  const int32_t lane = threadIdx.x % 32;
  const int32_t warp = threadIdx.x / 32;
  const int32_t num_warps = blockDim.x / 32;
  const bool by_rank = shape.layout == Layout::kRank;
  const uint32_t site = static_cast<uint32_t>(shape.layout) * 5 + static_cast<uint32_t>(shape.capacity);
  Operation operation(workspace, Op::kPrepare, site, args.common.position);

  operation.Enter();
  SendIndices(args, operation);
  Clear(args);
  for (int32_t i = threadIdx.x; i < shape.num_ranks * static_cast<int32_t>(gridDim.x); i += blockDim.x) {
    operation.WaitReady(i / gridDim.x, i % gridDim.x, 1);
  }
  __syncthreads();

  // first_token[r] is the first of rank r's tokens among all.
  __shared__ int32_t first_token[kMaxRanks + 1];
  if (threadIdx.x == 0) {
    int32_t total = 0;
    for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
      first_token[rank] = total;
      total += __ldcg(&operation.Own()->num_tokens[rank]);
    }
    // After a failure nothing of this is meant; the operation only has to end.
    if (operation.Failed()) total = 0;
    for (int32_t rank = 0; rank < shape.num_ranks && total == 0; ++rank) first_token[rank] = 0;
    first_token[shape.num_ranks] = total;
  }
  __syncthreads();

  // Each warp takes consecutive tokens. Count its pairs by key.
  const Sorter sorter(args, first_token);
  const int32_t num_keys = sorter.num_keys();
  const int32_t num_tokens = first_token[shape.num_ranks];
  const int32_t all_warps = num_warps * gridDim.x;
  const int32_t tokens_per_warp = (num_tokens + all_warps - 1) / all_warps;
  const int32_t begin_token = min(num_tokens, (static_cast<int32_t>(blockIdx.x) * num_warps + warp) * tokens_per_warp);
  const int32_t end_token = min(num_tokens, begin_token + tokens_per_warp);
  const int64_t begin = int64_t{begin_token} * shape.num_topk;
  const int64_t end = int64_t{end_token} * shape.num_topk;

  int32_t* const offsets = shared;               // [num_keys]
  int32_t* const totals = shared + num_keys;     // [num_keys]
  int32_t* const next = shared + (2 + warp) * num_keys;  // [num_keys] of every warp
  for (int32_t key = lane; key < num_keys; key += 32) next[key] = 0;
  __syncwarp();
  for (int64_t index = begin + lane; index < end; index += 32) {
    const Pair pair = sorter.Get(index, 0);
    if (pair.key >= 0) atomicAdd(&next[pair.key], 1);
  }
  __syncthreads();

  // Turn the counts into the first position of each key for each warp.
  auto* const block_counts = reinterpret_cast<int32_t*>(
      workspace.base[workspace.rank] + workspace.layout.counts_offset());
  for (int32_t key = threadIdx.x; key < num_keys; key += blockDim.x) {
    int32_t count = 0;
    for (int32_t w = 0; w < num_warps; ++w) count += shared[(2 + w) * num_keys + key];
    __stcg(&block_counts[blockIdx.x * num_keys + key], count);
  }
  operation.GridBarrier();
  for (int32_t key = threadIdx.x; key < num_keys; key += blockDim.x) {
    int32_t total = 0;
    int32_t position = 0;
    for (int32_t block = 0; block < static_cast<int32_t>(gridDim.x); ++block) {
      const int32_t count = __ldcg(&block_counts[block * num_keys + key]);
      if (block < static_cast<int32_t>(blockIdx.x)) position += count;
      total += count;
    }
    totals[key] = total;
    offsets[key] = 0;
    for (int32_t w = 0; w < num_warps; ++w) {
      int32_t& first = shared[(2 + w) * num_keys + key];
      const int32_t count = first;
      first = position;
      position += count;
    }
  }
  __syncthreads();
  if (!by_rank) {
    PlaceExperts(args, totals, offsets);
    __syncthreads();
  } else if (blockIdx.x == 0 && threadIdx.x == 0) {
    const int64_t rows = totals[workspace.rank];
    *args.num_rows = static_cast<int32_t>(rows < shape.capacity ? rows : shape.capacity);
  }

  // Give every pair its slot.
  for (int64_t base = begin; base < end; base += 32) {
    const int64_t index = base + lane;
    Pair pair{0, 0, 0, -1, -1, 0};
    if (index < end) pair = sorter.Get(index, 0);
    const uint32_t same = __match_any_sync(~0u, pair.key);
    int32_t position = 0;
    if (pair.key >= 0) position = next[pair.key] + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (pair.key >= 0 && lane == 31 - __clz(same)) next[pair.key] += __popc(same);
    __syncwarp();
    if (pair.key < 0) {
      if (index < end && pair.expert < 0 && pair.rank == workspace.rank) {
        args.slots[int64_t{pair.token} * shape.num_topk + pair.k] = kNoSlot;
      }
      continue;
    }
    const int32_t target = shape.rank_of_expert(pair.expert);
    const int32_t local = pair.expert % shape.num_local_experts();
    const int32_t slot = PairSlot(shape, local, offsets[pair.key], position);
    const int64_t own = int64_t{pair.token} * shape.num_topk + pair.k;
    if (pair.rank == workspace.rank) args.slots[own] = slot;
    if (target != workspace.rank || slot == kNoSlot) continue;
    args.row_source[slot] = EncodeSource(shape, {pair.rank, pair.token, pair.k});
    args.recv_slots[int64_t{pair.rank} * shape.max_tokens_per_rank * shape.num_topk + own] = slot;
  }

  // In layout rank the other pairs of a token share the first one's row.
  if (by_rank) {
    __syncwarp();
    for (int64_t index = begin + lane; index < end; index += 32) {
      const Pair pair = sorter.Get(index, 0);
      if (pair.expert < 0) continue;
      const bool mine = shape.rank_of_expert(pair.expert) == workspace.rank;
      const int64_t own = int64_t{pair.token} * shape.num_topk;
      const int64_t entry = int64_t{pair.rank} * shape.max_tokens_per_rank * shape.num_topk + own;
      if (pair.rank == workspace.rank && pair.first_k != pair.k) {
        args.slots[own + pair.k] = args.slots[own + pair.first_k];
      }
      if (!mine) continue;
      const int32_t local = pair.expert % shape.num_local_experts();
      const int32_t slot = args.recv_slots[entry + pair.first_k];
      atomicAdd(&args.expert_counts[local], 1);
      if (slot == kNoSlot) {
        atomicAdd(args.num_dropped, 1);
        continue;
      }
      if (pair.first_k != pair.k) args.recv_slots[entry + pair.k] = slot;
      args.row_topk_idx[int64_t{slot} * shape.num_topk + pair.k] = local;
      atomicAdd(&args.group_sizes[local], 1);
    }
  }
  operation.Leave();
}

}  // namespace

Status Prepare(cudaStream_t stream, const PrepareArgs& args) {
  const Shape& shape = args.common.shape;
  const int64_t num_keys =
      shape.layout == Layout::kRank ? shape.num_ranks : shape.num_experts;
  const int64_t limit = MaxSharedBytes(PrepareKernel);
  const int64_t num_warps =
      std::min<int64_t>(kMaxWarps, limit / (static_cast<int64_t>(sizeof(int32_t)) * num_keys) - 2);
  if (num_warps < 1) {
    return Status::Error("prepare has room for fewer than " + std::to_string(num_keys) +
                         " experts in a block's " + std::to_string(limit) +
                         " bytes of shared memory");
  }
  const int64_t bytes = (2 + num_warps) * num_keys * static_cast<int64_t>(sizeof(int32_t));
  return Launch(PrepareKernel, kBlocks, static_cast<int>(num_warps) * 32, bytes, stream, args);
}

Status LoadPrepare() { return Load(PrepareKernel); }

}  // namespace jax_ep::cuda
