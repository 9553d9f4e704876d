#include <algorithm>

#include "csrc/core/slots.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/mover.cuh"
#include "csrc/cuda/pairs.cuh"
#include "csrc/cuda/payload.cuh"
#include "csrc/cuda/publisher.cuh"
#include "csrc/cuda/row_ring.cuh"
#include "csrc/cuda/signal.cuh"
#include "csrc/cuda/stage_queue.cuh"
#include "csrc/cuda/stage_row.cuh"

// Every rank puts its tokens into its own workspace, cast to fp8 where that is asked for, and pulls
// those that it needs from the others: each once over the link, then to all its rows. Some warps of
// a block stage first; all pull, token by token behind the stagers of the other ranks.
namespace jax_ep::cuda {
namespace {

constexpr int kWarps = 16;
// Of these the warps that stage to the end, unless shared memory allows fewer.
constexpr int kStageWarps = 8;
constexpr int kStageQueue = 0;
constexpr int kPullQueue = 1;
using StageBulkRing = BulkRing<2, 3>;
using StageVectorRing = VectorRing<2, 3>;

// Puts one of this rank's tokens, the queue's latest, into its workspace.
template <bool kCasts, typename Queue>
__device__ void StageToken(const MoveArgs& args, Queue& queue, int32_t token) {
  const Workspace& workspace = args.common.workspace;
  const PairValues& values = args.values;
  const int32_t num_topk = args.common.shape.num_topk;
  std::byte* const row = workspace.base[workspace.rank] + workspace.at.staging +
                         token * args.staging_row_bytes;
  // The values arrive while the rows are staged.
  uint64_t value[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t k = half * 32 + static_cast<int32_t>(threadIdx.x % 32);
    if (values.tokens == nullptr || k >= num_topk) continue;
    value[half] = LoadValue(values.tokens + (int64_t{token} * num_topk + k) * values.bytes,
                            values.bytes);
  }
  for (int32_t i = 0; i < args.num_leaves; ++i) {
    const Leaf& leaf = args.leaves[i];
    if (kCasts && leaf.quantize != Quantize::kNone) {
      CastRow(queue, leaf, token, row + leaf.staging_offset, row + leaf.scales_offset);
    } else {
      CopyRow(queue, leaf, token, row + leaf.staging_offset);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t k = half * 32 + static_cast<int32_t>(threadIdx.x % 32);
    if (values.tokens == nullptr || k >= num_topk) continue;
    StoreValue(row + values.staging_offset + k * values.bytes, value[half], values.bytes);
  }
}

// A token, and the rank that has it.
struct PulledToken {
  int32_t source;
  int32_t token;

  // Of a pull task. They are the tokens of all ranks in the order in which they become ready, the
  // ranks in turn, beginning after this one so that not all pull from the same.
  __device__ PulledToken(const MoveArgs& args, int32_t task) {
    const int32_t num_ranks = args.common.shape.num_ranks;
    source = (args.common.workspace.rank + 1 + task % num_ranks) % num_ranks;
    token = task / num_ranks;
  }
};

// The rows of a token.
struct Placement {
  Pairs slots;
  uint32_t mine[2];  // the lanes whose pair has a row here

  __device__ explicit Placement(const Pairs& pair_slots) : slots(pair_slots) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
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

  // The row of the first pair that has one.
  __device__ int32_t SomeRow() const {
    const int32_t low = __shfl_sync(~0u, slots[0], __ffs(mine[0]) - 1);
    const int32_t high = __shfl_sync(~0u, slots[1], __ffs(mine[1]) - 1);
    return mine[0] != 0 ? low : high;
  }
};

// Brings a token, which has these slots here, to its rows. `ahead()` is called where there is
// something to wait for.
template <typename Mover, bool kCasts, typename Ahead>
__device__ void PullToken(const MoveArgs& args, Operation& operation, Mover& mover,
                          const PulledToken& pulled, const Pairs& slots, Ahead ahead) {
  const auto [source, token] = pulled;
  const Placement placement(slots);
  if (!placement.Any()) return;
  const Workspace& workspace = args.common.workspace;
  const int32_t num_topk = args.common.shape.num_topk;
  const int32_t lane = threadIdx.x % 32;
  const bool by_token = args.common.shape.layout == Layout::kRank;
  const bool in_place = source == workspace.rank && !kCasts;  // not staged
  const std::byte* const staged = workspace.base[source] + workspace.at.staging +
                                  token * args.staging_row_bytes;
  bool good = true;
  if (!in_place) {
    if (lane == 0) {
      good = operation.WaitReady(source, token);
      ptx::FenceProxyAsyncGlobal();
    }
    good = __shfl_sync(~0u, good, 0);
    __syncwarp();  // what lane 0 has seen, all may read
  }

  ahead();

  // The values arrive while the rows are moved.
  const PairValues& values = args.values;
  const std::byte* const token_values =
      in_place ? values.tokens + int64_t{token} * num_topk * values.bytes
               : staged + values.staging_offset;
  uint64_t value[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (values.rows == nullptr || placement.slots[half] == kNoSlot) continue;
    value[half] = good ? LoadValue(token_values + (half * 32 + lane) * values.bytes, values.bytes)
                       : ~uint64_t{0};
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = placement.Row(half, by_token);
    if (!__any_sync(~0u, row >= 0)) continue;
    auto move = [&](const std::byte* from, int64_t bytes, std::byte* rows) {
      std::byte* const to = row >= 0 ? rows + row * bytes : nullptr;
      if (good) {
        MoveRow(mover, from, bytes, to);
      } else {
        for (int64_t i = 0; to != nullptr && i < bytes; ++i) to[i] = std::byte{kPoison};
      }
    };
    for (int32_t i = 0; i < args.num_leaves; ++i) {
      const Leaf& leaf = args.leaves[i];
      move(in_place ? leaf.tokens + token * leaf.row_bytes : staged + leaf.staging_offset,
           leaf.row_bytes, leaf.rows);
      if (kCasts && leaf.scales != nullptr) {
        move(staged + leaf.scales_offset, leaf.scale_bytes, leaf.scales);
      }
    }
  }

  if (values.rows == nullptr) return;
  // In layout rank a row has all K values, zero for experts elsewhere.
  const int64_t shared_row = placement.SomeRow();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t k = half * 32 + lane;
    const bool has_row = placement.slots[half] != kNoSlot;
    if (k >= num_topk || !(has_row || by_token)) continue;
    const int64_t index = by_token ? shared_row * num_topk + k : placement.slots[half];
    StoreValue(values.rows + index * values.bytes, value[half], values.bytes);
  }
}

// Fills the rows for which `wanted(row_source)`, of this block's threads [0, num_threads), with a
// byte.
template <typename Wanted>
__device__ void FillRows(const MoveArgs& args, int32_t num_threads, uint8_t value, Wanted wanted) {
  const Shape& shape = args.common.shape;
  const int32_t lane = threadIdx.x % 32;
  const int64_t num_rows = shape.num_rows();
  // A warp looks at 32 rows together.
  for (int64_t base = int64_t{blockIdx.x} * num_threads + threadIdx.x / 32 * 32; base < num_rows;
       base += int64_t{gridDim.x} * num_threads) {
    const bool mine = base + lane < num_rows && wanted(args.row_source[base + lane]);
    for (uint32_t left = __ballot_sync(~0u, mine); left != 0; left &= left - 1) {
      FillPayloadRow(args, base + __ffs(left) - 1, value);
    }
  }
}

// What a warp has of shared memory, first to stage and then to move.
template <typename Mover, typename Ring>
constexpr int64_t kSharedBytesPerWarp = std::max(Mover::kSharedBytes, Ring::kSharedBytes);

template <typename Mover, typename Ring, bool kCasts>
__global__ void __launch_bounds__(kWarps * 32, 1)
    DispatchKernel(const __grid_constant__ MoveArgs args) {
  extern __shared__ __align__(128) std::byte shared[];
  const Shape& shape = args.common.shape;
  const Workspace& workspace = args.common.workspace;
  Operation operation(args.common, Op::kDispatch, PayloadSite(args));
  const int32_t warp = threadIdx.x / 32;
  if (!operation.Enter()) {
    // Blocks that began before the group failed pull all rows, but fill only their gaps: so these
    // rows are divided as the gaps are.
    if (warp < args.stage_warps) {
      FillRows(args, args.stage_warps * 32, kPoison, [](int32_t) { return true; });
    }
    return;
  }

  std::byte* const own_shared = shared + warp * kSharedBytesPerWarp<Mover, Ring>;
  if (shape.num_ranks > 1 || kCasts) {
    __shared__ Publisher::Shared shared_publisher;
    Publisher publisher(&shared_publisher, kWarps - 1);
    if (warp == kWarps - 1) {
      publisher.Run([&](int32_t token) {
        for (int32_t peer = 0; peer < shape.num_ranks; ++peer) {
          // If leaves are cast, this rank's own rows are not those that it was given, and it, too,
          // reads them where they are staged.
          if (kCasts || peer != workspace.rank) operation.Ready(peer, token);
        }
      });
    } else {
      if (warp < args.stage_warps) {
        StageQueue<Ring> queue(args, operation, kStageQueue, own_shared);
        for (int32_t token; (token = queue.NextToken()) >= 0;) {
          StageToken<kCasts>(args, queue, token);
          publisher.Finished(token);
        }
      }
      publisher.End();
    }
  }
  if (warp < args.stage_warps) {
    FillRows(args, args.stage_warps * 32, 0, [](int32_t source) { return source < 0; });
  }
  Mover mover(own_shared);
  const int64_t num_tasks = int64_t{shape.num_ranks} * shape.max_tokens_per_rank;
  // The slots of the next task are loaded while a token is moved.
  uint32_t loaded = ~0u;
  Pairs next_slots = {};
  ForEachTask(operation, kPullQueue, num_tasks, [&](uint32_t task, auto peek) {
    const PulledToken pulled(args, task);
    const Pairs slots =
        task == loaded ? next_slots : ReceivedSlots(args, pulled.source, pulled.token);
    PullToken<Mover, kCasts>(args, operation, mover, pulled, slots, [&] {
      loaded = peek();
      if (loaded >= num_tasks) return;
      const PulledToken next(args, loaded);
      next_slots = ReceivedSlots(args, next.source, next.token);
    });
  });
  mover.Finish();
  operation.Leave();
}

template <typename Mover, typename Ring>
Status LaunchWith(cudaStream_t stream, MoveArgs args) {
  bool casts = false;
  for (int32_t i = 0; i < args.num_leaves; ++i) {
    casts |= args.leaves[i].quantize != Quantize::kNone;
  }
  const auto kernel =
      casts ? DispatchKernel<Mover, Ring, true> : DispatchKernel<Mover, Ring, false>;
  constexpr int64_t kBytes = kSharedBytesPerWarp<Mover, Ring>;
  args.stage_warps = static_cast<int32_t>(
      std::min<int64_t>(kStageWarps, MaxSharedBytes(kernel) / kBytes));
  const int64_t warps = Mover::kSharedBytes > 0 ? kWarps : args.stage_warps;
  return Launch(kernel, args.common.workspace.num_sms, kWarps * 32, warps * kBytes, stream, args);
}

template <typename Mover, typename Ring>
Status LoadBoth() {
  if (Status status = Load(DispatchKernel<Mover, Ring, true>); !status.ok()) return status;
  return Load(DispatchKernel<Mover, Ring, false>);
}

// The copy engine is there, and so is the shared memory that every warp needs to use it.
bool UseBulkCopies() {
  return HasBulkCopies() && MaxSharedBytes(DispatchKernel<BulkMover, StageBulkRing, true>) >=
                                kWarps * kSharedBytesPerWarp<BulkMover, StageBulkRing>;
}

}  // namespace

Status Dispatch(cudaStream_t stream, const MoveArgs& args) {
  if (Status status = CheckStaging(args); !status.ok()) return status;
  return UseBulkCopies() ? LaunchWith<BulkMover, StageBulkRing>(stream, args)
                         : LaunchWith<VectorMover, StageVectorRing>(stream, args);
}

Status LoadDispatch() {
  return UseBulkCopies() ? LoadBoth<BulkMover, StageBulkRing>()
                         : LoadBoth<VectorMover, StageVectorRing>();
}

}  // namespace jax_ep::cuda
