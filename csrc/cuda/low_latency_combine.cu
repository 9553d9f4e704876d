#include <cstddef>

#include "csrc/core/dtype.h"
#include "csrc/core/slots.h"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/low_latency.cuh"
#include "csrc/cuda/low_latency_sum.cuh"
#include "csrc/cuda/payload.cuh"
#include "csrc/cuda/signal.cuh"

// combine for few tokens, with the same sums: every rank pushes its partial sum for each token of
// the other ranks into the token's rank, which adds up the partial sums in rank order, its own
// among them. A warp finds out which terms a token's sum has; then a block sums the tokens of a
// batch with all its warps, a vector a lane.
namespace jax_ep::cuda {
namespace {

// What a block has in shared memory: two of each, one is read while the next is written.
template <typename Acc>
struct Shared {
  SumBatch<Acc> sent[2];
  SumBatch<Acc> received[2];
};

// This block's share of `total` tasks, every gridDim.x-th from its own number on, in batches. Each
// warp from `first_warp` on looks after a task of a batch.
class Share {
 public:
  __device__ __forceinline__ Share(const Shape& shape, int32_t total, int32_t first_warp)
      : count_(static_cast<int32_t>(blockIdx.x) < total
                   ? (total - static_cast<int32_t>(blockIdx.x) - 1) /
                             static_cast<int32_t>(gridDim.x) + 1
                   : 0),
        most_(min(kSumBatch, kSumBatchPairs / shape.num_topk)),
        first_warp_(first_warp) {}

  __device__ __forceinline__ int32_t batches() const { return (count_ + most_ - 1) / most_; }
  __device__ __forceinline__ int32_t size(int32_t batch) const {
    return min(most_, count_ - batch * most_);
  }
  // The place in a batch of the calling thread's task, and whether there is one.
  __device__ __forceinline__ int32_t place() const {
    return static_cast<int32_t>(threadIdx.x / 32) - first_warp_;
  }
  __device__ __forceinline__ bool has_place(int32_t batch) const {
    return place() >= 0 && place() < size(batch);
  }
  __device__ __forceinline__ int32_t Task(int32_t batch, int32_t place) const {
    return static_cast<int32_t>(blockIdx.x + (batch * most_ + place) * gridDim.x);
  }

 private:
  const int32_t count_;
  const int32_t most_;  // of a batch
  const int32_t first_warp_;
};

// Finds out what this rank sends in a batch: its partial sums for tokens of the other ranks, of
// these in turn.
template <typename Acc>
__device__ __forceinline__ void OrderSent(const MoveArgs& args, const Share& share, int32_t number,
                                          SumBatch<Acc>& batch) {
  if (!share.has_place(number)) return;
  const Shape& shape = args.common.shape;
  const int32_t rank = args.common.workspace.rank;
  const int32_t peers = shape.num_ranks - 1;
  const int32_t i = share.place();
  const int32_t task = share.Task(number, i);
  const int32_t token = task / peers;
  const int32_t source = (rank + 1 + task % peers) % shape.num_ranks;
  if (threadIdx.x % 32 == 0) {
    batch.ranks[i] = source;
    batch.tokens[i] = token;
  }
  const int64_t entry = int64_t{source} * shape.max_tokens_per_rank + token;
  const int32_t* const slots = args.recv_slots + entry * shape.num_topk;
  OrderTerms(args, batch, i, [&](int32_t k, int32_t* slot) {
    *slot = slots[k];
    return *slot == kNoSlot ? shape.num_ranks : rank;
  });
}

// Finds out which terms the sums of a batch of this rank's own tokens have.
template <typename Acc>
__device__ __forceinline__ void OrderReceived(const MoveArgs& args, const Share& share,
                                              int32_t number, SumBatch<Acc>& batch) {
  if (!share.has_place(number)) return;
  const Shape& shape = args.common.shape;
  const int32_t i = share.place();
  const int32_t token = share.Task(number, i);
  if (threadIdx.x % 32 == 0) {
    batch.ranks[i] = args.common.workspace.rank;
    batch.tokens[i] = token;
  }
  const int64_t first = int64_t{token} * shape.num_topk;
  OrderTerms(args, batch, i, [&](int32_t k, int32_t* slot) {
    const int32_t expert = args.topk_idx[first + k];  // loaded together with the slot
    *slot = args.slots[first + k];
    return *slot == kNoSlot ? shape.num_ranks : shape.rank_of_expert(expert);
  });
}

// Waits for the partial sums that a batch needs, by the warps that have ordered its terms.
template <typename Acc>
__device__ __forceinline__ void WaitForTerms(const MoveArgs& args, LowLatencyChannel& channel,
                                             const Share& share, int32_t number,
                                             const SumBatch<Acc>& batch) {
  if (!share.has_place(number)) return;
  const int32_t i = share.place();
  const Term<Acc>* const terms = batch.terms + i * args.common.shape.num_topk;
  for (int32_t t = threadIdx.x % 32; t < batch.num_terms[i]; t += 32) {
    if (terms[t].kind == Term<Acc>::Kind::kPartial) {
      channel.WaitReady(terms[t].place, batch.tokens[i]);
    }
  }
}

// Poisons the sums of this block's tokens from a batch on: another block may have begun before the
// group failed, and computes its own.
__device__ __noinline__ void Poison(const MoveArgs& args, Share share, int32_t number) {
  for (; share.size(number) > 0; ++number) {
    for (int32_t i = threadIdx.x / 32; i < share.size(number); i += kSumWarps) {
      PoisonToken(args, share.Task(number, i));
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kSumWarps * 32, 1)
    LowLatencyCombineKernel(const __grid_constant__ LowLatencyCombineArgs args) {
  __shared__ Shared<typename T::Acc> shared;
  const MoveArgs& move = args.move;
  const Shape& shape = move.common.shape;
  const Split& split = args.split;
  Operation operation(move.common, OpOf(Op::kLowLatencyCombine, split), PayloadSite(move));
  LowLatencyChannel channel(move, operation, split);
  const bool entered = channel.Enter();
  const Share sent(shape, channel.sends() ? (shape.num_ranks - 1) * shape.max_tokens_per_rank : 0,
                   0);
  const Share received(shape, channel.receives() ? move.common.num_tokens : 0, kSumBatch);
  if (!entered) {
    if (split.receives) return Poison(move, received, 0);
    if (blockIdx.x == 0 && threadIdx.x < 2) split.ticket[threadIdx.x] = ~0u;
    return;
  }
  OrderReceived(move, received, 0, shared.received[0]);  // while nothing is there to wait for
  const int32_t sent_batches = sent.batches();
  const int32_t batches = sent_batches + received.batches();
#pragma unroll 1
  for (int32_t step = 0; step < batches; ++step) {
    const bool sends = step < sent_batches;
    const int32_t number = sends ? step : step - sent_batches;
    auto& batch = (sends ? shared.sent : shared.received)[number % 2];
    if (sends) {
      OrderSent(move, sent, number, batch);
      __syncthreads();
    } else {
      WaitForTerms(move, channel, received, number, batch);
      if (!__syncthreads_and(!channel.lost())) {
        Poison(move, received, number);
        break;
      }
      OrderReceived(move, received, number + 1, shared.received[(number + 1) % 2]);
    }
    const ChosenTokens chosen(batch, (sends ? sent : received).size(number), !sends);
    SumLeaves<T>(move, channel, batch, chosen);
    if (!sends) continue;
    __syncthreads();
    if (threadIdx.x >= 32) continue;  // the others go on
    ptx::FenceSys();
    if (const int32_t j = threadIdx.x; j < chosen.count()) {
      channel.Ready(batch.ranks[chosen(j)], batch.tokens[chosen(j)]);
    }
  }
  channel.Leave();
}

auto Choose(DType dtype) -> void (*)(LowLatencyCombineArgs) {
  switch (dtype) {
    case DType::kF32: return LowLatencyCombineKernel<F32>;
    case DType::kF64: return LowLatencyCombineKernel<F64>;
    case DType::kBF16: return LowLatencyCombineKernel<BF16>;
    case DType::kF16: return LowLatencyCombineKernel<F16>;
    case DType::kF8E4M3FN: return LowLatencyCombineKernel<F8E4M3FN>;
    case DType::kF8E5M2: return LowLatencyCombineKernel<F8E5M2>;
  }
  return nullptr;
}

}  // namespace

Status LowLatencyCombine(cudaStream_t stream, const LowLatencyCombineArgs& args) {
  if (Status status = CheckLowLatency(args.move); !status.ok()) return status;
  return Launch(Choose(args.move.dtype), LowLatencyBlocks(args.move.common), kSumWarps * 32, 0,
                stream, args);
}

Status LoadLowLatencyCombine() {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16, DType::kF8E4M3FN,
                            DType::kF8E5M2}) {
    if (Status status = Load(Choose(dtype)); !status.ok()) return status;
  }
  return Status();
}

}  // namespace jax_ep::cuda
