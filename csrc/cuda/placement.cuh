#ifndef JAX_EP_CSRC_CUDA_PLACEMENT_CUH_
#define JAX_EP_CSRC_CUDA_PLACEMENT_CUH_

#include <cstdint>

#include "csrc/core/slots.h"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/ptx/memory.cuh"
#include "csrc/cuda/signal.cuh"
#include "csrc/cuda/team.cuh"

// How ranks exchange their topk_idx, and the steps of the counting sort that turns those into
// slots: what prepare and the low-latency dispatch have in common. `Channel` is what carries the
// words: an Operation, or a LowLatencyChannel.
namespace jax_ep::cuda {

// Sent for an index that is neither an expert nor -1, after this rank has failed and said so.
inline constexpr int32_t kBadIndex = -2;

// Sends this rank's indices to every rank: thread `thread` of `num_threads`. `words(peer)` is where
// the peer has those of this rank, [T, K].
template <typename Channel, typename Words>
__device__ void SendIndices(const Common& common, const int32_t* topk_idx, Operation& operation,
                            const Channel& channel, int64_t thread, int64_t num_threads,
                            Words words) {
  const Shape& shape = common.shape;
  const int64_t num_pairs = int64_t{common.num_tokens} * shape.num_topk;
  auto checked = [&](int32_t expert) {
    if (expert >= -1 && expert < shape.num_experts) return channel.Word(expert);
    operation.Fail(Phase::kInput, common.workspace.rank, shape.num_experts, expert);
    return channel.Word(kBadIndex);
  };
  // By two, as far as all addresses allow it: a rank's part begins at the same offset everywhere.
  const uintptr_t mine = reinterpret_cast<uintptr_t>(words(common.workspace.rank));
  const bool aligned = (reinterpret_cast<uintptr_t>(topk_idx) / 4 | mine / 8) % 2 == 0;
  const int64_t num_twos = aligned ? num_pairs / 2 : 0;
  for (int64_t i = thread; i < num_twos; i += num_threads) {
    const int2 experts = reinterpret_cast<const int2*>(topk_idx)[i];
    const ulonglong2 both = {checked(experts.x), checked(experts.y)};
    for (int32_t peer = 0; peer < shape.num_ranks; ++peer) {
      ptx::StoreRelaxedSys(reinterpret_cast<ulonglong2*>(words(peer)) + i, both);
    }
  }
  for (int64_t i = num_twos * 2 + thread; i < num_pairs; i += num_threads) {
    const uint64_t word = checked(topk_idx[i]);
    for (int32_t peer = 0; peer < shape.num_ranks; ++peer) {
      ptx::StoreRelaxedSys(words(peer) + i, word);
    }
  }
}

// The rank of token number `token` of all ranks', which is of none before `rank`; `first_token` has
// the first one of each.
__device__ __forceinline__ int32_t RankOfToken(const int32_t* first_token, int32_t token,
                                               int32_t rank) {
#pragma unroll 1
  while (token >= first_token[rank + 1]) ++rank;
  return rank;
}

// In layouts expert and padded: this rank's sizes, and `place(expert, count, first)` of all experts,
// with how many pairs each has by `count_of(expert)`, and its first row, clipped at capacity,
// beyond which rows do not matter. One warp a rank, a lane a few neighbouring experts.
template <typename CountOf, typename Place>
__device__ __forceinline__ void PlaceExperts(const Team& team, const Common& common,
                                             const Routing& routing, CountOf count_of,
                                             Place place) {
  const Shape& shape = common.shape;
  const int32_t num_local = shape.num_local_experts();
  const int32_t lane = threadIdx.x % 32;
  const int32_t each = (num_local + 31) / 32;
  const int32_t begin = min(num_local, lane * each);
  const int32_t end = min(num_local, begin + each);
  for (int32_t rank = team.warp(); rank < shape.num_ranks; rank += team.num_warps()) {
    const bool writes = blockIdx.x == 0 && rank == common.workspace.rank;
    const int32_t first_expert = rank * num_local;
    int64_t mine = 0;
    for (int32_t local = begin; local < end; ++local) {
      mine += ExpertRows(shape, count_of(first_expert + local));
    }
    int64_t first = mine;  // inclusive prefix sum over the warp
    for (int32_t delta = 1; delta < 32; delta *= 2) {
      const int64_t below = __shfl_up_sync(~0u, first, delta);
      if (lane >= delta) first += below;
    }
    first -= mine;
    int32_t num_rows = 0;
    int32_t num_dropped = 0;
    for (int32_t local = begin; local < end; ++local) {
      const int32_t count = count_of(first_expert + local);
      const int64_t rows = ExpertRows(shape, count);
      if (shape.layout == Layout::kPadded) first = 0;
      place(first_expert + local, count,
            static_cast<int32_t>(first < shape.capacity ? first : shape.capacity));
      if (writes) {
        const int64_t size = ClippedSize(first, rows, shape.capacity);
        routing.group_sizes[local] = static_cast<int32_t>(size);
        routing.expert_counts[local] = count;
        num_rows += static_cast<int32_t>(size);
        num_dropped += count - static_cast<int32_t>(ClippedSize(first, count, shape.capacity));
      }
      first += rows;
    }
    if (!writes) continue;
    num_rows = __reduce_add_sync(~0u, num_rows);
    num_dropped = __reduce_add_sync(~0u, num_dropped);
    if (lane == 0) {
      *routing.num_rows = num_rows;
      *routing.num_dropped = num_dropped;
    }
  }
}

// The lanes of a warp that have the same expert as this one, if it has one; a lane without has -1.
// Votes bit by bit are a little faster than __match_any_sync where most lanes differ.
__device__ __forceinline__ uint32_t SameExpert(int32_t num_experts, int32_t expert) {
  uint32_t same = __ballot_sync(~0u, expert >= 0);
#pragma unroll 4
  for (int32_t bits = num_experts - 1, bit = 0; bits >> bit != 0; ++bit) {
    const bool set = (expert >> bit & 1) != 0;
    const uint32_t all = __ballot_sync(~0u, set);
    same &= set ? all : ~all;
  }
  return same;
}

// The positions of a warp's next 32 pairs among their experts' pairs, in the order of the lanes;
// `counters` has how many there were before. A lane without a pair has expert -1.
__device__ __forceinline__ int32_t NextPosition(int32_t* counters, int32_t num_experts,
                                                int32_t expert) {
  const int32_t lane = threadIdx.x % 32;
  const uint32_t same = SameExpert(num_experts, expert);
  int32_t position = 0;
  if (expert >= 0) position = counters[expert] + __popc(same & ((1u << lane) - 1));
  __syncwarp();
  if (expert >= 0 && lane == 31 - __clz(same)) counters[expert] += __popc(same);
  __syncwarp();
  return position;
}

// A handle without rows: what prepare gives before it finds them, and where it cannot. Thread
// `thread` of `num_threads`.
__device__ __forceinline__ void ClearRouting(const Common& common, const Routing& routing,
                                             int64_t thread, int64_t num_threads) {
  const Shape& shape = common.shape;
  auto fill = [&](int32_t* to, int64_t count, int32_t value) {
#pragma unroll 1
    for (int64_t i = thread; i < count; i += num_threads) to[i] = value;
  };
  fill(routing.row_source, shape.num_rows(), -1);
  fill(routing.slots, int64_t{common.num_tokens} * shape.num_topk, kNoSlot);
  fill(routing.recv_slots, int64_t{shape.num_ranks} * shape.max_tokens_per_rank * shape.num_topk,
       kNoSlot);
  if (shape.layout == Layout::kRank) {
    fill(routing.row_topk_idx, shape.num_rows() * shape.num_topk, -1);
  }
  fill(routing.group_sizes, shape.num_local_experts(), 0);
  fill(routing.expert_counts, shape.num_local_experts(), 0);
  fill(routing.num_rows, 1, 0);
  fill(routing.num_dropped, 1, 0);
}

// What ranks must agree on of a handle, as a number (see Operation).
__device__ __forceinline__ uint32_t RoutingSite(const Shape& shape) {
  return static_cast<uint32_t>(shape.layout) + static_cast<uint32_t>(shape.capacity) * 5 +
         static_cast<uint32_t>(shape.expert_alignment) * 7919;
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_PLACEMENT_CUH_
