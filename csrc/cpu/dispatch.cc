#include "csrc/cpu/dispatch.h"

#include <algorithm>
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

// Casts one token of a leaf, block by block.
template <typename T>
void CastRow(const DispatchLeaf& leaf, const std::byte* from, std::byte* values,
             std::byte* scales) {
  const auto* x = reinterpret_cast<const typename T::Storage*>(from);
  for (int64_t line = 0; line < leaf.row_bytes; line += leaf.columns) {
    for (int32_t begin = 0; begin < leaf.columns; begin += kBlockColumns) {
      const int32_t n = std::min(kBlockColumns, leaf.columns - begin);
      float block[kBlockColumns];
      uint32_t largest = 0;
      for (int32_t i = 0; i < n; ++i) {
        block[i] = T::Load(x[line + begin + i]);
        largest = std::max(largest, Magnitude(block[i]));
      }
      const BlockScale scale = ScaleOf(leaf.quantize, largest);
      for (int32_t i = 0; i < n; ++i) {
        values[line + begin + i] = std::byte{QuantizeValue(block[i], scale.inverse)};
      }
      std::memcpy(scales, &scale.bits, ScaleBytes(leaf.quantize));
      scales += ScaleBytes(leaf.quantize);
    }
  }
}

using Cast = void (*)(const DispatchLeaf&, const std::byte*, std::byte*, std::byte*);

Cast ChooseCast(DType dtype) {
  switch (dtype) {
    case DType::kBF16: return CastRow<BF16>;
    case DType::kF16: return CastRow<F16>;
    default: return CastRow<F32>;
  }
}

// Fills one row of a leaf from the source rank's leaf; from none, with zeros.
void FillRow(const DispatchLeaf& leaf, const DispatchLeaf* from, int64_t token, int64_t row) {
  std::byte* const values = leaf.rows + row * leaf.row_bytes;
  if (leaf.quantize == Quantize::kNone) {
    CopyOrZero(values, from ? from->tokens + token * leaf.row_bytes : nullptr, leaf.row_bytes);
    return;
  }
  std::byte* const scales = leaf.scales + row * leaf.scale_bytes;
  if (from == nullptr) {
    std::memset(values, 0, leaf.row_bytes);
    std::memset(scales, 0, leaf.scale_bytes);
    return;
  }
  const int64_t token_bytes = leaf.row_bytes * StorageBytes(leaf.dtype);
  ChooseCast(leaf.dtype)(leaf, from->tokens + token * token_bytes, values, scales);
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
      FillRow(args.leaves[i], from ? &from->leaves[i] : nullptr, source.token, row);
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
