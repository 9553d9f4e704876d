#ifndef JAX_EP_CSRC_CUDA_KERNELS_H_
#define JAX_EP_CSRC_CUDA_KERNELS_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "csrc/core/dtype.h"
#include "csrc/core/quantize.h"
#include "csrc/core/shape.h"
#include "csrc/core/status.h"
#include "csrc/cuda/workspace.h"

// The host side of every kernel: one struct of arguments, one launch.
namespace jax_ep::cuda {

inline constexpr int32_t kMaxLeaves = WorkspaceLayout::kMaxLeaves;

// What every operation needs.
struct Common {
  Workspace workspace;
  Shape shape;
  int32_t num_tokens = 0;             // of this rank
  const int32_t* position = nullptr;  // [2], from the program
};

// What prepare finds out, for this rank.
struct Routing {
  int32_t* slots = nullptr;          // [T, K]
  int32_t* row_source = nullptr;     // [rows]
  int32_t* row_topk_idx = nullptr;   // [rows, K] in layout rank
  int32_t* recv_slots = nullptr;     // [R, max_tokens_per_rank, K]
  int32_t* group_sizes = nullptr;    // [E_local]
  int32_t* expert_counts = nullptr;  // [E_local]
  int32_t* num_rows = nullptr;       // []
  int32_t* num_dropped = nullptr;    // []
};

struct PrepareArgs {
  Common common;
  const int32_t* topk_idx = nullptr;  // [T, K]
  Routing routing;
};

// One leaf: what combine and dispatch move, between tokens [T, row_bytes] and rows.
struct Leaf {
  std::byte* tokens = nullptr;
  std::byte* rows = nullptr;
  int64_t row_bytes = 0;
  int64_t staging_offset = 0;  // in a staged row
  // dispatch only, where the leaf is cast to float8_e4m3fn: row_bytes are those of its rows, and a
  // token has as many elements of `dtype`, in lines of `columns`.
  Quantize quantize = Quantize::kNone;
  DType dtype = DType::kF32;
  int32_t columns = 0;
  std::byte* scales = nullptr;  // [rows, blocks]
  int64_t scale_bytes = 0;      // of a row
  int64_t scales_offset = 0;    // in a staged row
};

// One value a pair: [T, K] of tokens, [rows] ([rows, K] in layout rank) of rows; or nothing.
struct PairValues {
  std::byte* tokens = nullptr;
  std::byte* rows = nullptr;
  int32_t bytes = 0;
  int64_t staging_offset = 0;
};

// Who stages rows first, before it does what all do; chosen at the launch.
struct Stagers {
  int32_t blocks = 0;  // so many at the start of the grid
  // dispatch only:
  int32_t warps = 0;   // of each of them
  int32_t ahead = 0;   // tokens by which staging is at most ahead of those taken to be placed
};

struct MoveArgs {
  Common common;
  const int32_t* topk_idx = nullptr;      // [T, K]
  const int32_t* slots = nullptr;         // [T, K]
  const int32_t* row_source = nullptr;    // [rows]
  const int32_t* row_topk_idx = nullptr;  // [rows, K] in layout rank
  const int32_t* recv_slots = nullptr;    // [R, max_tokens_per_rank, K]
  Leaf leaves[kMaxLeaves];
  int32_t num_leaves = 0;
  DType dtype = DType::kF32;              // of all leaves; combine only
  int64_t staging_row_bytes = 0;          // of this payload, a multiple of 16
  PairValues values;
  Stagers stagers;
  // combine only: weights by which rows enter their sums, [rows]; or null.
  const std::byte* row_weights = nullptr;
  DType weight_dtype = DType::kF32;
};

// Which half of a low-latency operation a kernel is; without a ticket it is both.
struct Split {
  bool sends = true;
  bool receives = true;
  uint32_t* ticket = nullptr;  // [2], which the sending half writes and the receiving one reads
};

// prepare and dispatch in one, of up to kMaxLeaves leaves; layouts expert and padded.
struct LowLatencyDispatchArgs {
  MoveArgs move;  // of its routing only topk_idx
  Routing routing;
  Split split;
};

// combine, without pair values; layouts expert and padded.
struct LowLatencyCombineArgs {
  MoveArgs move;
  Split split;
};

Status Prepare(cudaStream_t stream, const PrepareArgs& args);
Status Dispatch(cudaStream_t stream, const MoveArgs& args);
Status Combine(cudaStream_t stream, const MoveArgs& args);
Status LowLatencyDispatch(cudaStream_t stream, const LowLatencyDispatchArgs& args);
Status LowLatencyCombine(cudaStream_t stream, const LowLatencyCombineArgs& args);

// Loads every kernel on the current device, so that none is loaded while a peer spins on it.
Status LoadKernels();
Status LoadPrepare();
Status LoadDispatch();
Status LoadCombine();
Status LoadLowLatencyDispatch();
Status LoadLowLatencyCombine();

// An error if rows of this payload are longer than the group's staging has room for.
Status CheckStaging(const MoveArgs& args);

// An error if a low-latency kernel cannot do this: no buffers, layout rank, or too long rows.
Status CheckLowLatency(const MoveArgs& args);

// Success, or the text of a CUDA error.
Status CheckCuda(cudaError_t error, const char* what);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_KERNELS_H_
