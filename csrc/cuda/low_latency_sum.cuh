#ifndef JAX_EP_CSRC_CUDA_LOW_LATENCY_SUM_CUH_
#define JAX_EP_CSRC_CUDA_LOW_LATENCY_SUM_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/core/dtype.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/low_latency.cuh"
#include "csrc/cuda/row_pieces.cuh"
#include "csrc/cuda/sum.cuh"
#include "csrc/cuda/vector.cuh"

// The sums of the low-latency combine: which terms a token's has, and adding them up.
namespace jax_ep::cuda {

// Of a block.
inline constexpr int kSumWarps = 16;
// The most tokens that are summed together, and pairs.
inline constexpr int kSumBatch = kSumWarps / 2;
inline constexpr int kSumBatchPairs = 256;

static_assert(kSumBatchPairs >= kMaxTopk);

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
struct SumBatch {
  int32_t ranks[kSumBatch];   // whose token it is, and who gets the sum
  int32_t tokens[kSumBatch];  // its number there
  int32_t num_terms[kSumBatch];
  Term<Acc> terms[kSumBatchPairs];  // [tokens, K]: of each token first those that there are
  int32_t keys[kSumBatchPairs];     // [tokens, K]: the rank of a pair's term; num_ranks for none
};

// Puts the terms of the batch's token `i` in their order: by rank, and in a rank by k. By one warp.
// `find(k, &slot)` gives the rank of a pair, num_ranks if it has no row, and its row on this rank.
// Pairs of another rank have one term together.
template <typename Acc, typename Find>
__device__ __forceinline__ void OrderTerms(const MoveArgs& args, SumBatch<Acc>& batch, int32_t i,
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
class ChosenTokens {
 public:
  template <typename Acc>
  __device__ __forceinline__ ChosenTokens(const SumBatch<Acc>& batch, int32_t count, bool all) {
    static_assert(kSumBatch <= 8, "four bits for each");
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
                                            const Leaf& leaf, const SumBatch<Acc>& batch,
                                            int32_t i) {
  const int32_t rank = args.common.workspace.rank;
  if (batch.ranks[i] == rank) return leaf.tokens + batch.tokens[i] * leaf.row_bytes;
  return channel.Row(batch.ranks[i], rank, batch.tokens[i]) + leaf.staging_offset;
}

// The sums of a leaf for the chosen ones of a batch.
template <typename T>
__device__ __forceinline__ void SumVectors(const MoveArgs& args, const LowLatencyChannel& channel,
                                           const Leaf& leaf, const SumBatch<typename T::Acc>& batch,
                                           const ChosenTokens& chosen) {
  using Acc = typename T::Acc;
  constexpr int kElements = kVectorElements<T>;
  // Vectors and terms of a lane that are under way together.
  constexpr int kUnroll = kElements > 8 ? 1 : 2;
  constexpr int kTerms = kElements > 8 ? 2 : 4;
  const int32_t num_topk = args.common.shape.num_topk;
  const auto vectors = static_cast<int32_t>(leaf.row_bytes / 16);
  const RowPieces pieces(chosen.count(), vectors);
#pragma unroll 1
  for (int32_t first = threadIdx.x / 32; first < pieces.number(); first += kUnroll * kSumWarps) {
    const Term<Acc>* terms[kUnroll];
    int32_t num_terms[kUnroll];
    int32_t index[kUnroll];
    int32_t row[kUnroll];
    int32_t most = 0;
    Sum<T, kElements> sums[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t piece = min(first + u * kSumWarps, pieces.number() - 1);
      row[u] = chosen(pieces.Row(piece));
      // Lanes beyond the row's end do the same as the last one before it.
      index[u] = min(pieces.Vector(piece), vectors - 1);
      terms[u] = batch.terms + row[u] * num_topk;
      num_terms[u] = first + u * kSumWarps < pieces.number() ? batch.num_terms[row[u]] : 0;
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
      if (first + u * kSumWarps >= pieces.number()) continue;
      std::byte* const to = SumOf(args, channel, leaf, batch, row[u]);
      Store(reinterpret_cast<uint4*>(to) + index[u], Pack<T>(sums[u].total));
    }
  }
}

// The same for rows of any alignment, an element a lane.
template <typename T>
__device__ __forceinline__ void SumElements(const MoveArgs& args,
                                            const LowLatencyChannel& channel, const Leaf& leaf,
                                            const SumBatch<typename T::Acc>& batch,
                                            const ChosenTokens& chosen) {
  using Acc = typename T::Acc;
  using Storage = typename T::Storage;
  const auto elements =
      static_cast<int32_t>(leaf.row_bytes / static_cast<int64_t>(sizeof(Storage)));
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < chosen.count() * elements; i += kSumWarps * 32) {
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
                                          const SumBatch<typename T::Acc>& batch,
                                          const ChosenTokens& chosen) {
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

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_LOW_LATENCY_SUM_CUH_
