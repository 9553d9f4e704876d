#include <cstddef>

#include "csrc/core/dtype.h"
#include "csrc/core/slots.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/low_latency.cuh"
#include "csrc/cuda/payload.cuh"
#include "csrc/cuda/signal.cuh"
#include "csrc/cuda/sum.cuh"
#include "csrc/cuda/vector.cuh"

// combine for few tokens, with the same sums: every rank pushes its partial sum for each token of
// the other ranks into the token's rank, which adds up the partial sums in rank order, its own
// among them. A block sums a token with all its warps, a vector a lane.
namespace jax_ep::cuda {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * 32;

// A row that enters a sum.
template <typename Acc>
struct Term {
  enum class Kind : int32_t {
    kRow,      // of this rank, with its weight
    kLastRow,  // the same, and the partial sum is rounded after it
    kPartial,  // another rank's partial sum
  };
  int32_t place;  // slot of the row, or rank of the partial sum
  Kind kind;
  Acc weight;
};

// What a block has in shared memory, of a batch of tokens with a thread for each pair.
template <typename Acc>
struct Shared {
  int32_t keys[kThreads];     // [tokens, K]: the rank that a pair's term is of; num_ranks for none
  Term<Acc> terms[kThreads];  // [tokens, K]: of each token first those that there are
  int32_t num_terms[kThreads];
  int32_t chosen[kThreads];  // those of the batch's tokens that have terms
  int32_t num_chosen;
};

// Those of items 0 to `count` of which `wanted` holds, in order, by one warp; returns their number.
template <typename Wanted>
__device__ __forceinline__ int32_t Select(int32_t count, int32_t* selected, Wanted wanted) {
  const int32_t lane = threadIdx.x % 32;
  int32_t found = 0;
  for (int32_t base = 0; base < count; base += 32) {
    const bool mine = base + lane < count && wanted(base + lane);
    const uint32_t all = __ballot_sync(~0u, mine);
    if (mine) selected[found + __popc(all & ((1u << lane) - 1))] = base + lane;
    found += __popc(all);
  }
  return found;
}

// Puts the terms of a batch of `count` tokens in their order: by rank, and in a rank by k. `key` is
// the rank of this thread's pair, num_ranks if it has no row, `slot` its row on this rank. Pairs of
// another rank have one term together. Returns whether this thread's pair has a term of its own.
template <typename Acc>
__device__ bool OrderTerms(const MoveArgs& args, int32_t count, int32_t key, int32_t slot,
                           Shared<Acc>& shared) {
  using Kind = typename Term<Acc>::Kind;
  const int32_t num_topk = args.common.shape.num_topk;
  const int32_t none = args.common.shape.num_ranks;
  const int32_t rank = args.common.workspace.rank;
  const int32_t pair = threadIdx.x;
  const int32_t first = pair - pair % num_topk;
  const bool in_batch = pair < count * num_topk;
  if (in_batch) shared.keys[pair] = key;
  __syncthreads();
  bool again = false;
  for (int32_t other = first; in_batch && other < pair; ++other) {
    again |= shared.keys[other] == key;
  }
  __syncthreads();
  if (again && key != rank) shared.keys[pair] = key = none;
  __syncthreads();
  int32_t position = 0;
  int32_t num_terms = 0;
  bool last = true;
  for (int32_t other = first; in_batch && other < first + num_topk; ++other) {
    const int32_t its = shared.keys[other];
    position += its < key || (its == key && other < pair);
    num_terms += its != none;
    last &= its != key || other <= pair;
  }
  if (in_batch && key != none) {
    Term<Acc> term{key, Kind::kPartial, 1};
    if (key == rank) term = {slot, last ? Kind::kLastRow : Kind::kRow, RowWeight<Acc>(args, slot)};
    shared.terms[first + position] = term;
  }
  if (in_batch && pair == first) shared.num_terms[pair / num_topk] = num_terms;
  __syncthreads();
  if (threadIdx.x < 32) {
    const int32_t chosen = Select(count, shared.chosen,
                                  [&](int32_t i) { return shared.num_terms[i] != 0; });
    if (threadIdx.x == 0) shared.num_chosen = chosen;
  }
  return in_batch && key != none;
}

// Where a term's row of `leaf` lies, for a sum that token `token` of this rank gets.
template <typename Acc>
__device__ __forceinline__ const std::byte* RowOf(const MoveArgs& args,
                                                  const LowLatencyChannel& channel,
                                                  const Leaf& leaf, const Term<Acc>& term,
                                                  int32_t token) {
  if (term.kind != Term<Acc>::Kind::kPartial) return leaf.rows + term.place * leaf.row_bytes;
  return channel.Row(args.common.workspace.rank, term.place, token) + leaf.staging_offset;
}

// The sum of `kElements` neighbouring elements of dtype T.
template <typename T, int kElements>
struct Sum {
  using Acc = typename T::Acc;

  Acc total[kElements] = {};
  Acc partial[kElements] = {};

  // `round` gives what is left of a partial sum in dtype T.
  template <typename Round>
  __device__ __forceinline__ void Add(const Term<Acc>& term, const Acc (&x)[kElements],
                                      Round round) {
    using Kind = typename Term<Acc>::Kind;
    if (term.kind == Kind::kPartial) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) total[e] += x[e];
      return;
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) partial[e] = MultiplyAdd(term.weight, x[e], partial[e]);
    if (term.kind != Kind::kLastRow) return;
    round(partial);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      total[e] += partial[e];
      partial[e] = 0;
    }
  }
};

// The sums of a leaf for `count` of the batch's tokens: `chosen` has their places in the batch,
// `token(i)` is the i-th one's number, `out(i)` where its sum goes.
template <typename T, typename Token, typename Out>
__device__ void SumVectors(const MoveArgs& args, const LowLatencyChannel& channel,
                           const Leaf& leaf, const Shared<typename T::Acc>& shared,
                           const int32_t* chosen, int32_t count, Token token, Out out) {
  using Acc = typename T::Acc;
  constexpr int kElements = kVectorElements<T>;
  // Vectors and terms of a lane that are under way together.
  constexpr int kUnroll = kElements > 8 ? 1 : 2;
  constexpr int kTerms = 4;
  const int32_t num_topk = args.common.shape.num_topk;
  const int32_t lane = threadIdx.x % 32;
  const auto vectors = static_cast<int32_t>(leaf.row_bytes / 16);
  const int32_t row_pieces = (vectors + 31) / 32;
  const int32_t pieces = count * row_pieces;
  for (int32_t first = threadIdx.x / 32; first < pieces; first += kUnroll * kWarps) {
    const Term<Acc>* terms[kUnroll];
    int32_t num_terms[kUnroll];
    int32_t index[kUnroll];
    int32_t row[kUnroll];
    int32_t most = 0;
    Sum<T, kElements> sums[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t piece = first + u * kWarps;
      row[u] = min(piece / row_pieces, count - 1);
      index[u] = piece % row_pieces * 32 + lane;
      terms[u] = shared.terms + chosen[row[u]] * num_topk;
      num_terms[u] = piece < pieces ? shared.num_terms[chosen[row[u]]] : 0;
      most = max(most, num_terms[u]);
    }
    for (int32_t begin = 0; begin < most; begin += kTerms) {
      uint4 loaded[kUnroll][kTerms];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int t = 0; t < kTerms; ++t) {
          if (begin + t >= num_terms[u] || index[u] >= vectors) continue;
          const std::byte* const from =
              RowOf(args, channel, leaf, terms[u][begin + t], token(row[u]));
          loaded[u][t] = Load(reinterpret_cast<const uint4*>(from) + index[u]);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int t = 0; t < kTerms; ++t) {
          if (begin + t >= num_terms[u]) break;
          Acc x[kElements];
          Unpack<T>(loaded[u][t], x);
          sums[u].Add(terms[u][begin + t], x, [](Acc(&partial)[kElements]) {
            const uint4 rounded = Pack<T>(partial);
            Unpack<T>(rounded, partial);
          });
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kWarps >= pieces || index[u] >= vectors) continue;
      Store(reinterpret_cast<uint4*>(out(row[u])) + index[u], Pack<T>(sums[u].total));
    }
  }
}

// The same for rows of any alignment, an element a lane.
template <typename T, typename Token, typename Out>
__device__ void SumElements(const MoveArgs& args, const LowLatencyChannel& channel,
                            const Leaf& leaf, const Shared<typename T::Acc>& shared,
                            const int32_t* chosen, int32_t count, Token token, Out out) {
  using Acc = typename T::Acc;
  using Storage = typename T::Storage;
  const auto elements =
      static_cast<int32_t>(leaf.row_bytes / static_cast<int64_t>(sizeof(Storage)));
  for (int32_t i = threadIdx.x; i < count * elements; i += kThreads) {
    const int32_t row = i / elements;
    const int32_t index = i % elements;
    const Term<Acc>* const terms = shared.terms + chosen[row] * args.common.shape.num_topk;
    Sum<T, 1> sum;
    for (int32_t t = 0; t < shared.num_terms[chosen[row]]; ++t) {
      const std::byte* const from = RowOf(args, channel, leaf, terms[t], token(row));
      const Acc x[1] = {T::Load(Load(reinterpret_cast<const Storage*>(from) + index))};
      sum.Add(terms[t], x, [](Acc(&partial)[1]) { partial[0] = T::Load(T::Round(partial[0])); });
    }
    Store(reinterpret_cast<Storage*>(out(row)) + index, T::Round(sum.total[0]));
  }
}

template <typename T, typename Token, typename Out>
__device__ __forceinline__ void SumLeaf(const MoveArgs& args, const LowLatencyChannel& channel,
                                        const Leaf& leaf, const Shared<typename T::Acc>& shared,
                                        const int32_t* chosen, int32_t count, uintptr_t alignment,
                                        Token token, Out out) {
  if ((alignment | reinterpret_cast<uintptr_t>(leaf.rows) |
       static_cast<uintptr_t>(leaf.row_bytes)) % 16 == 0) {
    SumVectors<T>(args, channel, leaf, shared, chosen, count, token, out);
  } else {
    SumElements<T>(args, channel, leaf, shared, chosen, count, token, out);
  }
}

// How many of `total` things this block has, if every gridDim.x-th from its own number on is.
__device__ int32_t Share(int32_t total) {
  const int32_t block = blockIdx.x;
  return block < total ? (total - block - 1) / static_cast<int32_t>(gridDim.x) + 1 : 0;
}

// Sends this rank's partial sums for the tokens of the other ranks, of these in turn.
template <typename T>
__device__ void Send(const MoveArgs& args, LowLatencyChannel& channel,
                     Shared<typename T::Acc>& shared) {
  const Shape& shape = args.common.shape;
  const int32_t rank = args.common.workspace.rank;
  const int32_t peers = shape.num_ranks - 1;
  if (peers == 0) return;
  const int32_t count = Share(peers * shape.max_tokens_per_rank);
  const int32_t most = kThreads / shape.num_topk;
  for (int32_t begin = 0; begin < count; begin += most) {
    const int32_t batch = min(most, count - begin);
    auto task = [&](int32_t i) {
      return static_cast<int32_t>(blockIdx.x + (begin + i) * gridDim.x);
    };
    auto token = [&](int32_t i) { return task(i) / peers; };
    auto source = [&](int32_t i) { return (rank + 1 + task(i) % peers) % shape.num_ranks; };
    const int32_t pair = threadIdx.x;
    const int32_t i = pair / shape.num_topk;
    int32_t slot = kNoSlot;
    if (i < batch) {
      const int64_t entry = int64_t{source(i)} * shape.max_tokens_per_rank + token(i);
      slot = args.recv_slots[entry * shape.num_topk + pair % shape.num_topk];
    }
    OrderTerms(args, batch, slot == kNoSlot ? shape.num_ranks : rank, slot, shared);
    __syncthreads();
    for (int32_t first = 0; first < shared.num_chosen; first += kTokensPerFence) {
      const int32_t* const chosen = shared.chosen + first;
      const int32_t told = min(kTokensPerFence, shared.num_chosen - first);
      for (int32_t l = 0; l < args.num_leaves; ++l) {
        const Leaf& leaf = args.leaves[l];
        SumLeaf<T>(args, channel, leaf, shared, chosen, told, 0,
                   [](int32_t) { return 0; },  // no term is another rank's
                   [&](int32_t j) {
                     return channel.Row(source(chosen[j]), rank, token(chosen[j])) +
                            leaf.staging_offset;
                   });
      }
      Publish(Team::Block(), told, [&](int32_t j) { channel.Ready(source(chosen[j]), token(chosen[j])); });
    }
    __syncthreads();
  }
}

// Poisons the sums that Receive would have computed in this block: another one may have begun before
// the group failed, and computes its own.
__device__ __noinline__ void Poison(const MoveArgs& args) {
  const int32_t count = Share(args.common.num_tokens);
  for (int32_t i = threadIdx.x / 32; i < count; i += kWarps) {
    PoisonToken(args, static_cast<int32_t>(blockIdx.x + i * gridDim.x));
  }
}

// Adds up the sums of this rank's own tokens.
template <typename T>
__device__ void Receive(const MoveArgs& args, LowLatencyChannel& channel,
                        Shared<typename T::Acc>& shared) {
  const Shape& shape = args.common.shape;
  const int32_t rank = args.common.workspace.rank;
  const int32_t count = Share(args.common.num_tokens);
  const int32_t most = kThreads / shape.num_topk;
  for (int32_t begin = 0; begin < count; begin += most) {
    const int32_t batch = min(most, count - begin);
    auto token = [&](int32_t i) {
      return static_cast<int32_t>(blockIdx.x + (begin + i) * gridDim.x);
    };
    const int32_t pair = threadIdx.x;
    const int32_t i = pair / shape.num_topk;
    int32_t slot = kNoSlot;
    int32_t key = shape.num_ranks;
    if (i < batch) {
      const int64_t at = int64_t{token(i)} * shape.num_topk + pair % shape.num_topk;
      slot = args.slots[at];
      if (slot != kNoSlot) key = shape.rank_of_expert(args.topk_idx[at]);
    }
    if (OrderTerms(args, batch, key, slot, shared) && key != rank) {
      channel.WaitReady(key, token(i));
    }
    const bool good = __syncthreads_and(!channel.lost());
    // Tokens without terms are zero.
    auto out = [&](const Leaf& leaf, int32_t j) {
      return leaf.tokens + int64_t{token(j)} * leaf.row_bytes;
    };
    for (int32_t j = threadIdx.x / 32; j < batch; j += kWarps) {
      if (!good) {
        PoisonToken(args, token(j));
      } else if (shared.num_terms[j] == 0) {
        for (int32_t l = 0; l < args.num_leaves; ++l) {
          FillRow(out(args.leaves[l], j), args.leaves[l].row_bytes, 0);
        }
      }
    }
    for (int32_t l = 0; good && l < args.num_leaves; ++l) {
      const Leaf& leaf = args.leaves[l];
      SumLeaf<T>(args, channel, leaf, shared, shared.chosen, shared.num_chosen,
                 reinterpret_cast<uintptr_t>(leaf.tokens),
                 [&](int32_t j) { return token(shared.chosen[j]); },
                 [&](int32_t j) { return out(leaf, shared.chosen[j]); });
    }
    __syncthreads();
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    LowLatencyCombineKernel(const __grid_constant__ LowLatencyCombineArgs args) {
  __shared__ Shared<typename T::Acc> shared;
  const Split& split = args.split;
  Operation operation(args.move.common, OpOf(Op::kLowLatencyCombine, split),
                      PayloadSite(args.move));
  LowLatencyChannel channel(args.move, operation, split);
  if (!channel.Enter()) {
    if (split.receives) return Poison(args.move);
    if (blockIdx.x == 0 && threadIdx.x < 2) split.ticket[threadIdx.x] = ~0u;
    return;
  }
  if (channel.sends()) Send<T>(args.move, channel, shared);
  if (channel.receives()) Receive<T>(args.move, channel, shared);
  channel.Leave();
}

auto Choose(DType dtype) -> void (*)(LowLatencyCombineArgs) {
  switch (dtype) {
    case DType::kF32: return LowLatencyCombineKernel<F32>;
    case DType::kF64: return LowLatencyCombineKernel<F64>;
    case DType::kBF16: return LowLatencyCombineKernel<BF16>;
    case DType::kF16: return LowLatencyCombineKernel<F16>;
    case DType::kF8E4M3FN: return LowLatencyCombineKernel<F8E4M3FN>;
    case DType::kF8E5M2: return LowLatencyCombineKernel<F8E5M2>;
  }
  return nullptr;
}

}  // namespace

Status LowLatencyCombine(cudaStream_t stream, const LowLatencyCombineArgs& args) {
  if (Status status = CheckLowLatency(args.move); !status.ok()) return status;
  return Launch(Choose(args.move.dtype), LowLatencyBlocks(args.move.common), kThreads, 0, stream,
                args);
}

Status LoadLowLatencyCombine() {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16, DType::kF8E4M3FN,
                            DType::kF8E5M2}) {
    if (Status status = Load(Choose(dtype)); !status.ok()) return status;
  }
  return Status();
}

}  // namespace jax_ep::cuda
