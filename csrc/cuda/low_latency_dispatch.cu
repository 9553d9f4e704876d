#include <cstddef>
#include <string>

#include "csrc/core/slots.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/low_latency.cuh"
#include "csrc/cuda/payload.cuh"
#include "csrc/cuda/placement.cuh"
#include "csrc/cuda/quantize.cuh"
#include "csrc/cuda/signal.cuh"
#include "csrc/cuda/vector.cuh"

// prepare and dispatch in one kernel, for few tokens. Every rank sends its topk_idx to all others,
// and each of its tokens, cast to fp8 where that is asked for, once to every rank that has an
// expert of it. Then every block counts all ranks' pairs by itself, so that no block waits for
// another, and places those of its share of all ranks' tokens: a stable counting sort, as in
// prepare. It moves the rows of that share from the buffer, this rank's own from the operands.
namespace jax_ep::cuda {
namespace {

constexpr int kThreads = kLowLatencyThreads;
constexpr int kWarps = kLowLatencyWarps;

using AllIndices = Indices<LowLatencyChannel>;

// What a block has in shared memory, beside the counters of all experts.
struct Shared {
  int32_t first_token[kMaxRanks + 1];  // see SumTokens
  // Of a batch of tokens, [tokens, K], a thread for each. Sending, the ranks to send to, -1 where
  // there is none.
  int32_t targets[kThreads];
  // Receiving:
  int32_t experts[kThreads];
  int32_t slots[kThreads];   // rows on this rank, or kNoSlot
  int32_t tokens[kThreads];  // of a token the number in tables [R, max_tokens_per_rank]
  int32_t here[kThreads];    // those of the batch's tokens that have a row here
  int32_t num_here;
};

// Which of the block's counters, in dynamic shared memory, is where.
struct Counters {
  int32_t* before;   // [E]: of pairs before the block's next one
  int32_t* offsets;  // [E]: all pairs, then each expert's first row
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
__device__ int64_t SpreadThread(const Team& team) {
  return int64_t{SpreadWarp(team)} * 32 + threadIdx.x % 32;
}
__device__ int64_t NumThreads(const Team& team) { return int64_t{gridDim.x} * team.num_threads(); }

// Casts a leaf of `count` tokens; `token(i)` is its row, `to(i, k)`, up to `most`, where its staged
// row goes, null for nowhere.
template <typename T, typename Token, typename To>
__device__ void CastRows(const Team& team, const Leaf& leaf, int32_t count, int32_t most,
                         Token token, To to) {
  using Storage = typename T::Storage;
  const int32_t warp = team.warp();
  const int32_t lane = threadIdx.x % 32;
  if (!CastsVectors(leaf)) {
    const int32_t line_blocks = NumBlocks(leaf.columns);
    const auto blocks = static_cast<int32_t>(
        leaf.columns == 0 ? 0 : leaf.row_bytes / leaf.columns * line_blocks);
#pragma unroll 1
    for (int32_t unit = warp; unit < count * blocks; unit += team.num_warps()) {
      const int32_t row = unit / blocks;
      const int32_t block = unit % blocks;
      const int32_t first = block % line_blocks * kBlockColumns;
      const int64_t begin = int64_t{block / line_blocks} * leaf.columns + first;
      uint32_t cast;
      const BlockScale scale =
          CastBlock<T>(leaf.quantize, reinterpret_cast<const Storage*>(token(row)) + begin,
                       leaf.columns - first, &cast);
#pragma unroll 1
      for (int32_t k = 0; k < most; ++k) {
        std::byte* const staged = to(row, k);
        if (staged == nullptr) continue;
        StoreBlock(cast, leaf.columns - first, staged + leaf.staging_offset + begin);
        if (lane == 0) StoreScale(leaf, staged + leaf.scales_offset, block, scale);
      }
    }
    return;
  }
  constexpr int kElements = kVectorElements<T>;
  constexpr int kGroup = kBlockColumns / kElements;  // lanes that have a block
  constexpr int kUnroll = 2;
  const auto vectors =
      static_cast<int32_t>(leaf.row_bytes * static_cast<int64_t>(sizeof(Storage)) / 16);
  const int32_t row_pieces = (vectors + 31) / 32;
  const int32_t pieces = count * row_pieces;
#pragma unroll 1
  for (int32_t first = warp; first < pieces; first += kUnroll * team.num_warps()) {
    uint4 loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t piece = first + u * team.num_warps();
      const int32_t index = piece % row_pieces * 32 + lane;
      loaded[u] = uint4{0, 0, 0, 0};
      if (piece < pieces && index < vectors) {
        loaded[u] = Load(reinterpret_cast<const uint4*>(token(piece / row_pieces)) + index);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t piece = first + u * team.num_warps();
      const int32_t index = piece % row_pieces * 32 + lane;
      float x[kElements];
      Unpack<T>(loaded[u], x);
      uint32_t magnitude = 0;
#pragma unroll
      for (int i = 0; i < kElements; ++i) magnitude = max(magnitude, Magnitude(x[i]));
#pragma unroll
      for (int delta = 1; delta < kGroup; delta *= 2) {
        magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, delta));
      }
      if (piece >= pieces || index >= vectors) continue;
      const BlockScale scale = ScaleOf(leaf.quantize, magnitude);
      const uint32_t low = CastFour(&x[0], scale.inverse);
      const uint32_t high = kElements == 8 ? CastFour(&x[kElements - 4], scale.inverse) : 0;
      const int32_t column = index * kElements;
#pragma unroll 1
      for (int32_t k = 0; k < most; ++k) {
        std::byte* const staged = to(piece / row_pieces, k);
        if (staged == nullptr) continue;
        std::byte* const values = staged + leaf.staging_offset + column;
        if constexpr (kElements == 8) {
          *reinterpret_cast<uint2*>(values) = {low, high};
        } else {
          *reinterpret_cast<uint32_t*>(values) = low;
        }
        if (lane % kGroup == 0) {
          StoreScale(leaf, staged + leaf.scales_offset, column / kBlockColumns, scale);
        }
      }
    }
  }
}

// Sends `count` tokens of the batch from its place `first` on to the ranks in `targets`; `token(i)` is
// number i of the batch.
template <typename Token>
__device__ void SendTokens(const Team& team, const MoveArgs& args,
                           const LowLatencyChannel& channel, const int32_t* targets,
                           int32_t first, int32_t count, Token token) {
  const int32_t num_topk = args.common.shape.num_topk;
  const int32_t rank = args.common.workspace.rank;
  const PairValues& values = args.values;
  auto staged = [&](int32_t i, int32_t k) -> std::byte* {
    const int32_t target = targets[(first + i) * num_topk + k];
    return target < 0 ? nullptr : channel.Row(target, rank, token(first + i));
  };
  // Arrives while the rows are moved.
  const int32_t pair = team.thread();
  const bool has_value = values.tokens != nullptr && pair < count * num_topk;
  uint64_t value = 0;
  if (has_value) {
    const int64_t index =
        int64_t{token(first + pair / num_topk)} * num_topk + pair % num_topk;
    value = LoadValue(values.tokens + index * values.bytes, values.bytes);
  }
  for (int32_t l = 0; l < args.num_leaves; ++l) {
    const Leaf& leaf = args.leaves[l];
    const int64_t bytes =
        leaf.row_bytes * (leaf.quantize == Quantize::kNone ? 1 : StorageBytes(leaf.dtype));
    auto row = [&](int32_t i) { return leaf.tokens + token(first + i) * bytes; };
    if (leaf.quantize == Quantize::kNone) {
      CopyRows(count, bytes, reinterpret_cast<uintptr_t>(leaf.tokens) | bytes, num_topk,
               team.warp(), team.num_warps(), row, [&](int32_t i, int32_t k) {
                 std::byte* const to = staged(i, k);
                 return to == nullptr ? nullptr : to + leaf.staging_offset;
               });
    } else if (leaf.dtype == DType::kBF16) {
      CastRows<BF16>(team, leaf, count, num_topk, row, staged);
    } else if (leaf.dtype == DType::kF16) {
      CastRows<F16>(team, leaf, count, num_topk, row, staged);
    } else {
      CastRows<F32>(team, leaf, count, num_topk, row, staged);
    }
  }
  for (int32_t k = 0; has_value && k < num_topk; ++k) {
    std::byte* const to = staged(pair / num_topk, k);
    if (to == nullptr) continue;
    StoreValue(to + values.staging_offset + pair % num_topk * values.bytes, value, values.bytes);
  }
}

// In shared memory, the ranks that a batch of `count` tokens go to, each once for a token. If
// leaves are cast, this rank's own rows are not those that it was given, and it, too, gets them.
template <typename Token>
__device__ void ChooseTargets(const Team& team, const MoveArgs& args, int32_t* targets, bool casts,
                              int32_t count, Token token) {
  const Shape& shape = args.common.shape;
  const int32_t pair = team.thread();
  const int32_t k = pair % shape.num_topk;
  const bool in_batch = pair < count * shape.num_topk;
  int32_t target = -1;
  if (in_batch) {
    const int64_t first = int64_t{token(pair / shape.num_topk)} * shape.num_topk;
    const int32_t expert = args.topk_idx[first + k];
    if (expert >= 0 && expert < shape.num_experts) target = shape.rank_of_expert(expert);
    if (target == args.common.workspace.rank && !casts) target = -1;
    targets[pair] = target;
  }
  team.Sync();
  bool again = false;
  for (int32_t other = pair - k; in_batch && other < pair; ++other) {
    again |= targets[other] == target;
  }
  team.Sync();
  if (again) targets[pair] = -1;
  team.Sync();
}

__device__ void Send(const Team& team, const LowLatencyDispatchArgs& args, Operation& operation,
                     const LowLatencyChannel& channel, Shared& shared) {
  const MoveArgs& move = args.move;
  const Shape& shape = move.common.shape;
  const int32_t rank = move.common.workspace.rank;
  const int32_t num_tokens = move.common.num_tokens;
  if (blockIdx.x == 0) {
    for (int32_t peer = team.thread(); peer < shape.num_ranks; peer += team.num_threads()) {
      ptx::StoreRelaxedSys(&channel.Control(peer)->num_tokens[rank], channel.Word(num_tokens));
    }
  }
  const int64_t mine = int64_t{rank} * shape.max_tokens_per_rank * shape.num_topk;
  SendIndices(move.common, move.topk_idx, operation, channel, SpreadThread(team),
              NumThreads(team), [&](int32_t peer) { return channel.Topk(peer) + mine; });

  const bool casts = Casts(move);
  if (shape.num_ranks == 1 && !casts) return;
  // Every gridDim.x-th token, in batches of as many as have a thread for each pair.
  const int32_t blocks = gridDim.x;
  const int32_t block = blockIdx.x;
  const int32_t count = block < num_tokens ? (num_tokens - block - 1) / blocks + 1 : 0;
  const int32_t most = team.num_threads() / shape.num_topk;
  for (int32_t begin = 0; begin < count; begin += most) {
    const int32_t batch = min(most, count - begin);
    auto token = [&](int32_t i) { return block + (begin + i) * blocks; };
    ChooseTargets(team, move, shared.targets, casts, batch, token);
    for (int32_t first = 0; first < batch; first += kTokensPerFence) {
      const int32_t told = min(kTokensPerFence, batch - first);
      SendTokens(team, move, channel, shared.targets, first, told, token);
      Publish(team, told * shape.num_topk, [&](int32_t i) {
        const int32_t pair = first * shape.num_topk + i;
        const int32_t target = shared.targets[pair];
        if (target >= 0) channel.Ready(target, token(pair / shape.num_topk));
      });
    }
    team.Sync();
  }
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
__device__ int32_t FirstToken(const Shared& shared, const Shape& shape, int32_t block) {
  return static_cast<int32_t>(int64_t{shared.first_token[shape.num_ranks]} * block / gridDim.x);
}

// Counts all pairs by expert: before pair `begin`, and all. False, for all threads, if some did not
// come, or a peer has sent -1 for an index that is none, and said so.
__device__ bool Count(const Team& team, const Common& common, Operation& operation, LowLatencyChannel& channel,
                      const AllIndices& indices, int32_t num_pairs, int32_t begin,
                      const Counters& counters) {
  const Shape& shape = common.shape;
  constexpr int kAtOnce = 6;
  int32_t rank = 0;
  for (int32_t base = team.thread(); base < num_pairs;
       base += team.num_threads() * kAtOnce) {
    Source sources[kAtOnce];
    uint64_t words[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int32_t pair = base + u * team.num_threads();
      if (pair >= num_pairs) continue;
      sources[u] = indices.Find(pair / shape.num_topk, rank);
      sources[u].k = pair % shape.num_topk;
      rank = sources[u].rank;
      words[u] = indices.Load(sources[u]);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int32_t pair = base + u * team.num_threads();
      if (pair >= num_pairs) continue;
      const int32_t expert = indices.Expert(sources[u], words[u]);
      if (expert < 0) continue;
      atomicAdd(&(pair < begin ? counters.before : counters.offsets)[expert], 1);
    }
  }
  team.Sync();
  const int32_t first_expert = common.workspace.rank * shape.num_local_experts();
  for (int32_t expert = team.thread(); expert < shape.num_experts;
       expert += team.num_threads()) {
    const int32_t count = counters.before[expert] + counters.offsets[expert];
    counters.offsets[expert] = count;
    const int32_t local = expert - first_expert;
    if (local >= 0 && local < shape.num_local_experts()) counters.counts[local] = count;
  }
  const bool failed = team.thread() == 0 && operation.Failed();
  return team.SyncAnd(!failed && !channel.lost());
}

// Whether one of this rank's pairs takes row `row`. `offsets` and `counts` are of its experts.
__device__ bool Taken(const Shape& shape, const int32_t* offsets, const int32_t* counts,
                      int64_t row) {
  if (shape.layout == Layout::kPadded) return row % shape.capacity < counts[row / shape.capacity];
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
                         const int32_t* first_token, const Counters& counters) {
  const Shape& shape = args.move.common.shape;
  const int32_t lane = threadIdx.x % 32;
  const int32_t* const offsets =
      counters.offsets + args.move.common.workspace.rank * shape.num_local_experts();
  const int64_t num_rows = shape.num_rows();
  // Neighbouring rows go to different blocks; a warp looks at 32 of its own together.
  const int64_t num_warps = int64_t{gridDim.x} * team.num_warps();
  for (int64_t base = SpreadWarp(team); base < num_rows; base += num_warps * 32) {
    const int64_t row = base + lane * num_warps;
    const bool gap = row < num_rows && !Taken(shape, offsets, counters.counts, row);
    if (gap) args.routing.row_source[row] = -1;
    for (uint32_t left = __ballot_sync(~0u, gap); left != 0; left &= left - 1) {
      FillPayloadRow(args.move, base + (__ffs(left) - 1) * num_warps, 0);
    }
  }
  const int64_t entries =
      int64_t{shape.num_ranks} * shape.max_tokens_per_rank * shape.num_topk;
  for (int64_t i = SpreadThread(team); i < entries; i += NumThreads(team)) {
    const auto token = static_cast<int32_t>(i / shape.num_topk);
    const int32_t rank = token / shape.max_tokens_per_rank;
    const int32_t num_tokens = first_token[rank + 1] - first_token[rank];
    if (token % shape.max_tokens_per_rank >= num_tokens) args.routing.recv_slots[i] = kNoSlot;
  }
}

// Fixes the slots of a batch of `count` of all ranks' tokens from number `first` on, and which of
// them have a row here, and waits for what those bring. False, for all threads, if it does not
// come.
__device__ bool Place(const LowLatencyDispatchArgs& args, LowLatencyChannel& channel,
                      const AllIndices& indices, int32_t first, int32_t count,
                      bool casts, const Counters& counters, Shared& shared) {
  const Shape& shape = args.move.common.shape;
  const int32_t rank = args.move.common.workspace.rank;
  const int32_t pair = threadIdx.x;
  const int32_t num_pairs = count * shape.num_topk;
  Source source{-1, 0, 0};
  int32_t expert = -1;
  if (pair < num_pairs) {
    source = indices.Find(first + pair / shape.num_topk, 0);
    source.k = pair % shape.num_topk;
    expert = indices.Expert(source, indices.Load(source));
    shared.experts[pair] = expert;
    if (source.k == 0) {
      shared.tokens[pair / shape.num_topk] =
          source.rank * shape.max_tokens_per_rank + source.token;
    }
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int32_t base = 0; base < num_pairs; base += 32) {
      const int32_t at = base + static_cast<int32_t>(threadIdx.x);
      const int32_t key = at < num_pairs ? shared.experts[at] : -1;
      const int32_t position = NextPosition(counters.before, key);
      if (at >= num_pairs) continue;
      shared.slots[at] = key < 0 ? kNoSlot
                                 : PairSlot(shape, key % shape.num_local_experts(),
                                            counters.offsets[key], position);
    }
  }
  __syncthreads();
  const int32_t slot = pair < num_pairs ? shared.slots[pair] : kNoSlot;
  const bool here = slot != kNoSlot && shape.rank_of_expert(expert) == rank;
  if (pair < num_pairs) {
    if (source.rank == rank) {
      args.routing.slots[int64_t{source.token} * shape.num_topk + source.k] = slot;
    }
    args.routing.recv_slots[indices.Entry(source)] = here ? slot : kNoSlot;
    if (here) args.routing.row_source[slot] = EncodeSource(shape, source);
    shared.slots[pair] = here ? slot : kNoSlot;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int32_t num_here = Select(count, shared.here, [&](int32_t i) {
      bool any = false;
      for (int32_t k = 0; k < shape.num_topk; ++k) {
        any |= shared.slots[i * shape.num_topk + k] != kNoSlot;
      }
      return any;
    });
    if (threadIdx.x == 0) shared.num_here = num_here;
  }
  if (here && (casts || source.rank != rank)) channel.WaitReady(source.rank, source.token);
  return __syncthreads_and(!channel.lost());
}

// Moves the batch's tokens that have rows here to them.
__device__ void MoveRows(const MoveArgs& args, const LowLatencyChannel& channel, bool casts,
                         const Shared& shared) {
  const int32_t num_topk = args.common.shape.num_topk;
  const int32_t rank = args.common.workspace.rank;
  const PairValues& values = args.values;
  const int32_t max_tokens = args.common.shape.max_tokens_per_rank;
  auto source = [&](int32_t i) -> Source {
    const int32_t token = shared.tokens[shared.here[i]];
    return {token / max_tokens, token % max_tokens, 0};
  };
  auto in_place = [&](const Source& token) { return token.rank == rank && !casts; };
  auto staged = [&](const Source& token) { return channel.Row(rank, token.rank, token.token); };
  auto slot = [&](int32_t i, int32_t k) -> int64_t {
    return shared.slots[shared.here[i] * num_topk + k];
  };
  // Arrives while the rows are moved.
  const int32_t pair = threadIdx.x;
  const int64_t value_slot = values.rows != nullptr && pair < shared.num_here * num_topk
                                 ? slot(pair / num_topk, pair % num_topk)
                                 : kNoSlot;
  uint64_t value = 0;
  if (value_slot != kNoSlot) {
    const Source token = source(pair / num_topk);
    const std::byte* const token_values =
        in_place(token) ? values.tokens + int64_t{token.token} * num_topk * values.bytes
                        : staged(token) + values.staging_offset;
    value = LoadValue(token_values + pair % num_topk * values.bytes, values.bytes);
  }
  for (int32_t l = 0; l < args.num_leaves; ++l) {
    const Leaf& leaf = args.leaves[l];
    auto places = [&](std::byte* rows, int64_t bytes) {
      return [=, &slot](int32_t i, int32_t k) {
        const int64_t row = slot(i, k);
        return row == kNoSlot ? nullptr : rows + row * bytes;
      };
    };
    const uintptr_t own = casts ? 0 : reinterpret_cast<uintptr_t>(leaf.tokens);
    CopyRows(
        shared.num_here, leaf.row_bytes,
        own | reinterpret_cast<uintptr_t>(leaf.rows) | leaf.row_bytes, num_topk, threadIdx.x / 32,
        kWarps,
        [&](int32_t i) -> const std::byte* {
          const Source token = source(i);
          return in_place(token) ? leaf.tokens + token.token * leaf.row_bytes
                                 : staged(token) + leaf.staging_offset;
        },
        places(leaf.rows, leaf.row_bytes));
    if (leaf.scales == nullptr) continue;
    // By the warps that have the fewest pieces of the rows.
    CopyRows(
        shared.num_here, leaf.scale_bytes,
        reinterpret_cast<uintptr_t>(leaf.scales) | leaf.scale_bytes, num_topk,
        kWarps - 1 - threadIdx.x / 32, kWarps,
        [&](int32_t i) -> const std::byte* { return staged(source(i)) + leaf.scales_offset; },
        places(leaf.scales, leaf.scale_bytes));
  }
  if (value_slot != kNoSlot) {
    StoreValue(values.rows + value_slot * values.bytes, value, values.bytes);
  }
}

// What a block has to know before it can place its share of all ranks' tokens: counts, and from them
// where each expert's rows begin. Fills the gaps between the rows. False, for all threads of the
// team, if the ranks' indices did not come.
__device__ bool Prepare(const Team& team, const LowLatencyDispatchArgs& args,
                        Operation& operation, LowLatencyChannel& channel, Shared& shared,
                        const Counters& counters) {
  const Common& common = args.move.common;
  const Shape& shape = common.shape;
  const int32_t num_threads = team.num_threads();
  for (int32_t i = team.thread(); i < 2 * shape.num_experts; i += num_threads) {
    counters.before[i] = 0;
  }
  for (int32_t rank = team.thread(); rank < shape.num_ranks; rank += num_threads) {
    const uint64_t* const word = &channel.Control(common.workspace.rank)->num_tokens[rank];
    int32_t num_tokens;
    const bool came = channel.WaitWord(rank, word, ptx::LoadRelaxedSys(word), &num_tokens);
    shared.first_token[rank + 1] = came ? num_tokens : 0;
  }
  SumTokens(team, shape.num_ranks, shared.first_token);
  const AllIndices indices(shape, channel, channel.Topk(common.workspace.rank),
                           shared.first_token);
  if (!Count(team, common, operation, channel, indices,
             shared.first_token[shape.num_ranks] * shape.num_topk,
             FirstToken(shared, shape, blockIdx.x) * shape.num_topk, counters)) {
    return false;
  }
  PlaceExperts(team, common, args.routing, counters.offsets, counters.offsets);
  team.Sync();
  FillGaps(team, args, shared.first_token, counters);
  return true;
}

// Places the block's share of all ranks' tokens, and moves their rows; by all threads.
__device__ bool Receive(const LowLatencyDispatchArgs& args, LowLatencyChannel& channel,
                        Shared& shared, const Counters& counters) {
  const Common& common = args.move.common;
  const Shape& shape = common.shape;
  const AllIndices indices(shape, channel, channel.Topk(common.workspace.rank),
                           shared.first_token);
  const int32_t end = FirstToken(shared, shape, blockIdx.x + 1);
  const bool casts = Casts(args.move);
  const int32_t most = kThreads / shape.num_topk;
  for (int32_t first = FirstToken(shared, shape, blockIdx.x); first < end; first += most) {
    const int32_t count = min(most, end - first);
    if (!Place(args, channel, indices, first, count, casts, counters, shared)) return false;
    MoveRows(args.move, channel, casts, shared);
    __syncthreads();
  }
  return true;
}

__global__ void __launch_bounds__(kThreads, 1)
    LowLatencyDispatchKernel(const __grid_constant__ LowLatencyDispatchArgs args) {
  extern __shared__ int32_t dynamic[];
  __shared__ Shared shared;
  const Split& split = args.split;
  const Shape& shape = args.move.common.shape;
  Operation operation(args.move.common, OpOf(Op::kLowLatencyDispatch, split),
                      RoutingSite(shape) * 31 + PayloadSite(args.move));
  LowLatencyChannel channel(args.move, operation, split);
  if (!channel.Enter()) {
    if (split.receives) return Poison(args);
    if (blockIdx.x == 0 && threadIdx.x < 2) split.ticket[threadIdx.x] = ~0u;
    return;
  }
  // Half of the warps send, fences included, while the others count.
  const bool both = channel.sends() && channel.receives();
  const Team senders = both ? Team(0, kWarps / 2, 1) : Team::Block();
  const Team counting = both ? Team(kWarps / 2, kWarps / 2, 2) : Team::Block();
  const Counters counters(dynamic, shape);
  bool good = true;
  if (channel.sends() && senders.Has()) Send(senders, args, operation, channel, shared);
  if (channel.receives() && counting.Has()) {
    good = Prepare(counting, args, operation, channel, shared, counters);
  }
  if (channel.receives()) {
    good = __syncthreads_and(good) && Receive(args, channel, shared, counters);
    if (!good) Poison(args);
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
  return Launch(LowLatencyDispatchKernel, LowLatencyBlocks(common), kThreads, bytes, stream, args);
}

Status LoadLowLatencyDispatch() { return Load(LowLatencyDispatchKernel); }

}  // namespace jax_ep::cuda
