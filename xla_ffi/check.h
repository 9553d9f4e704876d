#ifndef JAX_EP_XLA_FFI_CHECK_H_
#define JAX_EP_XLA_FFI_CHECK_H_

#include <cstdint>
#include <initializer_list>
#include <string>

#include "csrc/core/shape.h"
#include "csrc/core/status.h"
#include "xla_ffi/decode.h"

// Whether a program's arrays have the sizes that its group's settings ask for. Those that were
// traced in this process have; a program exported from another, or a handle put together by hand,
// might not, and would reach past its arrays.
namespace jax_ep {

template <typename Buffer>
Status CheckElements(const char* name, const Buffer& buffer, int64_t expected) {
  const auto elements = static_cast<int64_t>(buffer.element_count());
  if (elements == expected) return Status();
  return Status::Error(std::string(name) + " has " + std::to_string(elements) +
                       " elements, and this Group's settings ask for " + std::to_string(expected) +
                       ": the program was made for another Group");
}

// The first that is wrong, or success.
inline Status FirstError(std::initializer_list<Status> statuses) {
  for (const Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return Status();
}

inline Status CheckTopk(const Shape& shape, const I32& topk_idx) {
  const int64_t num_tokens = topk_idx.dimensions()[0];
  if (num_tokens > shape.max_tokens_per_rank) {
    return Status::Error("topk_idx has " + std::to_string(num_tokens) +
                         " tokens, and this Group's max_tokens_per_rank is " +
                         std::to_string(shape.max_tokens_per_rank) +
                         ": the program was made for another Group");
  }
  return CheckElements("topk_idx", topk_idx, num_tokens * shape.num_topk);
}

// Of the parts of a handle that all layouts have.
inline Status CheckSlots(const Shape& shape, const I32& topk_idx, const I32& slots,
                         const I32& row_source, const I32& recv_slots) {
  if (Status status = CheckTopk(shape, topk_idx); !status.ok()) return status;
  return FirstError(
      {CheckElements("slots", slots, topk_idx.dimensions()[0] * shape.num_topk),
       CheckElements("row_source", row_source, shape.num_rows()),
       CheckElements("recv_slots", recv_slots,
                     int64_t{shape.num_ranks} * shape.max_tokens_per_rank * shape.num_topk)});
}

inline Status CheckRouting(const Shape& shape, const I32& topk_idx, const I32& slots,
                           const I32& row_source, const I32& row_topk_idx, const I32& recv_slots) {
  const int64_t rows_with_topk = shape.layout == Layout::kRank ? shape.num_rows() : 1;
  return FirstError(
      {CheckSlots(shape, topk_idx, slots, row_source, recv_slots),
       CheckElements("row_topk_idx", row_topk_idx, rows_with_topk * shape.num_topk)});
}

// Of tokens [num_tokens, ...] and their rows; `from_tokens` says which of them the operands are.
inline Status CheckPayload(const Shape& shape, int64_t num_tokens, const Payload& payload,
                           bool from_tokens) {
  for (const Payload::Leaf& leaf : payload.leaves) {
    const auto& tokens = from_tokens ? leaf.from : leaf.to;
    const auto& rows = from_tokens ? leaf.to : leaf.from;
    const int64_t elements = RowElements(tokens);
    Status status =
        FirstError({CheckElements("a leaf of tokens", tokens, num_tokens * elements),
                    CheckElements("a leaf of rows", rows, shape.num_rows() * elements)});
    if (status.ok() && leaf.scales) {
      status = CheckElements("scales", *leaf.scales,
                             shape.num_rows() * leaf.cast.scale_bytes / ElementBytes(*leaf.scales));
    }
    if (!status.ok()) return status;
  }
  if (!payload.values) return Status();
  const int64_t pairs = num_tokens * shape.num_topk;
  const int64_t row_values =
      shape.num_rows() * (shape.layout == Layout::kRank ? shape.num_topk : 1);
  Status status = CheckElements("the values per pair", *payload.values,
                                from_tokens ? pairs : row_values);
  if (status.ok() && payload.moved_values) {
    status = CheckElements("the moved values per pair", *payload.moved_values,
                           from_tokens ? row_values : pairs);
  }
  return status;
}

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_CHECK_H_
