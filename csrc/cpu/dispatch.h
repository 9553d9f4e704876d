#ifndef JAX_EP_CSRC_CPU_DISPATCH_H_
#define JAX_EP_CSRC_CPU_DISPATCH_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/core/dtype.h"
#include "csrc/core/quantize.h"
#include "csrc/core/shape.h"
#include "csrc/core/status.h"

namespace jax_ep::cpu {

// One leaf of the payload on one rank.
struct DispatchLeaf {
  const std::byte* tokens = nullptr;  // [T, row_bytes]
  std::byte* rows = nullptr;          // [rows, row_bytes]
  int64_t row_bytes = 0;
  // Where the leaf is cast to float8_e4m3fn: row_bytes are those of its rows, a token has as many
  // elements of `dtype`, in lines of `columns`.
  Quantize quantize = Quantize::kNone;
  DType dtype = DType::kF32;
  int32_t columns = 0;
  std::byte* scales = nullptr;  // [rows, scale_bytes]
  int64_t scale_bytes = 0;
};

// One rank's buffers for dispatch. A pair value (a top-k weight) goes to the
// one row of its pair; in layout rank, to its k of the token's row.
struct DispatchArgs {
  int64_t num_tokens = 0;
  const int32_t* row_source = nullptr;     // [rows]
  const int32_t* row_topk_idx = nullptr;   // [rows, K] in layout rank
  std::vector<DispatchLeaf> leaves;
  const std::byte* pair_values = nullptr;  // [T, K], or null
  std::byte* row_values = nullptr;         // [rows], or [rows, K] in layout rank
  int64_t value_bytes = 0;
};

// Fills rows [begin, end) of `rank` by pulling them from their source ranks;
// rows without a source become zero, and so the bytes of their scales. Ranks and row ranges may
// run in parallel.
Status Dispatch(const Shape& shape, const std::vector<DispatchArgs>& ranks, int32_t rank,
                int64_t begin, int64_t end);

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CSRC_CPU_DISPATCH_H_
