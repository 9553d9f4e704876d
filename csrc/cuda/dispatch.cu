#include <algorithm>
#include <limits>

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

// Every rank stages its tokens and places those that it needs, each of which comes once over the
// link: staged in the rank's own workspace, cast to fp8 where that is asked for, and pulled by the
// others; or pushed into the workspaces of those. Some warps stage first; all place, token by token
// behind the stagers of the other ranks.
namespace jax_ep::cuda {
namespace {

constexpr int kWarps = 16;
// To stage here: of each block the warps that do it to the end, unless shared memory allows fewer.
constexpr int kPullStageWarps = 8;
// Where many ranks share a GPU, what they stage leaves its L2 cache before all have pulled it,
// unless each stages only so many tokens ahead of what it places. That makes casting warps wait, of
// which fewer are enough then.
constexpr int kManyRanks = 8;
constexpr int kStagedAhead = 768;  // tokens of the ranks on a GPU together
constexpr int kSharedCastWarps = 6;
// To push: the blocks that do it to the end, enough for the link; stores of more would keep other
// stores waiting behind them. Rows of fewer bytes take a warp no less time, and so more blocks
// (docs/performance.md).
constexpr int64_t kPushBlocks = 12;
constexpr int64_t kFullRowBytes = 8192;
// Of a block: those that fill rows which no token takes.
constexpr int kFillWarps = 8;
constexpr int kStageQueue = 0;
constexpr int kPlaceQueue = 1;
using StageBulkRing = BulkRing<2, 3>;
using StageVectorRing = VectorRing<2, 3>;

// Where tokens are staged.
enum class Stage {
  kHere,      // in this rank's workspace, which the others read
  kCastHere,  // the same, and some leaves are cast
  kAtPeers,   // in the workspaces of the ranks that have rows of them
};

// Stages one of this rank's tokens, the queue's latest.
template <Stage kStage, typename Queue>
__device__ void StageToken(const MoveArgs& args, Queue& queue, int32_t token) {
  const int32_t own = args.common.workspace.rank;
  const int32_t num_ranks = args.common.shape.num_ranks;
  const int32_t num_topk = args.common.shape.num_topk;
  const PairValues& values = args.values;
  // The values arrive while the rows are staged.
  uint64_t value[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t k = half * 32 + static_cast<int32_t>(threadIdx.x % 32);
    if (values.tokens == nullptr || k >= num_topk) continue;
    value[half] = LoadValue(values.tokens + (int64_t{token} * num_topk + k) * values.bytes,
                            values.bytes);
  }
  Pairs ranks;
  if constexpr (kStage == Stage::kAtPeers) ranks = queue.Ranks(token);
  const auto for_each_row = [&](auto store) {
    if constexpr (kStage == Stage::kAtPeers) {
      for (int32_t rank = NextRank(ranks, -1, num_ranks); rank < num_ranks;
           rank = NextRank(ranks, rank, num_ranks)) {
        if (rank != own) store(StagedRow(args, rank, own, token));
      }
    } else {
      store(StagedRow(args, own, own, token));
    }
  };
  for (int32_t i = 0; i < args.num_leaves; ++i) {
    const Leaf& leaf = args.leaves[i];
    if (kStage == Stage::kCastHere && leaf.quantize != Quantize::kNone) {
      std::byte* const row = StagedRow(args, own, own, token);
      CastRow(queue, leaf, token, row + leaf.staging_offset, row + leaf.scales_offset);
    } else {
      CopyRow(queue, leaf, token, for_each_row);
    }
  }
  if (values.tokens == nullptr) return;
  for_each_row([&](std::byte* row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t k = half * 32 + static_cast<int32_t>(threadIdx.x % 32);
      if (k >= num_topk) continue;
      StoreValue(row + values.staging_offset + k * values.bytes, value[half], values.bytes);
    }
  });
}

// A token, and the rank that has it.
struct PlaceTask {
  int32_t source;
  int32_t token;

  // By number. They are the tokens of all ranks in the order in which they become ready, the ranks
  // in turn, beginning after this one so that not all ask the same.
  __device__ PlaceTask(const MoveArgs& args, int32_t task) {
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
template <Stage kStage, typename Mover, typename Ahead>
__device__ void PlaceToken(const MoveArgs& args, Operation& operation, Mover& mover,
                          const PlaceTask& task, const Pairs& slots, Ahead ahead) {
  const auto [source, token] = task;
  const Placement placement(slots);
  if (!placement.Any()) return;
  const Workspace& workspace = args.common.workspace;
  const int32_t num_topk = args.common.shape.num_topk;
  const int32_t lane = threadIdx.x % 32;
  const bool by_token = args.common.shape.layout == Layout::kRank;
  const bool in_place = source == workspace.rank && kStage != Stage::kCastHere;  // not staged
  const std::byte* const staged =
      StagedRow(args, kStage == Stage::kAtPeers ? workspace.rank : source, source, token);
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
      if (kStage == Stage::kCastHere && leaf.scales != nullptr) {
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

// Fills this block's share of the rows for which `wanted(row_source)` with a byte, by its first
// kFillWarps warps. Blocks that push first have no share, unless there are no others.
template <Stage kStage, typename Wanted>
__device__ void FillRows(const MoveArgs& args, uint8_t value, Wanted wanted) {
  constexpr uint32_t kThreads = kFillWarps * 32;
  const Shape& shape = args.common.shape;
  const auto num_blocks = static_cast<int32_t>(gridDim.x);
  const bool divided = kStage == Stage::kAtPeers && num_blocks > 1;
  const int32_t first_block = divided ? args.stagers.blocks : 0;
  const int32_t block = static_cast<int32_t>(blockIdx.x) - first_block;
  if (block < 0 || threadIdx.x >= kThreads) return;
  const int32_t lane = threadIdx.x % 32;
  const int64_t num_rows = shape.num_rows();
  // A warp looks at 32 rows together.
  for (int64_t base = int64_t{block} * kThreads + threadIdx.x / 32 * 32; base < num_rows;
       base += int64_t{num_blocks - first_block} * kThreads) {
    const bool mine = base + lane < num_rows && wanted(args.row_source[base + lane]);
    for (uint32_t left = __ballot_sync(~0u, mine); left != 0; left &= left - 1) {
      FillPayloadRow(args, base + __ffs(left) - 1, value);
    }
  }
}

// What a warp has of shared memory, first to stage and then to move.
template <typename Mover, typename Ring>
constexpr int64_t kSharedBytesPerWarp = std::max(Mover::kSharedBytes, Ring::kSharedBytes);

template <typename Mover, typename Ring, Stage kStage>
__global__ void __launch_bounds__(kWarps * 32, 1)
    DispatchKernel(const __grid_constant__ MoveArgs args) {
  extern __shared__ __align__(128) std::byte shared[];
  const Shape& shape = args.common.shape;
  const Workspace& workspace = args.common.workspace;
  // Ranks that stage in different places would take what they find there for each other's tokens.
  Operation operation(args.common, Op::kDispatch,
                      PayloadSite(args) * 3 + static_cast<uint32_t>(kStage));
  const int32_t warp = threadIdx.x / 32;
  if (!operation.Enter()) {
    // Blocks that began before the group failed place all tokens, but fill only their gaps: so
    // these rows are divided as the gaps are.
    return FillRows<kStage>(args, kPoison, [](int32_t) { return true; });
  }

  std::byte* const own_shared = shared + warp * kSharedBytesPerWarp<Mover, Ring>;
  constexpr bool kStagesOwn = kStage == Stage::kCastHere;
  if (shape.num_ranks > 1 || kStagesOwn) {
    __shared__ Publisher::Shared shared_publisher;
    Publisher publisher(&shared_publisher, kWarps - 1);
    if (warp == kWarps - 1) {
      publisher.Run([&](int32_t token) {
        for (int32_t peer = 0; peer < shape.num_ranks; ++peer) {
          // If leaves are cast, this rank's own rows are not those that it was given, and it, too,
          // reads them where they are staged.
          if (kStagesOwn || peer != workspace.rank) operation.Ready(peer, token);
        }
      });
    } else {
      if (blockIdx.x < args.stagers.blocks && warp < args.stagers.warps) {
        StageQueue<Ring, kStage == Stage::kAtPeers> queue(args, operation, kStageQueue, own_shared);
        for (int32_t token; (token = queue.NextToken()) >= 0;) {
          operation.WaitUntilTaken(kPlaceQueue,
                                   int64_t{token - args.stagers.ahead} * shape.num_ranks);
          StageToken<kStage>(args, queue, token);
          publisher.Finished(token);
        }
      }
      publisher.End();
    }
  }
  FillRows<kStage>(args, 0, [](int32_t source) { return source < 0; });
  Mover mover(own_shared);
  // The slots of the next task are loaded while a token is moved.
  Tasks tasks(operation, kPlaceQueue, int64_t{shape.num_ranks} * shape.max_tokens_per_rank);
  int32_t loaded = -1;
  Pairs next_slots = {};
  for (int32_t number; tasks.Take(&number);) {
    const PlaceTask task(args, number);
    const Pairs slots =
        number == loaded ? next_slots : ReceivedSlots(args, task.source, task.token);
    PlaceToken<kStage>(args, operation, mover, task, slots, [&] {
      if (!tasks.Peek(&loaded)) return;
      const PlaceTask next(args, loaded);
      next_slots = ReceivedSlots(args, next.source, next.token);
    });
  }
  mover.Finish();
  operation.Leave();
}

// Where to stage tokens. Stores go over the link at 373 GB/s and loads at 321, since requests for
// loads take room on it, too (docs/performance.md). But a token is stored once for every rank that it
// is pushed to, not once in all: which costs more than it brings where a cast or memory is the limit;
// or the SMs' stores, as they are where two ranks store a row a pair.
Stage ChooseStage(const MoveArgs& args) {
  for (int32_t i = 0; i < args.num_leaves; ++i) {
    if (args.leaves[i].quantize != Quantize::kNone) return Stage::kCastHere;
  }
  const Shape& shape = args.common.shape;
  const bool mostly_link =
      shape.num_ranks >= 4 || (shape.num_ranks > 1 && shape.layout == Layout::kRank);
  return args.common.workspace.ranks_per_device == 1 && mostly_link ? Stage::kAtPeers
                                                                    : Stage::kHere;
}

Stagers ChooseStagers(const MoveArgs& args, Stage stage) {
  constexpr int32_t kAnyNumber = std::numeric_limits<int32_t>::max();
  const Workspace& workspace = args.common.workspace;
  if (stage == Stage::kAtPeers) {
    const int64_t row_bytes = std::clamp<int64_t>(args.staging_row_bytes, 1, kFullRowBytes);
    const int64_t blocks = std::min<int64_t>(kPushBlocks * kFullRowBytes / row_bytes,
                                             std::max(1, workspace.num_sms / 2));
    return {static_cast<int32_t>(blocks), kWarps - 1, kAnyNumber};
  }
  if (workspace.ranks_per_device < kManyRanks) {
    return {workspace.num_sms, kPullStageWarps, kAnyNumber};
  }
  return {workspace.num_sms, stage == Stage::kCastHere ? kSharedCastWarps : kPullStageWarps,
          kStagedAhead / workspace.ranks_per_device};
}

template <typename Mover, typename Ring>
auto Kernel(Stage stage) -> void (*)(MoveArgs) {
  switch (stage) {
    case Stage::kHere: return DispatchKernel<Mover, Ring, Stage::kHere>;
    case Stage::kCastHere: return DispatchKernel<Mover, Ring, Stage::kCastHere>;
    case Stage::kAtPeers: return DispatchKernel<Mover, Ring, Stage::kAtPeers>;
  }
  return nullptr;
}

template <typename Mover, typename Ring>
Status LaunchWith(cudaStream_t stream, MoveArgs args) {
  const Stage stage = ChooseStage(args);
  const auto kernel = Kernel<Mover, Ring>(stage);
  constexpr int64_t kBytes = kSharedBytesPerWarp<Mover, Ring>;
  const int32_t num_sms = args.common.workspace.num_sms;
  args.stagers = ChooseStagers(args, stage);
  const int64_t room = MaxSharedBytes(kernel) / kBytes;  // warps
  if (room < args.stagers.warps) args.stagers.warps = static_cast<int32_t>(room);
  const int32_t warps = Mover::kSharedBytes > 0 ? kWarps : args.stagers.warps;
  return Launch(kernel, num_sms, kWarps * 32, warps * kBytes, stream, args);
}

template <typename Mover, typename Ring>
Status LoadAll() {
  for (const Stage stage : {Stage::kHere, Stage::kCastHere, Stage::kAtPeers}) {
    if (Status status = Load(Kernel<Mover, Ring>(stage)); !status.ok()) return status;
  }
  return Status();
}

// The copy engine is there, and so is the shared memory that every warp needs to use it.
bool UseBulkCopies() {
  return HasBulkCopies() && MaxSharedBytes(Kernel<BulkMover, StageBulkRing>(Stage::kHere)) >=
                                kWarps * kSharedBytesPerWarp<BulkMover, StageBulkRing>;
}

}  // namespace

Status Dispatch(cudaStream_t stream, const MoveArgs& args) {
  if (Status status = CheckStaging(args); !status.ok()) return status;
  return UseBulkCopies() ? LaunchWith<BulkMover, StageBulkRing>(stream, args)
                         : LaunchWith<VectorMover, StageVectorRing>(stream, args);
}

Status LoadDispatch() {
  return UseBulkCopies() ? LoadAll<BulkMover, StageBulkRing>()
                         : LoadAll<VectorMover, StageVectorRing>();
}

}  // namespace jax_ep::cuda
