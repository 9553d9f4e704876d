#ifndef JAX_EP_CSRC_CUDA_LOW_LATENCY_PLACE_CUH_
#define JAX_EP_CSRC_CUDA_LOW_LATENCY_PLACE_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/core/slots.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/divider.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/low_latency.cuh"
#include "csrc/cuda/payload.cuh"
#include "csrc/cuda/placement.cuh"
#include "csrc/cuda/signal.cuh"
#include "csrc/cuda/team.cuh"

// The steps of the receiving half of the low-latency dispatch: counting, placing, moving.
namespace jax_ep::cuda {

// Tokens that are placed and moved together.
inline constexpr int kPlaceBatch = 7;
static_assert(kPlaceBatch <= 32, "a lane for each token");

// Of tokens that are placed together, of any rank, where their rows go.
struct PlacedBatch {
  int32_t sources[kPlaceBatch];            // rank of a token
  int32_t tokens[kPlaceBatch];             // its number there
  int32_t slots[kPlaceBatch * kMaxTopk];   // [tokens, K]: a pair's row here, or kNoSlot
  int32_t places[kPlaceBatch * kMaxTopk];  // [tokens, K]: rows, of each token first those there are
  int32_t num_places[kPlaceBatch];
  int32_t chosen[kPlaceBatch];  // the tokens that have places
  int32_t num_chosen;
};

// Which of the block's counters, in dynamic shared memory, is where.
struct ExpertCounters {
  int32_t* before;   // [E]: of pairs before the block's next one
  int32_t* offsets;  // [E]: of the pairs from that on, then each expert's first row
  int32_t* counts;   // [E_local]: all pairs of this rank's experts

  static JAX_EP_HOST_DEVICE int64_t Bytes(const Shape& shape) {
    return int64_t{4} * (2 * shape.num_experts + shape.num_local_experts());
  }
  __device__ ExpertCounters(int32_t* shared, const Shape& shape)
      : before(shared),
        offsets(shared + shape.num_experts),
        counts(offsets + shape.num_experts) {}
};

// The first of all ranks' tokens that block `block` places.
inline __device__ int32_t FirstToken(const int32_t* first_token, const Shape& shape,
                                     int32_t block) {
  return static_cast<int32_t>(int64_t{first_token[shape.num_ranks]} * block / gridDim.x);
}

// Waits for the ranks' numbers of tokens; `first_token[r]` becomes the first of rank r's among all.
// By one warp.
inline __device__ void CountTokens(const Common& common, LowLatencyChannel& channel,
                            int32_t* first_token) {
  const int32_t lane = threadIdx.x % 32;
  int32_t sum = 0;
  for (int32_t first = 0; first < common.shape.num_ranks; first += 32) {
    const int32_t rank = first + lane;
    int32_t num_tokens = 0;
    if (rank < common.shape.num_ranks) {
      if (!channel.WaitCount(rank, &num_tokens)) num_tokens = 0;
    }
    for (int32_t delta = 1; delta < 32; delta *= 2) {
      const int32_t below = __shfl_up_sync(~0u, num_tokens, delta);
      if (lane >= delta) num_tokens += below;
    }
    if (rank < common.shape.num_ranks) first_token[rank + 1] = sum + num_tokens;
    sum += __shfl_sync(~0u, num_tokens, 31);
  }
  if (lane == 0) first_token[0] = 0;
  __syncwarp();
}

// Counts pairs by expert, those before pair `begin` and the others. The channel has lost something,
// for some thread, if a pair did not come, or a peer has failed for one that names no expert.
inline __device__ void CountPairs(const Team& team, const Common& common,
                                  const Operation& operation, LowLatencyChannel& channel,
                                  const int32_t* first_token, int32_t begin,
                                  const ExpertCounters& counters) {
  const Shape& shape = common.shape;
  const uint64_t* const words = channel.Topk(common.workspace.rank);
  const int32_t rank_pairs = shape.max_tokens_per_rank * shape.num_topk;
  const int32_t num_pairs = first_token[shape.num_ranks] * shape.num_topk;
  constexpr int kAtOnce = 6;
  int32_t rank = 0;
#pragma unroll 1
  for (int32_t base = team.thread(); base < num_pairs; base += team.num_threads() * kAtOnce) {
    int32_t entries[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int32_t pair = base + u * team.num_threads();
      entries[u] = -1;
      if (pair >= num_pairs) continue;
#pragma unroll 1
      while (pair >= first_token[rank + 1] * shape.num_topk) ++rank;
      entries[u] = rank * rank_pairs + pair - first_token[rank] * shape.num_topk;
    }
    // All are under way together, again and again until all have come.
    uint64_t seen[kAtOnce];
    while (true) {
      int32_t missing = -1;
      uint64_t missed = 0;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (entries[u] >= 0) seen[u] = ptx::LoadRelaxedSys(words + entries[u]);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (entries[u] < 0 || channel.Came(seen[u])) continue;
        missing = entries[u];
        missed = seen[u];
      }
      if (missing < 0) break;
      int32_t value;
      if (!channel.WaitWord(missing / rank_pairs, words + missing, missed, &value)) break;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (entries[u] < 0 || channel.lost()) continue;
      const int32_t expert = channel.Value(seen[u]);
      if (expert == kBadIndex) channel.Lose();
      if (expert < 0) continue;
      const bool before = base + u * team.num_threads() < begin;
      atomicAdd(&(before ? counters.before : counters.offsets)[expert], 1);
    }
  }
  if (channel.lost()) {
    ptx::FenceSys();  // between a bad index and what the peer has said before
    operation.Failed();
  }
}

// Whether one of this rank's pairs takes row `row`. `offsets` and `counts` are of its experts.
inline __device__ bool RowTaken(const Shape& shape, const int32_t* offsets, const int32_t* counts,
                      int32_t row) {
  if (shape.layout == Layout::kPadded) {
    const auto capacity = static_cast<int32_t>(shape.capacity);
    return row % capacity < counts[row / capacity];
  }
  // The last expert that begins at or before the row.
  int32_t low = 0;
  int32_t high = shape.num_local_experts();
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (offsets[middle] <= row ? low : high) = middle;
  }
  return row - offsets[low] < counts[low];
}

// Zero in the rows that no pair takes, and -1 in the handle for those and for tokens that are not
// there.
inline __device__ void FillGaps(const Team& team, const LowLatencyDispatchArgs& args,
                         const ShapeDividers& dividers, const int32_t* first_token,
                         const ExpertCounters& counters) {
  const Shape& shape = args.move.common.shape;
  const int32_t lane = threadIdx.x % 32;
  const int32_t* const offsets =
      counters.offsets + args.move.common.workspace.rank * shape.num_local_experts();
  const auto num_rows = static_cast<int32_t>(shape.num_rows());
  // Neighbouring rows go to different blocks; a warp looks at 32 of its own together.
  const int32_t num_warps = static_cast<int32_t>(gridDim.x) * team.num_warps();
  for (int64_t base = SpreadWarp(team); base < num_rows; base += num_warps * 32) {
    const int64_t row = base + int64_t{lane} * num_warps;
    const bool gap =
        row < num_rows && !RowTaken(shape, offsets, counters.counts, static_cast<int32_t>(row));
    if (gap) args.routing.row_source[row] = -1;
    for (uint32_t left = __ballot_sync(~0u, gap); left != 0; left &= left - 1) {
      FillPayloadRow(args.move, base + (__ffs(left) - 1) * num_warps, 0);
    }
  }
  const Divider rank_tokens(shape.max_tokens_per_rank);
  const int32_t entries = shape.num_ranks * shape.max_tokens_per_rank * shape.num_topk;
  for (int32_t i = SpreadThread(team); i < entries; i += NumThreads(team)) {
    const int32_t token = dividers.topk.Quotient(i);
    const int32_t rank = rank_tokens.Quotient(token);
    const int32_t num_tokens = first_token[rank + 1] - first_token[rank];
    if (rank_tokens.Remainder(token) >= num_tokens) args.routing.recv_slots[i] = kNoSlot;
  }
}

// Fixes the slots of `count` of all ranks' tokens from number `first` on, and where their rows go,
// and waits for what those bring. By one warp. False if it does not come.
inline __device__ bool PlaceTokens(const LowLatencyDispatchArgs& args, LowLatencyChannel& channel,
                                   const ShapeDividers& dividers, const int32_t* first_token,
                                   int32_t first, int32_t count, bool casts,
                                   const ExpertCounters& counters, PlacedBatch& batch) {
  const Shape& shape = args.move.common.shape;
  const int32_t rank = args.move.common.workspace.rank;
  const int32_t num_topk = shape.num_topk;
  const uint64_t* const words = channel.Topk(rank);
  const int32_t lane = threadIdx.x % 32;
  const uint32_t lanes_before = (1u << lane) - 1;
  if (lane < count) batch.num_places[lane] = 0;
  __syncwarp();
  // As many tokens at a time as have a lane for each pair, or a half of one.
  const int32_t at_once = num_topk < 32 ? 32 / num_topk : 1;
  const int32_t token_of_lane = dividers.topk.Quotient(lane);
  const uint32_t token_lanes =
      num_topk < 32 ? ((1u << num_topk) - 1) << (lane - dividers.topk.Remainder(lane)) : ~0u;
  for (int32_t begin = 0; begin < count; begin += at_once) {
    for (int32_t half = 0; half < num_topk; half += 32) {
      const int32_t i = begin + token_of_lane;
      const int32_t k = half + dividers.topk.Remainder(lane);
      const bool is_pair = token_of_lane < at_once && i < count && k < num_topk;
      Source source{-1, 0, k};
      int32_t entry = -1;  // where its word is
      int32_t expert = -1;
      if (is_pair) {
        source.rank = RankOfToken(first_token, first + i, 0);
        source.token = first + i - first_token[source.rank];
        entry = EncodeSource(shape, source);
        expert = channel.Value(ptx::LoadRelaxedSys(words + entry));  // it has been counted
      }
      const int32_t position = NextPosition(counters.before, shape.num_experts, expert);
      int32_t slot = kNoSlot;
      bool here = false;
      if (expert >= 0) {
        slot = PairSlot(shape, dividers.local_experts.Remainder(expert), counters.offsets[expert],
                        position);
        here = slot != kNoSlot && dividers.local_experts.Quotient(expert) == rank;
      }
      if (is_pair) {
        if (source.rank == rank) {
          args.routing.slots[int64_t{source.token} * num_topk + k] = slot;
        }
        args.routing.recv_slots[entry] = here ? slot : kNoSlot;
        batch.slots[i * num_topk + k] = here ? slot : kNoSlot;
        if (k == 0) {
          batch.sources[i] = source.rank;
          batch.tokens[i] = source.token;
        }
      }
      const uint32_t its = __ballot_sync(~0u, here) & token_lanes;
      const int32_t before = is_pair ? batch.num_places[i] : 0;
      if (here) {
        args.routing.row_source[slot] = entry;
        batch.places[i * num_topk + before + __popc(its & lanes_before)] = slot;
      }
      __syncwarp();
      if (is_pair && k == half) batch.num_places[i] = before + __popc(its);
      __syncwarp();
    }
  }
  const bool chosen = lane < count && batch.num_places[lane] > 0;
  const uint32_t all = __ballot_sync(~0u, chosen);
  if (chosen) {
    batch.chosen[__popc(all & lanes_before)] = lane;
    const int32_t source = batch.sources[lane];
    if (casts || source != rank) channel.WaitReady(source, batch.tokens[lane]);
  }
  if (lane == 0) batch.num_chosen = __popc(all);
  return __all_sync(~0u, !channel.lost());
}

// Moves the batch's tokens to their places.
inline __device__ void MovePlacedRows(const Team& team, const MoveArgs& args,
                                      const LowLatencyChannel& channel,
                                      const ShapeDividers& dividers, bool casts,
                                      const PlacedBatch& batch) {
  const int32_t num_topk = args.common.shape.num_topk;
  const int32_t rank = args.common.workspace.rank;
  const PairValues& values = args.values;
  // Of row j that is moved: whether it lies in the operands, and where it is staged otherwise.
  auto in_place = [&](int32_t i) { return batch.sources[i] == rank && !casts; };
  auto staged = [&](int32_t i) { return channel.Row(rank, batch.sources[i], batch.tokens[i]); };
  // Arrives while the rows are moved.
  const int32_t pair = team.thread();
  int32_t value_slot = kNoSlot;
  uint64_t value = 0;
  if (values.rows != nullptr && pair < batch.num_chosen * num_topk) {
    const int32_t i = batch.chosen[dividers.topk.Quotient(pair)];
    const int32_t k = dividers.topk.Remainder(pair);
    value_slot = batch.slots[i * num_topk + k];
    if (value_slot != kNoSlot) {
      const std::byte* const its_values =
          in_place(i) ? values.tokens + int64_t{batch.tokens[i]} * num_topk * values.bytes
                      : staged(i) + values.staging_offset;
      value = LoadValue(its_values + k * values.bytes, values.bytes);
    }
  }
  auto places = [&](int32_t j) { return batch.num_places[batch.chosen[j]]; };
  auto place = [&](int32_t j, int32_t n) -> int64_t {
    return batch.places[batch.chosen[j] * num_topk + n];
  };
  for (int32_t l = 0; l < args.num_leaves; ++l) {
    const Leaf& leaf = args.leaves[l];
    const uintptr_t own = casts ? 0 : reinterpret_cast<uintptr_t>(leaf.tokens);
    CopyRows(
        batch.num_chosen, leaf.row_bytes,
        own | reinterpret_cast<uintptr_t>(leaf.rows) | leaf.row_bytes, team.warp(),
        team.num_warps(),
        [&](int32_t j) -> const std::byte* {
          const int32_t i = batch.chosen[j];
          return in_place(i) ? leaf.tokens + batch.tokens[i] * leaf.row_bytes
                             : staged(i) + leaf.staging_offset;
        },
        places, [&](int32_t j, int32_t n) { return leaf.rows + place(j, n) * leaf.row_bytes; });
    if (leaf.scales == nullptr) continue;
    // By the warps that have the fewest pieces of the rows.
    CopyRows(
        batch.num_chosen, leaf.scale_bytes,
        reinterpret_cast<uintptr_t>(leaf.scales) | leaf.scale_bytes,
        team.num_warps() - 1 - team.warp(), team.num_warps(),
        [&](int32_t j) -> const std::byte* {
          return staged(batch.chosen[j]) + leaf.scales_offset;
        },
        places,
        [&](int32_t j, int32_t n) { return leaf.scales + place(j, n) * leaf.scale_bytes; });
  }
  if (value_slot != kNoSlot) {
    StoreValue(values.rows + int64_t{value_slot} * values.bytes, value, values.bytes);
  }
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_LOW_LATENCY_PLACE_CUH_
