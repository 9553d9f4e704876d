#ifndef JAX_EP_CSRC_CORE_SLOTS_H_
#define JAX_EP_CSRC_CORE_SLOTS_H_

#include <cstdint>

#include "csrc/core/macros.h"
#include "csrc/core/shape.h"

// The slot arithmetic: which row of which rank a (token, k) pair takes, and
// back. Every backend computes it through these functions; the reference in
// jax_ep/reference.py mirrors them once.
namespace jax_ep {

inline constexpr int32_t kNoSlot = -1;

JAX_EP_HOST_DEVICE int64_t AlignUp(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Rows that an expert takes from its first row on, before clipping.
JAX_EP_HOST_DEVICE int64_t ExpertRows(const Shape& shape, int64_t count) {
  const bool aligns = shape.layout == Layout::kExpert && shape.expert_alignment > 1;
  return aligns ? AlignUp(count, shape.expert_alignment) : count;
}

// The part of rows [offset, offset + size) that lies below `capacity`.
JAX_EP_HOST_DEVICE int64_t ClippedSize(int64_t offset, int64_t size, int64_t capacity) {
  const int64_t end = offset + size;
  return (end < capacity ? end : capacity) - (offset < capacity ? offset : capacity);
}

// The slot of the pair at `position` among its expert's pairs; kNoSlot where it
// is dropped. `offset` is the expert's first row (layout expert only).
JAX_EP_HOST_DEVICE int32_t PairSlot(const Shape& shape, int32_t local_expert, int64_t offset,
                                    int64_t position) {
  if (shape.layout == Layout::kPadded) {
    return position < shape.capacity
               ? static_cast<int32_t>(local_expert * shape.capacity + position)
               : kNoSlot;
  }
  const int64_t row = offset + position;
  return row < shape.capacity ? static_cast<int32_t>(row) : kNoSlot;
}

// Where a row comes from: `row_source` of the handle. Ranks are strided by
// max_tokens_per_rank, so that the code does not depend on a rank's own T.
struct Source {
  int32_t rank;
  int32_t token;
  int32_t k;  // 0 in layout rank, whose rows belong to a token's several k
};

JAX_EP_HOST_DEVICE int32_t EncodeSource(const Shape& shape, const Source& source) {
  const int32_t token = source.rank * shape.max_tokens_per_rank + source.token;
  return shape.layout == Layout::kRank ? token : token * shape.num_topk + source.k;
}

JAX_EP_HOST_DEVICE Source DecodeSource(const Shape& shape, int32_t code) {
  const bool by_token = shape.layout == Layout::kRank;
  const int32_t token = by_token ? code : code / shape.num_topk;
  return {token / shape.max_tokens_per_rank, token % shape.max_tokens_per_rank,
          by_token ? 0 : code % shape.num_topk};
}

}  // namespace jax_ep

#endif  // JAX_EP_CSRC_CORE_SLOTS_H_
