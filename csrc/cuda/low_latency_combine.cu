#include <cstddef>

#include "csrc/core/dtype.h"
#include "csrc/core/slots.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/divider.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/low_latency.cuh"
#include "csrc/cuda/payload.cuh"
#include "csrc/cuda/signal.cuh"
#include "csrc/cuda/sum.cuh"
#include "csrc/cuda/vector.cuh"

// combine for few tokens, with the same sums: every rank pushes its partial sum for each token of
// the other ranks into the token's rank, which adds up the partial sums in rank order, its own
// among them. A warp finds out which terms a token's sum has; then a block sums the tokens of a
// batch with all its warps, a vector a lane.
namespace jax_ep::cuda {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * 32;
// The most tokens of a batch, and pairs.
constexpr int kBatch = kWarps / 2;
constexpr int kBatchPairs = 256;

static_assert(kBatchPairs >= kMaxTopk);

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

// Tokens that are summed together, in shared memory.
template <typename Acc>
struct Batch {
  int32_t ranks[kBatch];   // whose token it is, and who gets the sum
  int32_t tokens[kBatch];  // its number there
  int32_t num_terms[kBatch];
  Term<Acc> terms[kBatchPairs];  // [tokens, K]: of each token first those that there are
  int32_t keys[kBatchPairs];     // [tokens, K]: the rank that a pair's term is of; num_ranks for none
};

// What a block has in shared memory: two of each, one is read while the next is written.
template <typename Acc>
struct Shared {
  Batch<Acc> sent[2];
  Batch<Acc> received[2];
};

// Puts the terms of the batch's token `i` in their order: by rank, and in a rank by k. By one warp.
// `find(k, &slot)` gives the rank of a pair, num_ranks if it has no row, and its row on this rank.
// Pairs of another rank have one term together.
template <typename Acc, typename Find>
__device__ __forceinline__ void OrderTerms(const MoveArgs& args, Batch<Acc>& batch, int32_t i,
                                           Find find) {
  using Kind = typename Term<Acc>::Kind;
  constexpr int kLanePairs = kMaxTopk / 32;
  const int32_t num_topk = args.common.shape.num_topk;
  const int32_t none = args.common.shape.num_ranks;
  const int32_t rank = args.common.workspace.rank;
  const int32_t lane = threadIdx.x % 32;
  int32_t* const its_keys = batch.keys + i * num_topk;
  int32_t keys[kLanePairs];
  int32_t slots[kLanePairs];
  Acc weights[kLanePairs];
#pragma unroll
  for (int p = 0; p < kLanePairs; ++p) {
    const int32_t k = p * 32 + lane;
    keys[p] = none;
    if (k >= num_topk) continue;
    its_keys[k] = keys[p] = find(k, &slots[p]);
    if (keys[p] == rank) weights[p] = RowWeight<Acc>(args, slots[p]);
  }
  __syncwarp();
#pragma unroll
  for (int p = 0; p < kLanePairs; ++p) {
    if (keys[p] == none || keys[p] == rank) continue;
#pragma unroll 2
    for (int32_t other = 0; other < p * 32 + lane; ++other) {
      if (its_keys[other] == keys[p]) keys[p] = none;
    }
  }
  __syncwarp();
#pragma unroll
  for (int p = 0; p < kLanePairs; ++p) {
    if (p * 32 + lane < num_topk) its_keys[p * 32 + lane] = keys[p];
  }
  __syncwarp();
  int32_t num_terms = 0;
#pragma unroll
  for (int p = 0; p < kLanePairs; ++p) {
    const int32_t k = p * 32 + lane;
    if (p > 0 && num_topk <= p * 32) break;
    int32_t position = 0;
    bool last = true;
    num_terms = 0;
#pragma unroll 2
    for (int32_t other = 0; other < num_topk; ++other) {
      const int32_t its = its_keys[other];
      position += its < keys[p] || (its == keys[p] && other < k);
      num_terms += its != none;
      last &= its != keys[p] || other <= k;
    }
    if (keys[p] == none) continue;
    Term<Acc> term{keys[p], Kind::kPartial, 1};
    if (keys[p] == rank) term = {slots[p], last ? Kind::kLastRow : Kind::kRow, weights[p]};
    batch.terms[i * num_topk + position] = term;
  }
  if (lane == 0) batch.num_terms[i] = num_terms;
  __syncwarp();
}

// Those of a batch's `count` tokens that get a sum, in order: that have terms, or all.
class Chosen {
 public:
  template <typename Acc>
  __device__ __forceinline__ Chosen(const Batch<Acc>& batch, int32_t count, bool all) {
    static_assert(kBatch <= 8, "four bits for each");
    const int32_t lane = threadIdx.x % 32;
    uint32_t left = __ballot_sync(~0u, lane < count && (all || batch.num_terms[lane] > 0));
    count_ = __popc(left);
    for (int32_t j = 0; left != 0; left &= left - 1, ++j) packed_ |= (__ffs(left) - 1) << (4 * j);
  }
  __device__ __forceinline__ int32_t count() const { return count_; }
  // Of the j-th one the place in the batch.
  __device__ __forceinline__ int32_t operator()(int32_t j) const {
    return static_cast<int32_t>(packed_ >> (4 * j) & 15);
  }

 private:
  uint32_t packed_ = 0;
  int32_t count_;
};

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

// Where a batch's token `i` gets its sum of `leaf`: the operands, or its rank's buffer.
template <typename Acc>
__device__ __forceinline__ std::byte* SumOf(const MoveArgs& args, const LowLatencyChannel& channel,
                                            const Leaf& leaf, const Batch<Acc>& batch, int32_t i) {
  const int32_t rank = args.common.workspace.rank;
  if (batch.ranks[i] == rank) return leaf.tokens + batch.tokens[i] * leaf.row_bytes;
  return channel.Row(batch.ranks[i], rank, batch.tokens[i]) + leaf.staging_offset;
}

// The sums of a leaf for the chosen ones of a batch.
template <typename T>
__device__ __forceinline__ void SumVectors(const MoveArgs& args, const LowLatencyChannel& channel,
                                           const Leaf& leaf, const Batch<typename T::Acc>& batch,
                                           const Chosen& chosen) {
  using Acc = typename T::Acc;
  constexpr int kElements = kVectorElements<T>;
  // Vectors and terms of a lane that are under way together.
  constexpr int kUnroll = kElements > 8 ? 1 : 2;
  constexpr int kTerms = kElements > 8 ? 2 : 4;
  const int32_t num_topk = args.common.shape.num_topk;
  const int32_t lane = threadIdx.x % 32;
  const auto vectors = static_cast<int32_t>(leaf.row_bytes / 16);
  const Divider row_pieces((vectors + 31) / 32);
  const int32_t pieces = chosen.count() * ((vectors + 31) / 32);
#pragma unroll 1
  for (int32_t first = threadIdx.x / 32; first < pieces; first += kUnroll * kWarps) {
    const Term<Acc>* terms[kUnroll];
    int32_t num_terms[kUnroll];
    int32_t index[kUnroll];
    int32_t row[kUnroll];
    int32_t most = 0;
    Sum<T, kElements> sums[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t piece = min(first + u * kWarps, pieces - 1);
      row[u] = chosen(row_pieces.Quotient(piece));
      // Lanes beyond the row's end do the same as the last one before it.
      index[u] = min(row_pieces.Remainder(piece) * 32 + lane, vectors - 1);
      terms[u] = batch.terms + row[u] * num_topk;
      num_terms[u] = first + u * kWarps < pieces ? batch.num_terms[row[u]] : 0;
      most = max(most, num_terms[u]);
    }
#pragma unroll 1
    for (int32_t begin = 0; begin < most; begin += kTerms) {
      uint4 loaded[kUnroll][kTerms];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int t = 0; t < kTerms; ++t) {
          if (begin + t >= num_terms[u]) continue;
          const std::byte* const from =
              RowOf(args, channel, leaf, terms[u][begin + t], batch.tokens[row[u]]);
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
      if (first + u * kWarps >= pieces) continue;
      std::byte* const to = SumOf(args, channel, leaf, batch, row[u]);
      Store(reinterpret_cast<uint4*>(to) + index[u], Pack<T>(sums[u].total));
    }
  }
}

// The same for rows of any alignment, an element a lane.
template <typename T>
__device__ __forceinline__ void SumElements(const MoveArgs& args,
                                            const LowLatencyChannel& channel, const Leaf& leaf,
                                            const Batch<typename T::Acc>& batch,
                                            const Chosen& chosen) {
  using Acc = typename T::Acc;
  using Storage = typename T::Storage;
  const auto elements =
      static_cast<int32_t>(leaf.row_bytes / static_cast<int64_t>(sizeof(Storage)));
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < chosen.count() * elements; i += kThreads) {
    const int32_t row = chosen(i / elements);
    const int32_t index = i % elements;
    const Term<Acc>* const terms = batch.terms + row * args.common.shape.num_topk;
    Sum<T, 1> sum;
#pragma unroll 1
    for (int32_t t = 0; t < batch.num_terms[row]; ++t) {
      const std::byte* const from = RowOf(args, channel, leaf, terms[t], batch.tokens[row]);
      const Acc x[1] = {T::Load(Load(reinterpret_cast<const Storage*>(from) + index))};
      sum.Add(terms[t], x, [](Acc(&partial)[1]) { partial[0] = T::Load(T::Round(partial[0])); });
    }
    std::byte* const to = SumOf(args, channel, leaf, batch, row);
    Store(reinterpret_cast<Storage*>(to) + index, T::Round(sum.total[0]));
  }
}

template <typename T>
__device__ __forceinline__ void SumLeaves(const MoveArgs& args, const LowLatencyChannel& channel,
                                          const Batch<typename T::Acc>& batch,
                                          const Chosen& chosen) {
  for (int32_t l = 0; l < args.num_leaves; ++l) {
    const Leaf& leaf = args.leaves[l];
    const uintptr_t alignment = reinterpret_cast<uintptr_t>(leaf.rows) |
                                reinterpret_cast<uintptr_t>(leaf.tokens) |
                                static_cast<uintptr_t>(leaf.row_bytes);
    if (alignment % 16 == 0) {
      SumVectors<T>(args, channel, leaf, batch, chosen);
    } else {
      SumElements<T>(args, channel, leaf, batch, chosen);
    }
  }
}

// This block's share of `total` tasks, every gridDim.x-th from its own number on, in batches. A task of
// a batch is looked after by a warp, from `first_warp` on.
class Share {
 public:
  __device__ __forceinline__ Share(const Shape& shape, int32_t total, int32_t first_warp)
      : count_(static_cast<int32_t>(blockIdx.x) < total
                   ? (total - static_cast<int32_t>(blockIdx.x) - 1) /
                             static_cast<int32_t>(gridDim.x) + 1
                   : 0),
        most_(min(kBatch, kBatchPairs / shape.num_topk)),
        first_warp_(first_warp) {}

  __device__ __forceinline__ int32_t batches() const { return (count_ + most_ - 1) / most_; }
  __device__ __forceinline__ int32_t size(int32_t batch) const {
    return min(most_, count_ - batch * most_);
  }
  // The place in a batch of the calling thread's task, and whether there is one.
  __device__ __forceinline__ int32_t place() const {
    return static_cast<int32_t>(threadIdx.x / 32) - first_warp_;
  }
  __device__ __forceinline__ bool has_place(int32_t batch) const {
    return place() >= 0 && place() < size(batch);
  }
  __device__ __forceinline__ int32_t Task(int32_t batch, int32_t place) const {
    return static_cast<int32_t>(blockIdx.x + (batch * most_ + place) * gridDim.x);
  }

 private:
  const int32_t count_;
  const int32_t most_;  // of a batch
  const int32_t first_warp_;
};

// Finds out what this rank sends in a batch: its partial sums for tokens of the other ranks, of these
// in turn.
template <typename Acc>
__device__ __forceinline__ void OrderSent(const MoveArgs& args, const Share& share, int32_t number,
                                          Batch<Acc>& batch) {
  if (!share.has_place(number)) return;
  const Shape& shape = args.common.shape;
  const int32_t rank = args.common.workspace.rank;
  const int32_t peers = shape.num_ranks - 1;
  const int32_t i = share.place();
  const int32_t task = share.Task(number, i);
  const int32_t token = task / peers;
  const int32_t source = (rank + 1 + task % peers) % shape.num_ranks;
  if (threadIdx.x % 32 == 0) {
    batch.ranks[i] = source;
    batch.tokens[i] = token;
  }
  const int64_t entry = int64_t{source} * shape.max_tokens_per_rank + token;
  const int32_t* const slots = args.recv_slots + entry * shape.num_topk;
  OrderTerms(args, batch, i, [&](int32_t k, int32_t* slot) {
    *slot = slots[k];
    return *slot == kNoSlot ? shape.num_ranks : rank;
  });
}

// Finds out which terms the sums of a batch of this rank's own tokens have.
template <typename Acc>
__device__ __forceinline__ void OrderReceived(const MoveArgs& args, const Share& share,
                                              int32_t number, Batch<Acc>& batch) {
  if (!share.has_place(number)) return;
  const Shape& shape = args.common.shape;
  const int32_t i = share.place();
  const int32_t token = share.Task(number, i);
  if (threadIdx.x % 32 == 0) {
    batch.ranks[i] = args.common.workspace.rank;
    batch.tokens[i] = token;
  }
  const int64_t first = int64_t{token} * shape.num_topk;
  OrderTerms(args, batch, i, [&](int32_t k, int32_t* slot) {
    const int32_t expert = args.topk_idx[first + k];  // loaded together with the slot
    *slot = args.slots[first + k];
    return *slot == kNoSlot ? shape.num_ranks : shape.rank_of_expert(expert);
  });
}

// Waits for the partial sums that a batch needs, by the warps that have ordered its terms.
template <typename Acc>
__device__ __forceinline__ void WaitForTerms(const MoveArgs& args, LowLatencyChannel& channel,
                                             const Share& share, int32_t number,
                                             const Batch<Acc>& batch) {
  if (!share.has_place(number)) return;
  const int32_t i = share.place();
  const Term<Acc>* const terms = batch.terms + i * args.common.shape.num_topk;
  for (int32_t t = threadIdx.x % 32; t < batch.num_terms[i]; t += 32) {
    if (terms[t].kind == Term<Acc>::Kind::kPartial) {
      channel.WaitReady(terms[t].place, batch.tokens[i]);
    }
  }
}

// Poisons the sums of this block's tokens from a batch on: another block may have begun before the
// group failed, and computes its own.
__device__ __noinline__ void Poison(const MoveArgs& args, Share share, int32_t number) {
  for (; share.size(number) > 0; ++number) {
    for (int32_t i = threadIdx.x / 32; i < share.size(number); i += kWarps) {
      PoisonToken(args, share.Task(number, i));
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    LowLatencyCombineKernel(const __grid_constant__ LowLatencyCombineArgs args) {
  __shared__ Shared<typename T::Acc> shared;
  const MoveArgs& move = args.move;
  const Shape& shape = move.common.shape;
  const Split& split = args.split;
  Operation operation(move.common, OpOf(Op::kLowLatencyCombine, split), PayloadSite(move));
  LowLatencyChannel channel(move, operation, split);
  const bool entered = channel.Enter();
  const Share sent(shape, channel.sends() ? (shape.num_ranks - 1) * shape.max_tokens_per_rank : 0,
                   0);
  const Share received(shape, channel.receives() ? move.common.num_tokens : 0, kBatch);
  if (!entered) {
    if (split.receives) return Poison(move, received, 0);
    if (blockIdx.x == 0 && threadIdx.x < 2) split.ticket[threadIdx.x] = ~0u;
    return;
  }
  OrderReceived(move, received, 0, shared.received[0]);  // while nothing is there to wait for
  const int32_t sent_batches = sent.batches();
  const int32_t batches = sent_batches + received.batches();
#pragma unroll 1
  for (int32_t step = 0; step < batches; ++step) {
    const bool sends = step < sent_batches;
    const int32_t number = sends ? step : step - sent_batches;
    auto& batch = (sends ? shared.sent : shared.received)[number % 2];
    if (sends) {
      OrderSent(move, sent, number, batch);
      __syncthreads();
    } else {
      WaitForTerms(move, channel, received, number, batch);
      if (!__syncthreads_and(!channel.lost())) {
        Poison(move, received, number);
        break;
      }
      OrderReceived(move, received, number + 1, shared.received[(number + 1) % 2]);
    }
    const Chosen chosen(batch, (sends ? sent : received).size(number), !sends);
    SumLeaves<T>(move, channel, batch, chosen);
    if (!sends) continue;
    __syncthreads();
    if (threadIdx.x >= 32) continue;  // the others go on
    ptx::FenceSys();
    if (const int32_t j = threadIdx.x; j < chosen.count()) {
      channel.Ready(batch.ranks[chosen(j)], batch.tokens[chosen(j)]);
    }
  }
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
