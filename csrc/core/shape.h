#ifndef JAX_EP_CSRC_CORE_SHAPE_H_
#define JAX_EP_CSRC_CORE_SHAPE_H_

#include <cstdint>

#include "csrc/core/macros.h"

namespace jax_ep {

// How a rank's received rows are arranged. The values are the FFI attribute
// `layout`, named in jax_ep/primitives/lowering.py.
enum class Layout : int32_t {
  kExpert = 0,  // grouped by local expert; one row per (token, k) pair
  kRank = 1,    // grouped by source rank; one row per (token, this rank)
  kPadded = 2,  // [E_local, C]: a block of C rows per local expert
};

// What all ranks of a group agree on for one prepare.
struct Shape {
  int32_t num_ranks = 0;
  int32_t num_experts = 0;
  int32_t num_topk = 0;
  int32_t max_tokens_per_rank = 0;
  Layout layout = Layout::kExpert;
  // Rows per rank; in layout padded, rows per local expert.
  int64_t capacity = 0;
  int64_t expert_alignment = 1;

  JAX_EP_HOST_DEVICE int32_t num_local_experts() const { return num_experts / num_ranks; }

  JAX_EP_HOST_DEVICE int32_t rank_of_expert(int32_t expert) const {
    return expert / num_local_experts();
  }

  JAX_EP_HOST_DEVICE int64_t num_rows() const {
    return layout == Layout::kPadded ? capacity * num_local_experts() : capacity;
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_CSRC_CORE_SHAPE_H_
