#include <algorithm>

#include "csrc/core/slots.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/mover.cuh"
#include "csrc/cuda/signal.cuh"

// Every rank puts its tokens into its own workspace, and pulls those that it needs from the others:
// each once over the link, then to all its rows. Some warps of a block stage, the others pull, tile
// by tile behind the stagers of all ranks.
namespace jax_ep::cuda {
namespace {

constexpr int kTile = 8;  // tokens that become ready together
constexpr int kStageBarrier = 1;

template <typename Mover>
__device__ void MoveRow(Mover& mover, const std::byte* from, int64_t bytes, std::byte* to) {
  for (int64_t offset = 0; offset < bytes; offset += Mover::kMaxBytes) {
    const int64_t left = bytes - offset;
    mover.Move(from + offset, left < Mover::kMaxBytes ? left : Mover::kMaxBytes,
               to == nullptr ? nullptr : to + offset);
  }
}

template <typename Mover>
__device__ void Stage(const MoveArgs& args, Operation& operation, Mover& mover, int warp) {
  constexpr int kThreads = Mover::kStageWarps * 32;
  const Workspace& workspace = args.common.workspace;
  const int32_t num_topk = args.common.shape.num_topk;
  const int32_t lane = threadIdx.x % 32;
  std::byte* const staging = workspace.base[workspace.rank] + workspace.layout.staging_offset();
  const int32_t num_tokens = args.common.num_tokens;
  int32_t count = 0;
  for (int32_t first = blockIdx.x * kTile; first < num_tokens; first += gridDim.x * kTile) {
    for (int32_t token = first + warp; token < min(first + kTile, num_tokens);
         token += Mover::kStageWarps) {
      std::byte* const row = staging + token * args.staging_row_bytes;
      for (int32_t i = 0; i < args.num_leaves; ++i) {
        const Leaf& leaf = args.leaves[i];
        MoveRow(mover, leaf.tokens + token * leaf.row_bytes, leaf.row_bytes,
                lane == 0 ? row + leaf.staging_offset : nullptr);
      }
      if (args.values.tokens == nullptr) continue;
      for (int32_t k = lane; k < num_topk; k += 32) {
        CopyValue(row + args.values.staging_offset + k * args.values.bytes,
                  args.values.tokens + (int64_t{token} * num_topk + k) * args.values.bytes,
                  args.values.bytes);
      }
    }
    mover.Finish();
    ++count;
    ptx::NamedBarrier(kStageBarrier, kThreads);
    for (int32_t peer = warp * 32 + lane; peer < operation.num_ranks(); peer += kThreads) {
      if (peer != workspace.rank) operation.Ready(peer, count);
    }
  }
}

// The rows of a token of some rank on this one. A lane stands for the pairs k = lane and lane + 32.
struct Placement {
  int32_t slots[2];
  uint32_t mine[2];  // the lanes whose pair has a row here

  __device__ Placement(const MoveArgs& args, int32_t source, int32_t token) {
    const Shape& shape = args.common.shape;
    const int64_t first = (int64_t{source} * shape.max_tokens_per_rank + token) * shape.num_topk;
    for (int half = 0; half < 2; ++half) {
      const int32_t k = half * 32 + threadIdx.x % 32;
      slots[half] = k < shape.num_topk ? args.recv_slots[first + k] : kNoSlot;
      mine[half] = __ballot_sync(~0u, slots[half] != kNoSlot);
    }
  }

  __device__ bool Any() const { return (mine[0] | mine[1]) != 0; }

  // The row that this lane's pair fills, or kNoSlot. In layout rank the first pair fills the row
  // that all of the token's pairs share.
  __device__ int32_t Row(int half, bool by_token) const {
    const uint32_t lane_bit = 1u << (threadIdx.x % 32);
    const uint32_t first = half == 0 ? mine[0] & -mine[0] : mine[0] != 0 ? 0 : mine[1] & -mine[1];
    return ((by_token ? first : mine[half]) & lane_bit) != 0 ? slots[half] : kNoSlot;
  }
};

// A token of some rank.
struct Token {
  int32_t source;
  int32_t token;
};

// Brings a token to its rows here.
template <typename Mover>
__device__ void PullToken(const MoveArgs& args, Operation& operation, Mover& mover,
                          const Token& from, const Placement& placement) {
  const Workspace& workspace = args.common.workspace;
  const int32_t num_topk = args.common.shape.num_topk;
  const int32_t lane = threadIdx.x % 32;
  const bool by_token = args.common.shape.layout == Layout::kRank;
  const bool own = from.source == workspace.rank;
  const std::byte* const staged = workspace.base[from.source] +
                                  workspace.layout.staging_offset() +
                                  from.token * args.staging_row_bytes;
  bool good = !operation.Failed();
  if (!own) {
    const int32_t tile = from.token / kTile;
    if (lane == 0) {
      good = operation.WaitReady(from.source, tile % gridDim.x, tile / gridDim.x + 1);
      ptx::FenceProxyAsync();
    }
    good = __shfl_sync(~0u, good, 0);
    __syncwarp();
  }

  // The values arrive while the rows are moved.
  const PairValues& values = args.values;
  const std::byte* const token_values =
      own ? values.tokens + int64_t{from.token} * num_topk * values.bytes
          : staged + values.staging_offset;
  uint64_t value[2] = {};
  for (int half = 0; half < 2; ++half) {
    if (values.rows == nullptr || placement.slots[half] == kNoSlot) continue;
    value[half] = good ? LoadValue(token_values + (half * 32 + lane) * values.bytes, values.bytes)
                       : ~uint64_t{0};
  }

  for (int half = 0; half < 2; ++half) {
    const int64_t row = placement.Row(half, by_token);
    if (!__any_sync(~0u, row >= 0)) continue;
    for (int32_t i = 0; i < args.num_leaves; ++i) {
      const Leaf& leaf = args.leaves[i];
      std::byte* const to = row >= 0 ? leaf.rows + row * leaf.row_bytes : nullptr;
      if (good) {
        MoveRow(mover, own ? leaf.tokens + from.token * leaf.row_bytes : staged + leaf.staging_offset,
                leaf.row_bytes, to);
      } else if (to != nullptr) {
        for (int64_t j = 0; j < leaf.row_bytes; ++j) to[j] = static_cast<std::byte>(0xff);
      }
    }
  }

  if (values.rows == nullptr) return;
  // In layout rank a row has all K values, zero for experts elsewhere.
  const int some = placement.mine[0] != 0 ? 0 : 1;
  const int64_t shared_row =
      __shfl_sync(~0u, placement.slots[some], __ffs(placement.mine[some]) - 1);
  for (int half = 0; half < 2; ++half) {
    const int32_t k = half * 32 + lane;
    const bool has_row = placement.slots[half] != kNoSlot;
    if (k >= num_topk || !(has_row || by_token)) continue;
    const int64_t index = by_token ? shared_row * num_topk + k : placement.slots[half];
    StoreValue(values.rows + index * values.bytes, value[half], values.bytes);
  }
}

// Goes through the tokens of all ranks in the order in which they become ready, the ranks in turn,
// beginning after this one so that not all ranks pull from the same.
template <typename Mover>
__device__ void Pull(const MoveArgs& args, Operation& operation, Mover& mover, int warp) {
  const int32_t num_ranks = operation.num_ranks();
  const int64_t tasks = int64_t{num_ranks} * args.common.shape.max_tokens_per_rank;
  const int64_t stride = int64_t{gridDim.x} * Mover::kPullWarps;
  auto get = [&](int64_t task) -> Token {
    const int32_t turn = static_cast<int32_t>(task % num_ranks);
    return {(args.common.workspace.rank + 1 + turn) % num_ranks,
            static_cast<int32_t>(task / num_ranks)};
  };
  int64_t task = int64_t{blockIdx.x} * Mover::kPullWarps + warp;
  if (task >= tasks) return;
  Token token = get(task);
  Placement placement(args, token.source, token.token);
  while (true) {
    // The next token's slots arrive while this one is moved.
    task += stride;
    const bool last = task >= tasks;
    const Token next = last ? token : get(task);
    const Placement next_placement(args, next.source, next.token);
    if (placement.Any()) PullToken(args, operation, mover, token, placement);
    if (last) break;
    token = next;
    placement = next_placement;
  }
  mover.Finish();
}

// Zeroes the rows that no token fills.
__device__ void ZeroRows(const MoveArgs& args) {
  const Shape& shape = args.common.shape;
  const int32_t values_per_row = shape.layout == Layout::kRank ? shape.num_topk : 1;
  const int32_t warps = blockDim.x / 32;
  for (int64_t row = int64_t{blockIdx.x} * warps + threadIdx.x / 32; row < shape.num_rows();
       row += int64_t{gridDim.x} * warps) {
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

template <typename Mover>
constexpr int kThreads = (Mover::kStageWarps + Mover::kPullWarps) * 32;

template <typename Mover>
__global__ void __launch_bounds__(kThreads<Mover>, 1)
    DispatchKernel(const __grid_constant__ MoveArgs args) {
  extern __shared__ __align__(128) std::byte shared[];
  const Shape& shape = args.common.shape;
  const Workspace& workspace = args.common.workspace;
  const uint32_t site = static_cast<uint32_t>(args.staging_row_bytes / 16) * 8 +
                        static_cast<uint32_t>(args.num_leaves);
  Operation operation(workspace, Op::kDispatch, site, args.common.position);
  operation.Enter();

  const int warp = threadIdx.x / 32;
  Mover mover(shared, warp);
  if (warp < Mover::kStageWarps) {
    if (shape.num_ranks > 1) Stage(args, operation, mover, warp);
  } else {
    Pull(args, operation, mover, warp - Mover::kStageWarps);
  }
  ZeroRows(args);
  operation.Leave();
}

template <typename Mover>
Status LaunchWith(cudaStream_t stream, const MoveArgs& args) {
  constexpr int64_t kSharedBytes =
      Mover::kSharedBytesPerWarp * (Mover::kStageWarps + Mover::kPullWarps);
  return Launch(DispatchKernel<Mover>, args.common.workspace.num_sms, kThreads<Mover>,
                kSharedBytes, stream, args);
}

}  // namespace

Status Dispatch(cudaStream_t stream, const MoveArgs& args) {
  bool aligned = true;
  for (int32_t i = 0; i < args.num_leaves; ++i) {
    const Leaf& leaf = args.leaves[i];
    aligned = aligned && (reinterpret_cast<uintptr_t>(leaf.tokens) |
                          reinterpret_cast<uintptr_t>(leaf.rows) |
                          static_cast<uintptr_t>(leaf.row_bytes)) % 16 == 0;
  }
  return aligned && HasBulkCopies() ? LaunchWith<BulkMover>(stream, args)
                                    : LaunchWith<VectorMover>(stream, args);
}

Status LoadDispatch() {
  if (HasBulkCopies()) {
    if (Status status = Load(DispatchKernel<BulkMover>); !status.ok()) return status;
  }
  return Load(DispatchKernel<VectorMover>);
}

}  // namespace jax_ep::cuda
