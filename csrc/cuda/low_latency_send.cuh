#ifndef JAX_EP_CSRC_CUDA_LOW_LATENCY_SEND_CUH_
#define JAX_EP_CSRC_CUDA_LOW_LATENCY_SEND_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/low_latency.cuh"
#include "csrc/cuda/low_latency_cast.cuh"
#include "csrc/cuda/placement.cuh"
#include "csrc/cuda/signal.cuh"
#include "csrc/cuda/team.cuh"

// The sending half of the low-latency dispatch.
namespace jax_ep::cuda {

// Tokens that are sent together.
inline constexpr int kSendBatch = 2;

// Of tokens that are sent together, the ranks that each is sent to.
struct SendTargets {
  int32_t ranks[kSendBatch * kMaxTopk];  // [tokens, K], of each token first those there are
  int32_t count[kSendBatch];
};

inline __device__ bool Casts(const MoveArgs& args) {
  bool casts = false;
  for (int32_t i = 0; i < args.num_leaves; ++i) {
    casts |= args.leaves[i].quantize != Quantize::kNone;
  }
  return casts;
}

// Finds the ranks that each of `count` tokens goes to, by one warp. If leaves are cast, this rank's
// own rows are not those that it was given, and it, too, gets them.
template <typename Token>
__device__ void ChooseTargets(const MoveArgs& args, const ShapeDividers& dividers, bool casts,
                              int32_t count, Token token, SendTargets& targets) {
  const Shape& shape = args.common.shape;
  const int32_t lane = threadIdx.x % 32;
  const uint32_t lanes_before = (1u << lane) - 1;
  __syncwarp();  // the list before has been read
#pragma unroll 1
  for (int32_t i = 0; i < count; ++i) {
    int32_t* const ranks = targets.ranks + i * shape.num_topk;
    const int32_t* const experts = args.topk_idx + int64_t{token(i)} * shape.num_topk;
    int32_t found = 0;
#pragma unroll 1
    for (int32_t first = 0; first < shape.num_topk; first += 32) {
      const int32_t k = first + lane;
      const int32_t expert = k < shape.num_topk ? experts[k] : -1;
      const bool exists = expert >= 0 && expert < shape.num_experts;
      int32_t target = exists ? dividers.local_experts.Quotient(expert) : -1;
      if (target == args.common.workspace.rank && !casts) target = -1;
#pragma unroll 1
      for (int32_t n = 0; n < found; ++n) {
        if (ranks[n] == target) target = -1;
      }
      const uint32_t same = __match_any_sync(~0u, target);
      const bool chosen = target >= 0 && (same & lanes_before) == 0;
      const uint32_t all = __ballot_sync(~0u, chosen);
      if (chosen) ranks[found + __popc(all & lanes_before)] = target;
      found += __popc(all);
      __syncwarp();
    }
    if (lane == 0) targets.count[i] = found;
  }
  __syncwarp();
}

// Sends `count` tokens to their targets; `token(i)` is number i of them.
template <typename Token>
__device__ void SendTokens(const Team& team, const MoveArgs& args,
                           const LowLatencyChannel& channel, const ShapeDividers& dividers,
                           const SendTargets& targets, int32_t count, Token token) {
  const int32_t num_topk = args.common.shape.num_topk;
  const int32_t rank = args.common.workspace.rank;
  const PairValues& values = args.values;
  auto places = [&](int32_t i) { return targets.count[i]; };
  auto staged = [&](int32_t i, int32_t n) {
    return channel.Row(targets.ranks[i * num_topk + n], rank, token(i));
  };
  // Arrives while the rows are moved.
  const int32_t pair = team.thread();
  const bool has_value = values.tokens != nullptr && pair < count * num_topk;
  const int32_t pair_row = dividers.topk.Quotient(pair);
  const int32_t k = dividers.topk.Remainder(pair);
  uint64_t value = 0;
  if (has_value) {
    const int64_t index = int64_t{token(pair_row)} * num_topk + k;
    value = LoadValue(values.tokens + index * values.bytes, values.bytes);
  }
  for (int32_t l = 0; l < args.num_leaves; ++l) {
    const Leaf& leaf = args.leaves[l];
    const bool casts = leaf.quantize != Quantize::kNone;
    const int64_t bytes = leaf.row_bytes * (casts ? StorageBytes(leaf.dtype) : 1);
    auto row = [&](int32_t i) { return leaf.tokens + token(i) * bytes; };
    if (casts) {
      CastRows(team, leaf, count, row, places, staged);
    } else {
      CopyRows(count, bytes, reinterpret_cast<uintptr_t>(leaf.tokens) | bytes, team.warp(),
               team.num_warps(), row, places,
               [&](int32_t i, int32_t n) { return staged(i, n) + leaf.staging_offset; });
    }
  }
  for (int32_t n = 0; has_value && n < places(pair_row); ++n) {
    StoreValue(staged(pair_row, n) + values.staging_offset + k * values.bytes, value,
               values.bytes);
  }
}

// Tells all ranks of this one's tokens and their experts.
inline __device__ void SendRouting(const Team& team, const MoveArgs& args, Operation& operation,
                            const LowLatencyChannel& channel) {
  const Shape& shape = args.common.shape;
  const int32_t rank = args.common.workspace.rank;
  if (blockIdx.x == 0) {
    for (int32_t peer = team.thread(); peer < shape.num_ranks; peer += team.num_threads()) {
      ptx::StoreRelaxedSys(&channel.Control(peer)->num_tokens[rank],
                           channel.CountWord(args.common.num_tokens));
    }
  }
  const int64_t mine = int64_t{rank} * shape.max_tokens_per_rank * shape.num_topk;
  SendIndices(args.common, args.topk_idx, operation, channel, SpreadThread(team),
              NumThreads(team), [&](int32_t peer) { return channel.Topk(peer) + mine; });
}

// Whether this rank has anything to send.
inline __device__ bool SendsRows(const MoveArgs& args) {
  return args.common.shape.num_ranks > 1 || Casts(args);
}

// Calls `work(count, token)` for this block's tokens, every gridDim.x-th, a batch after the other;
// `token(i)` is number i of a batch's `count`, whose targets are in `targets`. `again` says that
// the warp has done this before, so that those of an only batch are there.
template <typename Work>
__device__ void ForEachSent(const MoveArgs& args, const ShapeDividers& dividers,
                            SendTargets& targets, bool again, Work work) {
  const int32_t num_tokens = SendsRows(args) ? args.common.num_tokens : 0;
  const bool casts = Casts(args);
  const int32_t blocks = gridDim.x;
  const bool only = num_tokens <= static_cast<int32_t>(blockIdx.x) + kSendBatch * blocks;
#pragma unroll 1
  for (int32_t first = blockIdx.x; first < num_tokens; first += kSendBatch * blocks) {
    const int32_t count = min(kSendBatch, (num_tokens - first - 1) / blocks + 1);
    auto token = [&](int32_t i) { return first + i * blocks; };
    if (!again || !only) ChooseTargets(args, dividers, casts, count, token, targets);
    work(count, token);
  }
}

// Tells the others of the block's tokens, by one warp, after all threads' stores.
inline __device__ void TellOfRows(const MoveArgs& args, const LowLatencyChannel& channel,
                           const ShapeDividers& dividers, SendTargets& targets) {
  const int32_t num_topk = args.common.shape.num_topk;
  ptx::FenceSys();
  ForEachSent(args, dividers, targets, true, [&](int32_t count, auto token) {
    for (int32_t i = 0; i < count; ++i) {
      for (int32_t n = threadIdx.x % 32; n < targets.count[i]; n += 32) {
        channel.Ready(targets.ranks[i * num_topk + n], token(i));
      }
    }
  });
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_LOW_LATENCY_SEND_CUH_
