#include "csrc/cpu/dispatch.h"

#include <cstddef>
#include <cstring>
#include <string>

#include "csrc/core/slots.h"

namespace jax_ep::cpu {
namespace {

void CopyOrZero(std::byte* to, const std::byte* from, int64_t bytes) {
  if (from != nullptr) {
    std::memcpy(to, from, bytes);
  } else {
    std::memset(to, 0, bytes);
  }
}

}  // namespace

Status Dispatch(const Shape& shape, const std::vector<DispatchArgs>& ranks, int32_t rank,
                int64_t begin, int64_t end) {
  const DispatchArgs& args = ranks[rank];
  const bool by_token = shape.layout == Layout::kRank;
  const int32_t values_per_row = by_token ? shape.num_topk : 1;

  for (int64_t row = begin; row < end; ++row) {
    const int32_t code = args.row_source[row];
    const Source source = code < 0 ? Source{-1, 0, 0} : DecodeSource(shape, code);
    const DispatchArgs* from = nullptr;
    if (code >= 0) {
      if (source.rank >= shape.num_ranks || source.token >= ranks[source.rank].num_tokens) {
        return Status::Error("row_source[" + std::to_string(row) + "] of rank " +
                             std::to_string(rank) + " is " + std::to_string(code) +
                             ", which names no token: not a handle of this group and batch");
      }
      from = &ranks[source.rank];
    }

    for (size_t i = 0; i < args.leaves.size(); ++i) {
      const int64_t bytes = args.leaves[i].row_bytes;
      CopyOrZero(args.leaves[i].rows + row * bytes,
                 from ? from->leaves[i].tokens + source.token * bytes : nullptr, bytes);
    }
    if (args.row_values == nullptr) continue;
    for (int32_t j = 0; j < values_per_row; ++j) {
      const int64_t to = row * values_per_row + j;
      const int32_t k = by_token ? j : source.k;
      const bool here = from && (!by_token || args.row_topk_idx[to] >= 0);
      const int64_t pair = int64_t{source.token} * shape.num_topk + k;
      CopyOrZero(args.row_values + to * args.value_bytes,
                 here ? from->pair_values + pair * args.value_bytes : nullptr, args.value_bytes);
    }
  }
  return Status();
}

}  // namespace jax_ep::cpu
