#ifndef JAX_EP_CSRC_CPU_PREPARE_H_
#define JAX_EP_CSRC_CPU_PREPARE_H_

#include <cstdint>
#include <vector>

#include "csrc/core/shape.h"
#include "csrc/core/status.h"

namespace jax_ep::cpu {

// One rank's buffers for prepare.
struct PrepareArgs {
  int64_t num_tokens = 0;
  const int32_t* topk_idx = nullptr;  // [T, K]
  int32_t* slots = nullptr;           // [T, K]
  int32_t* row_source = nullptr;      // [rows]
  int32_t* row_topk_idx = nullptr;    // [rows, K] in layout rank
  int32_t* recv_slots = nullptr;      // [R, max_tokens_per_rank, K]
  int32_t* group_sizes = nullptr;     // [E_local]
  int32_t* expert_counts = nullptr;   // [E_local]
  int32_t* num_rows = nullptr;        // []
  int32_t* num_dropped = nullptr;     // []
};

// Fixes the row of every pair of every rank. `ranks` holds all ranks' buffers,
// in rank order. Fails where a topk_idx is outside [-1, num_experts).
Status Prepare(const Shape& shape, const std::vector<PrepareArgs>& ranks);

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CSRC_CPU_PREPARE_H_
