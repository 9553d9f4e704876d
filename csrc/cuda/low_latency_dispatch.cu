#include <cstddef>
#include <string>

#include "csrc/cuda/kernels.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/low_latency.cuh"
#include "csrc/cuda/low_latency_place.cuh"
#include "csrc/cuda/low_latency_send.cuh"
#include "csrc/cuda/payload.cuh"
#include "csrc/cuda/placement.cuh"
#include "csrc/cuda/signal.cuh"
#include "csrc/cuda/team.cuh"

// prepare and dispatch in one kernel, for few tokens. Every rank sends its topk_idx to all others,
// and each of its tokens, cast to fp8 where that is asked for, once to every rank that has an
// expert of it. Then every block counts all ranks' pairs by itself, so that no block waits for
// another, and places those of its share of all ranks' tokens: a stable counting sort, as in
// prepare. It moves the rows of that share from the buffer, this rank's own from the operands.
//
// A block's warps have roles. Most send rows while the others exchange and count indices; then one
// fences and tells of the rows while others find each expert's first row; at last one places
// tokens, a batch ahead of all others, which move them.
namespace jax_ep::cuda {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * 32;
constexpr int kSendingWarps = 10;  // where the others count meanwhile
constexpr int kTellingWarp = 0;
constexpr int kPlacingWarp = kWarps - 1;

static_assert(kSendBatch * kMaxTopk <= kSendingWarps * 32, "a thread for each pair");
static_assert(kPlaceBatch * kMaxTopk <= kPlacingWarp * 32, "a thread for each pair");

// What a block has in shared memory, beside the counters of all experts.
struct Shared {
  SendTargets targets[kWarps];  // every warp finds them out for itself, and waits for no other
  int32_t first_token[kWarps][kMaxRanks + 1];  // the same; see CountTokens
  PlacedBatch batches[2];  // one is read while the next is written
};

// Poisons all results, by this block alone: no other knows which rows it would have filled, and one
// that began before the group failed fills only its own.
__device__ __noinline__ void Poison(const LowLatencyDispatchArgs& args) {
  const int64_t num_rows = args.move.common.shape.num_rows();
  ClearRouting(args.move.common, args.routing, threadIdx.x, kThreads);
  for (int64_t row = threadIdx.x / 32; row < num_rows; row += kWarps) {
    FillPayloadRow(args.move, row, kPoison);
  }
}

// Finds each expert's first row.
__device__ void PlaceAll(const Team& team, const LowLatencyDispatchArgs& args,
                         const ExpertCounters& counters) {
  const Common& common = args.move.common;
  const int32_t num_local = common.shape.num_local_experts();
  const int32_t first_expert = common.workspace.rank * num_local;
  PlaceExperts(
      team, common, args.routing,
      [&](int32_t expert) { return counters.before[expert] + counters.offsets[expert]; },
      [&](int32_t expert, int32_t count, int32_t first) {
        counters.offsets[expert] = first;
        const int32_t local = expert - first_expert;
        if (local >= 0 && local < num_local) counters.counts[local] = count;
      });
}

// Places the block's share of all ranks' tokens, and moves their rows; by all threads. False if
// something did not come.
__device__ bool Receive(const LowLatencyDispatchArgs& args, LowLatencyChannel& channel,
                        const ShapeDividers& dividers, const ExpertCounters& counters,
                        Shared& shared) {
  const Shape& shape = args.move.common.shape;
  const bool casts = Casts(args.move);
  const Team movers(0, kPlacingWarp);
  const int32_t* const first_token = shared.first_token[kPlacingWarp];
  const int32_t end = FirstToken(first_token, shape, blockIdx.x + 1);
  if (movers.Has()) FillGaps(movers, args, dividers, first_token, counters);
  int32_t parity = 0;
#pragma unroll 1
  for (int32_t first = FirstToken(first_token, shape, blockIdx.x); first < end;
       first += kPlaceBatch) {
    PlacedBatch& batch = shared.batches[parity];
    bool good = true;
    if (!movers.Has()) {
      good = PlaceTokens(args, channel, dividers, first_token, first,
                         min(kPlaceBatch, end - first), casts, counters, batch);
    }
    if (!__syncthreads_and(good)) return false;
    if (movers.Has()) MovePlacedRows(movers, args.move, channel, dividers, casts, batch);
    parity ^= 1;
  }
  return true;
}

__global__ void __launch_bounds__(kThreads, 1)
    LowLatencyDispatchKernel(const __grid_constant__ LowLatencyDispatchArgs args) {
  extern __shared__ int32_t dynamic[];
  __shared__ Shared shared;
  const MoveArgs& move = args.move;
  const Split& split = args.split;
  const Shape& shape = move.common.shape;
  const ExpertCounters counters(dynamic, shape);
  for (int32_t i = threadIdx.x; split.receives && i < 2 * shape.num_experts; i += kThreads) {
    counters.before[i] = 0;
  }
  Operation operation(move.common, OpOf(Op::kLowLatencyDispatch, split),
                      RoutingSite(shape) * 31 + PayloadSite(move));
  LowLatencyChannel channel(move, operation, split);
  if (!channel.Enter()) {
    if (split.receives) return Poison(args);
    if (blockIdx.x == 0 && threadIdx.x < 2) split.ticket[threadIdx.x] = ~0u;
    return;
  }
  const bool both = channel.sends() && channel.receives();
  const Team senders(0, both ? kSendingWarps : kWarps);
  const Team counting(both ? kSendingWarps : 0, both ? kWarps - kSendingWarps : kWarps);
  const ShapeDividers dividers(shape);
  const int32_t warp = threadIdx.x / 32;
  SendTargets& targets = shared.targets[warp];
  if (channel.sends() && counting.Has()) SendRouting(counting, move, operation, channel);
  if (channel.sends() && senders.Has()) {
    ForEachSent(move, dividers, targets, false, [&](int32_t count, auto token) {
      SendTokens(senders, move, channel, dividers, targets, count, token);
    });
  }
  if (channel.receives() && counting.Has()) {
    int32_t* const first_token = shared.first_token[warp];
    CountTokens(move.common, channel, first_token);
    CountPairs(counting, move.common, operation, channel, first_token,
          FirstToken(first_token, shape, blockIdx.x) * shape.num_topk, counters);
  }
  const bool good = __syncthreads_and(!channel.lost());
  if (channel.sends() && warp == kTellingWarp) TellOfRows(move, channel, dividers, targets);
  if (channel.receives()) {
    const Team placing(kTellingWarp + 1, kWarps - kTellingWarp - 1);
    if (good && placing.Has()) PlaceAll(placing, args, counters);
    __syncthreads();
    if (!good || !Receive(args, channel, dividers, counters, shared)) Poison(args);
  }
  channel.Leave();
}

}  // namespace

Status LowLatencyDispatch(cudaStream_t stream, const LowLatencyDispatchArgs& args) {
  if (Status status = CheckLowLatency(args.move); !status.ok()) return status;
  const Common& common = args.move.common;
  const int64_t bytes = args.split.receives ? ExpertCounters::Bytes(common.shape) : 0;
  if (const int64_t limit = MaxSharedBytes(LowLatencyDispatchKernel); bytes > limit) {
    return Status::Error("the low-latency dispatch needs " + std::to_string(bytes) +
                         " bytes of shared memory for " +
                         std::to_string(common.shape.num_experts) +
                         " experts, and a block has " + std::to_string(limit));
  }
  return Launch(LowLatencyDispatchKernel, LowLatencyBlocks(common), kThreads, bytes, stream,
                args);
}

Status LoadLowLatencyDispatch() { return Load(LowLatencyDispatchKernel); }

}  // namespace jax_ep::cuda
