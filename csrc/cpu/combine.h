#ifndef JAX_EP_CSRC_CPU_COMBINE_H_
#define JAX_EP_CSRC_CPU_COMBINE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/core/shape.h"
#include "csrc/core/status.h"
#include "csrc/core/dtype.h"

namespace jax_ep::cpu {

// One leaf of the payload on one rank.
struct CombineLeaf {
  DType dtype = DType::kF32;
  const std::byte* rows = nullptr;  // [rows, row_elements]
  std::byte* tokens = nullptr;      // [T, row_elements]
  int64_t row_elements = 0;
};

// One rank's buffers for combine.
struct CombineArgs {
  int64_t num_tokens = 0;
  const int32_t* topk_idx = nullptr;  // [T, K]
  const int32_t* slots = nullptr;     // [T, K]
  std::vector<CombineLeaf> leaves;
  // Weights by which a row enters its partial sum, [rows], float32 or float64;
  // null for a plain sum.
  const std::byte* row_weights = nullptr;
  DType weight_dtype = DType::kF32;
  // Values that go back to their pairs unchanged: the transpose of dispatch's
  // pair values. [rows] ([rows, K] in layout rank) to [T, K]; or null.
  const std::byte* row_values = nullptr;
  std::byte* pair_values = nullptr;
  int64_t value_bytes = 0;
};

// Sums the rows of tokens [begin, end) of `rank` by the reduction tree of
// docs/semantics.md. Ranks and token ranges may run in parallel.
Status Combine(const Shape& shape, const std::vector<CombineArgs>& ranks, int32_t rank,
               int64_t begin, int64_t end);

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CSRC_CPU_COMBINE_H_
