#include <cstddef>
#include <string>

#include "csrc/core/slots.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/divider.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/low_latency.cuh"
#include "csrc/cuda/low_latency_cast.cuh"
#include "csrc/cuda/payload.cuh"
#include "csrc/cuda/placement.cuh"
#include "csrc/cuda/quantize.cuh"
#include "csrc/cuda/signal.cuh"

// prepare and dispatch in one kernel, for few tokens. Every rank sends its topk_idx to all others,
// and each of its tokens, cast to fp8 where that is asked for, once to every rank that has an
// expert of it. Then every block counts all ranks' pairs by itself, so that no block waits for
// another, and places those of its share of all ranks' tokens: a stable counting sort, as in
// prepare. It moves the rows of that share from the buffer, this rank's own from the operands.
//
// A block's warps have roles. Most send rows while the others exchange and count indices; then one
// fences and tells of the rows while others find each expert's first row; at last one places tokens,
// a batch ahead of all others, which move them.
namespace jax_ep::cuda {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * 32;
constexpr int kSendingWarps = 10;  // where the others count meanwhile
constexpr int kTellingWarp = 0;
constexpr int kPlacingWarp = kWarps - 1;
// Tokens that are sent together, and that are placed and moved together.
constexpr int kSendBatch = 2;
constexpr int kBatch = 7;

static_assert(kSendBatch * kMaxTopk <= kSendingWarps * 32, "a thread for each pair");
static_assert(kBatch * kMaxTopk <= kPlacingWarp * 32, "a thread for each pair");
static_assert(kBatch <= 32, "a lane for each token");

using AllIndices = Indices<LowLatencyChannel>;

// Of tokens that are sent together, the ranks that each is sent to.
struct Targets {
  int32_t ranks[kSendBatch * kMaxTopk];  // [tokens, K], of each token first those there are
  int32_t count[kSendBatch];
};

// Of tokens that are placed together, of any rank, where their rows go.
struct Batch {
  int32_t sources[kBatch];              // rank of a token
  int32_t tokens[kBatch];               // its number there
  int32_t slots[kBatch * kMaxTopk];     // [tokens, K]: a pair's row here, or kNoSlot
  int32_t places[kBatch * kMaxTopk];    // [tokens, K]: those, of each token first those there are
  int32_t num_places[kBatch];
  int32_t chosen[kBatch];  // the tokens that have places
  int32_t num_chosen;
};

// What a block has in shared memory, beside the counters of all experts.
struct Shared {
  Targets targets[kWarps];  // every warp finds them out for itself, and waits for no other
  int32_t first_token[kWarps][kMaxRanks + 1];  // the same; see CountTokens
  Batch batches[2];  // one is read while the next is written
};

// Divisions of a kernel by what it is launched with.
struct Dividers {
  Divider topk;           // of pairs
  Divider local_experts;  // of experts

  __device__ explicit Dividers(const Shape& shape)
      : topk(shape.num_topk), local_experts(shape.num_local_experts()) {}
};

// Which of the block's counters, in dynamic shared memory, is where.
struct Counters {
  int32_t* before;   // [E]: of pairs before the block's next one
  int32_t* offsets;  // [E]: of the pairs from that on, then each expert's first row
  int32_t* counts;   // [E_local]: all pairs of this rank's experts

  static JAX_EP_HOST_DEVICE int64_t Bytes(const Shape& shape) {
    return int64_t{4} * (2 * shape.num_experts + shape.num_local_experts());
  }
  __device__ Counters(int32_t* shared, const Shape& shape)
      : before(shared),
        offsets(shared + shape.num_experts),
        counts(offsets + shape.num_experts) {}
};

__device__ bool Casts(const MoveArgs& args) {
  bool casts = false;
  for (int32_t i = 0; i < args.num_leaves; ++i) {
    casts |= args.leaves[i].quantize != Quantize::kNone;
  }
  return casts;
}

// A team's threads and warps, numbered over the grid so that few of them are of many blocks.
__device__ int32_t SpreadWarp(const Team& team) { return team.warp() * gridDim.x + blockIdx.x; }
__device__ int32_t SpreadThread(const Team& team) {
  return SpreadWarp(team) * 32 + static_cast<int32_t>(threadIdx.x % 32);
}
__device__ int32_t NumThreads(const Team& team) { return gridDim.x * team.num_threads(); }

// Finds the ranks that each of `count` tokens goes to, by one warp. If leaves are cast, this rank's own
// rows are not those that it was given, and it, too, gets them.
template <typename Token>
__device__ void ChooseTargets(const MoveArgs& args, const Dividers& dividers, bool casts,
                              int32_t count, Token token, Targets& targets) {
  const Shape& shape = args.common.shape;
  const int32_t lane = threadIdx.x % 32;
  const uint32_t lanes_before = (1u << lane) - 1;
  __syncwarp();  // the list before has been read
#pragma unroll 1
  for (int32_t i = 0; i < count; ++i) {
    int32_t* const ranks = targets.ranks + i * shape.num_topk;
    const int32_t* const experts = args.topk_idx + int64_t{token(i)} * shape.num_topk;
    int32_t found = 0;
#pragma unroll 1
    for (int32_t first = 0; first < shape.num_topk; first += 32) {
      const int32_t k = first + lane;
      const int32_t expert = k < shape.num_topk ? experts[k] : -1;
      const bool exists = expert >= 0 && expert < shape.num_experts;
      int32_t target = exists ? dividers.local_experts.Quotient(expert) : -1;
      if (target == args.common.workspace.rank && !casts) target = -1;
#pragma unroll 1
      for (int32_t n = 0; n < found; ++n) {
        if (ranks[n] == target) target = -1;
      }
      const uint32_t same = __match_any_sync(~0u, target);
      const bool chosen = target >= 0 && (same & lanes_before) == 0;
      const uint32_t all = __ballot_sync(~0u, chosen);
      if (chosen) ranks[found + __popc(all & lanes_before)] = target;
      found += __popc(all);
      __syncwarp();
    }
    if (lane == 0) targets.count[i] = found;
  }
  __syncwarp();
}

// Sends `count` tokens to their targets; `token(i)` is number i of them.
template <typename Token>
__device__ void SendTokens(const Team& team, const MoveArgs& args,
                           const LowLatencyChannel& channel, const Dividers& dividers,
                           const Targets& targets, int32_t count, Token token) {
  const int32_t num_topk = args.common.shape.num_topk;
  const int32_t rank = args.common.workspace.rank;
  const PairValues& values = args.values;
  auto places = [&](int32_t i) { return targets.count[i]; };
  auto staged = [&](int32_t i, int32_t n) {
    return channel.Row(targets.ranks[i * num_topk + n], rank, token(i));
  };
  // Arrives while the rows are moved.
  const int32_t pair = team.thread();
  const bool has_value = values.tokens != nullptr && pair < count * num_topk;
  const int32_t pair_row = dividers.topk.Quotient(pair);
  const int32_t k = dividers.topk.Remainder(pair);
  uint64_t value = 0;
  if (has_value) {
    const int64_t index = int64_t{token(pair_row)} * num_topk + k;
    value = LoadValue(values.tokens + index * values.bytes, values.bytes);
  }
  for (int32_t l = 0; l < args.num_leaves; ++l) {
    const Leaf& leaf = args.leaves[l];
    const bool casts = leaf.quantize != Quantize::kNone;
    const int64_t bytes = leaf.row_bytes * (casts ? StorageBytes(leaf.dtype) : 1);
    auto row = [&](int32_t i) { return leaf.tokens + token(i) * bytes; };
    if (casts) {
      CastRows(team, leaf, count, row, places, staged);
    } else {
      CopyRows(count, bytes, reinterpret_cast<uintptr_t>(leaf.tokens) | bytes, team.warp(),
               team.num_warps(), row, places,
               [&](int32_t i, int32_t n) { return staged(i, n) + leaf.staging_offset; });
    }
  }
  for (int32_t n = 0; has_value && n < places(pair_row); ++n) {
    StoreValue(staged(pair_row, n) + values.staging_offset + k * values.bytes, value,
               values.bytes);
  }
}

// Tells all ranks of this one's tokens and their experts.
__device__ void SendRouting(const Team& team, const MoveArgs& args, Operation& operation,
                            const LowLatencyChannel& channel) {
  const Shape& shape = args.common.shape;
  const int32_t rank = args.common.workspace.rank;
  if (blockIdx.x == 0) {
    for (int32_t peer = team.thread(); peer < shape.num_ranks; peer += team.num_threads()) {
      ptx::StoreRelaxedSys(&channel.Control(peer)->num_tokens[rank],
                           channel.CountWord(args.common.num_tokens));
    }
  }
  const int64_t mine = int64_t{rank} * shape.max_tokens_per_rank * shape.num_topk;
  SendIndices(args.common, args.topk_idx, operation, channel, SpreadThread(team),
              NumThreads(team), [&](int32_t peer) { return channel.Topk(peer) + mine; });
}

// Whether this rank has anything to send.
__device__ bool SendsRows(const MoveArgs& args) {
  return args.common.shape.num_ranks > 1 || Casts(args);
}

// Calls `work(count, token)` for this block's tokens, every gridDim.x-th, a batch after the other;
// `token(i)` is number i of a batch's `count`, whose targets are in `targets`. `again` says that the
// warp has done this before, so that those of an only batch are there.
template <typename Work>
__device__ void ForEachSent(const MoveArgs& args, const Dividers& dividers, Targets& targets,
                            bool again, Work work) {
  const int32_t num_tokens = SendsRows(args) ? args.common.num_tokens : 0;
  const bool casts = Casts(args);
  const int32_t blocks = gridDim.x;
  const bool only = num_tokens <= static_cast<int32_t>(blockIdx.x) + kSendBatch * blocks;
#pragma unroll 1
  for (int32_t first = blockIdx.x; first < num_tokens; first += kSendBatch * blocks) {
    const int32_t count = min(kSendBatch, (num_tokens - first - 1) / blocks + 1);
    auto token = [&](int32_t i) { return first + i * blocks; };
    if (!again || !only) ChooseTargets(args, dividers, casts, count, token, targets);
    work(count, token);
  }
}

// Tells the others of the block's tokens, by one warp, after all threads' stores.
__device__ void TellOfRows(const MoveArgs& args, const LowLatencyChannel& channel,
                           const Dividers& dividers, Targets& targets) {
  const int32_t num_topk = args.common.shape.num_topk;
  ptx::FenceSys();
  ForEachSent(args, dividers, targets, true, [&](int32_t count, auto token) {
    for (int32_t i = 0; i < count; ++i) {
      for (int32_t n = threadIdx.x % 32; n < targets.count[i]; n += 32) {
        channel.Ready(targets.ranks[i * num_topk + n], token(i));
      }
    }
  });
}

// Poisons all results, by this block alone: no other knows which rows it would have filled, and one
// that began before the group failed fills only its own.
__device__ __noinline__ void Poison(const LowLatencyDispatchArgs& args) {
  const int64_t num_rows = args.move.common.shape.num_rows();
  ClearRouting(args.move.common, args.routing, threadIdx.x, kThreads);
  for (int64_t row = threadIdx.x / 32; row < num_rows; row += kWarps) {
    FillPayloadRow(args.move, row, kPoison);
  }
}

// The first of all ranks' tokens that block `block` places.
__device__ int32_t FirstToken(const int32_t* first_token, const Shape& shape, int32_t block) {
  return static_cast<int32_t>(int64_t{first_token[shape.num_ranks]} * block / gridDim.x);
}

// Waits for the ranks' numbers of tokens; `first_token[r]` becomes the first of rank r's among all. By
// one warp.
__device__ void CountTokens(const Common& common, LowLatencyChannel& channel,
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

// Counts pairs by expert, those before pair `begin` and the others. The channel has lost something, for
// some thread, if a pair did not come, or a peer has failed for one that names no expert.
__device__ void Count(const Team& team, const Common& common, const Operation& operation,
                      LowLatencyChannel& channel, const int32_t* first_token, int32_t begin,
                      const Counters& counters) {
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
__device__ bool Taken(const Shape& shape, const int32_t* offsets, const int32_t* counts,
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
__device__ void FillGaps(const Team& team, const LowLatencyDispatchArgs& args,
                         const Dividers& dividers, const int32_t* first_token,
                         const Counters& counters) {
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
        row < num_rows && !Taken(shape, offsets, counters.counts, static_cast<int32_t>(row));
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

// Fixes the slots of `count` of all ranks' tokens from number `first` on, and where their rows go, and
// waits for what those bring. By one warp. False if it does not come.
__device__ bool Place(const LowLatencyDispatchArgs& args, LowLatencyChannel& channel,
                      const Dividers& dividers, const int32_t* first_token, int32_t first,
                      int32_t count, bool casts, const Counters& counters, Batch& batch) {
  const Shape& shape = args.move.common.shape;
  const int32_t rank = args.move.common.workspace.rank;
  const int32_t num_topk = shape.num_topk;
  const AllIndices indices(shape, channel, channel.Topk(rank), first_token);
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
      int32_t expert = -1;
      if (is_pair) {
        source = indices.Find(first + i, 0);
        source.k = k;
        expert = channel.Value(indices.Load(source));  // it has been counted
      }
      const int32_t position = NextPosition(counters.before, expert);
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
        args.routing.recv_slots[indices.Entry(source)] = here ? slot : kNoSlot;
        batch.slots[i * num_topk + k] = here ? slot : kNoSlot;
        if (k == 0) {
          batch.sources[i] = source.rank;
          batch.tokens[i] = source.token;
        }
      }
      const uint32_t its = __ballot_sync(~0u, here) & token_lanes;
      const int32_t before = is_pair ? batch.num_places[i] : 0;
      if (here) {
        args.routing.row_source[slot] = EncodeSource(shape, source);
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
__device__ void MoveRows(const Team& team, const MoveArgs& args, const LowLatencyChannel& channel,
                         const Dividers& dividers, bool casts, const Batch& batch) {
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

// Finds each expert's first row.
__device__ void PlaceAll(const Team& team, const LowLatencyDispatchArgs& args,
                         const Counters& counters) {
  const Common& common = args.move.common;
  const int32_t num_local = common.shape.num_local_experts();
  const int32_t first_expert = common.workspace.rank * num_local;
  PlaceExperts(
      team, common, args.routing,
      [&](int32_t expert) { return counters.before[expert] + counters.offsets[expert]; },
      [&](int32_t expert, int32_t count, int32_t first) {
        counters.offsets[expert] = first;
        const int32_t local = expert - first_expert;
        if (local >= 0 && local < num_local) counters.counts[local] = count;
      });
}

// Places the block's share of all ranks' tokens, and moves their rows; by all threads. False if
// something did not come.
__device__ bool Receive(const LowLatencyDispatchArgs& args, LowLatencyChannel& channel,
                        const Dividers& dividers, const Counters& counters, Shared& shared) {
  const Shape& shape = args.move.common.shape;
  const bool casts = Casts(args.move);
  const Team movers(0, kPlacingWarp);
  const int32_t* const first_token = shared.first_token[kPlacingWarp];
  const int32_t end = FirstToken(first_token, shape, blockIdx.x + 1);
  if (movers.Has()) FillGaps(movers, args, dividers, first_token, counters);
  int32_t parity = 0;
#pragma unroll 1
  for (int32_t first = FirstToken(first_token, shape, blockIdx.x); first < end; first += kBatch) {
    Batch& batch = shared.batches[parity];
    bool good = true;
    if (!movers.Has()) {
      good = Place(args, channel, dividers, first_token, first, min(kBatch, end - first), casts,
                   counters, batch);
    }
    if (!__syncthreads_and(good)) return false;
    if (movers.Has()) MoveRows(movers, args.move, channel, dividers, casts, batch);
    parity ^= 1;
  }
  return true;
}

__global__ void __launch_bounds__(kThreads, 1)
    LowLatencyDispatchKernel(const __grid_constant__ LowLatencyDispatchArgs args) {
  extern __shared__ int32_t dynamic[];
  __shared__ Shared shared;
  const MoveArgs& move = args.move;
  const Split& split = args.split;
  const Shape& shape = move.common.shape;
  const Counters counters(dynamic, shape);
  for (int32_t i = threadIdx.x; split.receives && i < 2 * shape.num_experts; i += kThreads) {
    counters.before[i] = 0;
  }
  Operation operation(move.common, OpOf(Op::kLowLatencyDispatch, split),
                      RoutingSite(shape) * 31 + PayloadSite(move));
  LowLatencyChannel channel(move, operation, split);
  if (!channel.Enter()) {
    if (split.receives) return Poison(args);
    if (blockIdx.x == 0 && threadIdx.x < 2) split.ticket[threadIdx.x] = ~0u;
    return;
  }
  const bool both = channel.sends() && channel.receives();
  const Team senders(0, both ? kSendingWarps : kWarps);
  const Team counting(both ? kSendingWarps : 0, both ? kWarps - kSendingWarps : kWarps);
  const Dividers dividers(shape);
  const int32_t warp = threadIdx.x / 32;
  Targets& targets = shared.targets[warp];
  if (channel.sends() && counting.Has()) SendRouting(counting, move, operation, channel);
  if (channel.sends() && senders.Has()) {
    ForEachSent(move, dividers, targets, false, [&](int32_t count, auto token) {
      SendTokens(senders, move, channel, dividers, targets, count, token);
    });
  }
  if (channel.receives() && counting.Has()) {
    int32_t* const first_token = shared.first_token[warp];
    CountTokens(move.common, channel, first_token);
    Count(counting, move.common, operation, channel, first_token,
          FirstToken(first_token, shape, blockIdx.x) * shape.num_topk, counters);
  }
  const bool good = __syncthreads_and(!channel.lost());
  if (channel.sends() && warp == kTellingWarp) TellOfRows(move, channel, dividers, targets);
  if (channel.receives()) {
    const Team placing(kTellingWarp + 1, kWarps - kTellingWarp - 1);
    if (good && placing.Has()) PlaceAll(placing, args, counters);
    __syncthreads();
    if (!good || !Receive(args, channel, dividers, counters, shared)) Poison(args);
  }
  channel.Leave();
}

}  // namespace

Status LowLatencyDispatch(cudaStream_t stream, const LowLatencyDispatchArgs& args) {
  if (Status status = CheckLowLatency(args.move); !status.ok()) return status;
  const Common& common = args.move.common;
  const int64_t bytes = args.split.receives ? Counters::Bytes(common.shape) : 0;
  if (const int64_t limit = MaxSharedBytes(LowLatencyDispatchKernel); bytes > limit) {
    return Status::Error("the low-latency dispatch needs " + std::to_string(bytes) +
                         " bytes of shared memory for " +
                         std::to_string(common.shape.num_experts) +
                         " experts, and a block has " + std::to_string(limit));
  }
  return Launch(LowLatencyDispatchKernel, LowLatencyBlocks(common), kThreads, bytes, stream,
                args);
}

Status LoadLowLatencyDispatch() { return Load(LowLatencyDispatchKernel); }

}  // namespace jax_ep::cuda
