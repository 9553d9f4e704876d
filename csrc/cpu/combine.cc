#include "csrc/cpu/combine.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "csrc/core/slots.h"

namespace jax_ep::cpu {
namespace {

// A row that enters a token's sum. Sorted by rank, and within a rank by k.
struct Term {
  int32_t rank;
  const std::byte* row;
  double weight;
};

// Elements summed at a time: both accumulators stay in the L1 cache.
constexpr int64_t kTile = 1024;

template <typename T, bool kWeighted>
JAX_EP_ALWAYS_INLINE void SumTermsImpl(const Term* terms, int num_terms, int64_t elements,
                                       std::byte* out) {
  using Acc = typename T::Acc;
  using Storage = typename T::Storage;
  Acc total[kTile];
  Acc partial[kTile];
  for (int64_t begin = 0; begin < elements; begin += kTile) {
    const int64_t n = std::min(kTile, elements - begin);
    for (int64_t i = 0; i < n; ++i) total[i] = 0;
    for (int t = 0; t < num_terms;) {
      const int32_t rank = terms[t].rank;
      for (int64_t i = 0; i < n; ++i) partial[i] = 0;
      for (; t < num_terms && terms[t].rank == rank; ++t) {
        const auto* row = reinterpret_cast<const Storage*>(terms[t].row) + begin;
        const Acc weight = static_cast<Acc>(terms[t].weight);
        for (int64_t i = 0; i < n; ++i) {
          if constexpr (!kWeighted) {
            partial[i] += T::Load(row[i]);
          } else if constexpr (std::is_same_v<Acc, float>) {
            partial[i] = __builtin_fmaf(weight, T::Load(row[i]), partial[i]);
          } else {
            partial[i] = __builtin_fma(weight, T::Load(row[i]), partial[i]);
          }
        }
      }
      for (int64_t i = 0; i < n; ++i) total[i] += T::Load(T::Round(partial[i]));
    }
    auto* to = reinterpret_cast<Storage*>(out) + begin;
    for (int64_t i = 0; i < n; ++i) to[i] = T::Round(total[i]);
  }
}

using SumTerms = void (*)(const Term* terms, int num_terms, int64_t elements, std::byte* out);

template <typename T, bool kWeighted>
void SumTermsBaseline(const Term* terms, int num_terms, int64_t elements, std::byte* out) {
  SumTermsImpl<T, kWeighted>(terms, num_terms, elements, out);
}

#if defined(__x86_64__)
// The wheel is built for any x86-64; without this version every fma would be a
// call into libm.
template <typename T, bool kWeighted>
__attribute__((target("avx2,fma,f16c"))) void SumTermsAvx2(const Term* terms, int num_terms,
                                                           int64_t elements, std::byte* out) {
  SumTermsImpl<T, kWeighted>(terms, num_terms, elements, out);
}

bool HasAvx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
  return has;
}
#endif

template <typename T, bool kWeighted>
SumTerms ChooseIsa() {
#if defined(__x86_64__)
  if (HasAvx2()) return SumTermsAvx2<T, kWeighted>;
#endif
  return SumTermsBaseline<T, kWeighted>;
}

template <typename T>
SumTerms ChooseWeighted(bool weighted) {
  return weighted ? ChooseIsa<T, true>() : ChooseIsa<T, false>();
}

SumTerms Choose(DType dtype, bool weighted) {
  switch (dtype) {
    case DType::kF32: return ChooseWeighted<F32>(weighted);
    case DType::kF64: return ChooseWeighted<F64>(weighted);
    case DType::kBF16: return ChooseWeighted<BF16>(weighted);
    case DType::kF16: return ChooseWeighted<F16>(weighted);
    case DType::kF8E4M3FN: return ChooseWeighted<F8E4M3FN>(weighted);
    case DType::kF8E5M2: return ChooseWeighted<F8E5M2>(weighted);
  }
  return nullptr;
}

double Weight(const CombineArgs& args, int64_t row) {
  if (args.weight_dtype == DType::kF64) {
    return reinterpret_cast<const double*>(args.row_weights)[row];
  }
  return reinterpret_cast<const float*>(args.row_weights)[row];
}

// The rows of one token: which rank, which row there, for which k.
struct Placement {
  int32_t rank;
  int32_t slot;
};

// Lists the rows that token `token` of `args` sums, in the tree's order. In
// layout rank the pairs of a token on one rank share a row, which enters once.
Status FindRows(const Shape& shape, const CombineArgs& args, int64_t token,
                std::vector<Placement>& placements) {
  placements.clear();
  for (int32_t k = 0; k < shape.num_topk; ++k) {
    const int64_t pair = token * shape.num_topk + k;
    const int32_t slot = args.slots[pair];
    if (slot == kNoSlot) continue;
    const int32_t expert = args.topk_idx[pair];
    if (expert < 0 || expert >= shape.num_experts || slot < 0 || slot >= shape.num_rows()) {
      return Status::Error("slots[" + std::to_string(token) + ", " + std::to_string(k) + "] is " +
                           std::to_string(slot) + " for expert " + std::to_string(expert) +
                           ", which names no row: not a handle of this group and batch");
    }
    const Placement placement{shape.rank_of_expert(expert), slot};
    const auto after = std::upper_bound(
        placements.begin(), placements.end(), placement,
        [](const Placement& a, const Placement& b) { return a.rank < b.rank; });
    const bool same_rank = after != placements.begin() && (after - 1)->rank == placement.rank;
    if (same_rank && shape.layout == Layout::kRank) continue;
    placements.insert(after, placement);
  }
  return Status();
}

void ReturnValues(const Shape& shape, const std::vector<CombineArgs>& ranks,
                  const CombineArgs& args, int64_t token) {
  for (int32_t k = 0; k < shape.num_topk; ++k) {
    const int64_t pair = token * shape.num_topk + k;
    std::byte* to = args.pair_values + pair * args.value_bytes;
    const int32_t slot = args.slots[pair];
    if (slot == kNoSlot) {
      std::memset(to, 0, args.value_bytes);
      continue;
    }
    const int64_t from = shape.layout == Layout::kRank ? int64_t{slot} * shape.num_topk + k : slot;
    const CombineArgs& target = ranks[shape.rank_of_expert(args.topk_idx[pair])];
    std::memcpy(to, target.row_values + from * args.value_bytes, args.value_bytes);
  }
}

}  // namespace

Status Combine(const Shape& shape, const std::vector<CombineArgs>& ranks, int32_t rank,
               int64_t begin, int64_t end) {
  const CombineArgs& args = ranks[rank];
  const bool weighted = args.row_weights != nullptr;
  std::vector<SumTerms> sums;
  for (const CombineLeaf& leaf : args.leaves) sums.push_back(Choose(leaf.dtype, weighted));

  std::vector<Placement> placements;
  std::vector<Term> terms;
  for (int64_t token = begin; token < end; ++token) {
    if (Status status = FindRows(shape, args, token, placements); !status.ok()) return status;
    for (size_t i = 0; i < args.leaves.size(); ++i) {
      const CombineLeaf& leaf = args.leaves[i];
      const int64_t row_bytes = leaf.row_elements * StorageBytes(leaf.dtype);
      terms.clear();
      for (const Placement& placement : placements) {
        const CombineArgs& target = ranks[placement.rank];
        terms.push_back({placement.rank, target.leaves[i].rows + placement.slot * row_bytes,
                         weighted ? Weight(target, placement.slot) : 0.0});
      }
      sums[i](terms.data(), static_cast<int>(terms.size()), leaf.row_elements,
              leaf.tokens + token * row_bytes);
    }
    if (args.pair_values != nullptr) ReturnValues(shape, ranks, args, token);
  }
  return Status();
}

}  // namespace jax_ep::cpu
