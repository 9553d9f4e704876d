#include "csrc/core/slots.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/signal.cuh"

// Every rank puts its tokens into its own workspace, and pulls those that it needs from the others:
// each once over the link, then to all its rows. Some warps of a block stage (and zero the rows
// without a source), the others pull, tile by tile behind the stagers of all ranks.
namespace jax_ep::cuda {
namespace {

constexpr int kStageWarps = 4;
constexpr int kPullWarps = 12;
constexpr int kStageThreads = kStageWarps * 32;
constexpr int kThreads = (kStageWarps + kPullWarps) * 32;
constexpr int kTile = 8;  // tokens that become ready together
constexpr int kStageBarrier = 1;

__device__ void Stage(const MoveArgs& args, Operation& operation, int warp) {
  const Workspace& workspace = args.common.workspace;
  const int32_t num_topk = args.common.shape.num_topk;
  const int32_t lane = threadIdx.x % 32;
  std::byte* const staging = workspace.base[workspace.rank] + workspace.layout.staging_offset();
  const int32_t num_tokens = args.common.num_tokens;
  int32_t count = 0;
  for (int32_t first = blockIdx.x * kTile; first < num_tokens; first += gridDim.x * kTile) {
    for (int32_t token = first + warp; token < min(first + kTile, num_tokens);
         token += kStageWarps) {
      std::byte* const row = staging + token * args.staging_row_bytes;
      for (int32_t i = 0; i < args.num_leaves; ++i) {
        const Leaf& leaf = args.leaves[i];
        CopyRow(row + leaf.staging_offset, 0, 1, 0, leaf.tokens + token * leaf.row_bytes,
                leaf.row_bytes);
      }
      if (args.values.tokens == nullptr) continue;
      for (int32_t k = lane; k < num_topk; k += 32) {
        CopyValue(row + args.values.staging_offset + k * args.values.bytes,
                  args.values.tokens + (int64_t{token} * num_topk + k) * args.values.bytes,
                  args.values.bytes);
      }
    }
    ++count;
    ptx::NamedBarrier(kStageBarrier, kStageThreads);
    for (int32_t peer = warp * 32 + lane; peer < operation.num_ranks(); peer += kStageThreads) {
      if (peer != workspace.rank) operation.Ready(peer, count);
    }
  }
}

// Zeroes the rows that no token fills.
__device__ void ZeroRows(const MoveArgs& args, int warp) {
  const Shape& shape = args.common.shape;
  const int32_t values_per_row = shape.layout == Layout::kRank ? shape.num_topk : 1;
  for (int64_t row = int64_t{blockIdx.x} * kStageWarps + warp; row < shape.num_rows();
       row += int64_t{gridDim.x} * kStageWarps) {
    if (args.row_source[row] >= 0) continue;
    for (int32_t i = 0; i < args.num_leaves; ++i) {
      const Leaf& leaf = args.leaves[i];
      FillRow(leaf.rows + row * leaf.row_bytes, leaf.row_bytes, 0);
    }
    if (args.values.rows != nullptr) {
      const int64_t bytes = int64_t{args.values.bytes} * values_per_row;
      FillRow(args.values.rows + row * bytes, bytes, 0);
    }
  }
}

// Brings token `token` of rank `source` to its rows here, if it has any.
__device__ void PullToken(const MoveArgs& args, Operation& operation, int32_t source,
                          int32_t token) {
  const Workspace& workspace = args.common.workspace;
  const Shape& shape = args.common.shape;
  const int32_t num_topk = shape.num_topk;
  const int32_t lane = threadIdx.x % 32;
  const bool by_token = shape.layout == Layout::kRank;
  const int32_t* const slots =
      args.recv_slots +
      (int64_t{source} * shape.max_tokens_per_rank + token) * num_topk;

  const bool own = source == workspace.rank;
  const std::byte* const staged = workspace.base[source] + workspace.layout.staging_offset() +
                                  token * args.staging_row_bytes;
  bool waited = own;
  bool good = true;
  bool first = true;
  for (int32_t begin = 0; begin < num_topk; begin += 32) {
    const int32_t k = begin + lane;
    const int32_t slot = k < num_topk ? slots[k] : kNoSlot;
    const uint32_t mine = __ballot_sync(~0u, slot != kNoSlot);
    if (mine == 0) continue;
    if (!waited) {
      const int32_t tile = token / kTile;
      if (lane == 0) good = operation.WaitReady(source, tile % gridDim.x, tile / gridDim.x + 1);
      good = __shfl_sync(~0u, good, 0);
      __syncwarp();
      waited = true;
    }
    // In layout rank the pairs share one row.
    const uint32_t targets = !by_token ? mine : first ? (mine & -mine) : 0;
    for (int32_t i = 0; i < args.num_leaves; ++i) {
      const Leaf& leaf = args.leaves[i];
      const std::byte* const from =
          own ? leaf.tokens + token * leaf.row_bytes : staged + leaf.staging_offset;
      if (good) {
        CopyRow(leaf.rows, leaf.row_bytes, targets, slot, from, leaf.row_bytes);
      } else {
        for (uint32_t left = targets; left != 0; left &= left - 1) {
          const int64_t row = __shfl_sync(~0u, slot, __ffs(left) - 1);
          FillRow(leaf.rows + row * leaf.row_bytes, leaf.row_bytes, 0xff);
        }
      }
    }
    if (args.values.rows != nullptr) {
      const int32_t bytes = args.values.bytes;
      if (by_token && first) {  // the row's other k have no value here
        const int64_t row = __shfl_sync(~0u, slot, __ffs(mine) - 1);
        FillRow(args.values.rows + row * num_topk * bytes, int64_t{num_topk} * bytes, 0);
        __syncwarp();
      }
      if (slot != kNoSlot) {
        const std::byte* const from =
            own ? args.values.tokens + (int64_t{token} * num_topk + k) * bytes
                : staged + args.values.staging_offset + k * bytes;
        std::byte* const to =
            args.values.rows + (by_token ? int64_t{slot} * num_topk + k : int64_t{slot}) * bytes;
        for (int32_t i = 0; i < bytes && !good; ++i) to[i] = static_cast<std::byte>(0xff);
        if (good) CopyValue(to, from, bytes);
      }
    }
    first = false;
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    DispatchKernel(const __grid_constant__ MoveArgs args) {
  const Shape& shape = args.common.shape;
  const Workspace& workspace = args.common.workspace;
  const uint32_t site = static_cast<uint32_t>(args.staging_row_bytes / 16) * 8 +
                        static_cast<uint32_t>(args.num_leaves);
  Operation operation(workspace, Op::kDispatch, site, args.common.position);
  operation.Enter();

  const int warp = threadIdx.x / 32;
  if (warp < kStageWarps) {
    if (shape.num_ranks > 1) Stage(args, operation, warp);
    ZeroRows(args, warp);
  } else {
    // Tokens in the order in which they become ready, the ranks in turn, beginning after this one
    // so that not all ranks pull from the same.
    const int64_t tasks = int64_t{shape.num_ranks} * shape.max_tokens_per_rank;
    for (int64_t task = int64_t{blockIdx.x} * kPullWarps + warp - kStageWarps; task < tasks;
         task += int64_t{gridDim.x} * kPullWarps) {
      const int32_t token = static_cast<int32_t>(task / shape.num_ranks);
      const int32_t turn = static_cast<int32_t>(task % shape.num_ranks);
      PullToken(args, operation, (workspace.rank + 1 + turn) % shape.num_ranks, token);
    }
  }
  operation.Leave();
}

}  // namespace

Status Dispatch(cudaStream_t stream, const MoveArgs& args) {
  return Launch(DispatchKernel, args.common.workspace.num_sms, kThreads, 0, stream, args);
}

Status LoadDispatch() { return Load(DispatchKernel); }

}  // namespace jax_ep::cuda
