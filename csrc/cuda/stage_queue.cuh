#ifndef JAX_EP_CSRC_CUDA_STAGE_QUEUE_CUH_
#define JAX_EP_CSRC_CUDA_STAGE_QUEUE_CUH_

#include <cstddef>
#include <cstdint>

#include "csrc/cuda/kernels.h"
#include "csrc/cuda/pairs.cuh"
#include "csrc/cuda/quantize.cuh"
#include "csrc/cuda/signal.cuh"

// How the rows of tokens come to the warps that stage them: through a ring (row_ring.cuh), ahead of
// their use and past the ends of rows and tokens.
namespace jax_ep::cuda {

// Whether a StageQueue has the leaf's rows.
__device__ __forceinline__ bool TravelsInBatches(const Leaf& leaf) {
  if (leaf.quantize != Quantize::kNone) return CastsVectors(leaf);
  return leaf.row_bytes != 0 && (reinterpret_cast<uintptr_t>(leaf.tokens) |
                                 static_cast<uintptr_t>(leaf.row_bytes)) % 16 == 0;
}

// The tokens of a queue of tasks that a warp gets to stage, and what lies in their rows, batch by
// batch; with kRanks also the ranks that have rows of it. All lanes make all calls.
template <typename Ring, bool kRanks>
class StageQueue {
 public:
  static constexpr int kBatch = Ring::kBatch;
  static constexpr int kPieceBytes = Ring::kPieceBytes;
  static constexpr int kBatchBytes = Ring::kBatchBytes;

  __device__ StageQueue(const MoveArgs& args, const Operation& operation, int queue,
                        std::byte* shared)
      : args_(args), tasks_(operation, queue, args.common.num_tokens), ring_(shared) {
    for (int32_t i = 0; i < args.num_leaves; ++i) any_batches_ |= TravelsInBatches(args.leaves[i]);
    for (int i = 0; i < Ring::kStages; ++i) LoadNext();
  }

  // The next token to stage, or -1.
  __device__ __forceinline__ int32_t NextToken() {
    if (num_given_ == num_taken_ && !Take()) return -1;
    return __shfl_sync(~0u, taken_, num_given_++ % 32);
  }

  // The ranks that have rows of that token.
  __device__ __forceinline__ Pairs Ranks(int32_t token) const {
    return token == loading_ ? ranks_ : RowsOfToken(args_, token).ranks;
  }

  // Waits for the next batch of the token's rows and gives its address.
  __device__ __forceinline__ const std::byte* Front() { return ring_.Front(); }

  // Is done with it.
  __device__ __forceinline__ void Pop() {
    ring_.Pop();
    LoadNext();
  }

 private:
  // False if all tokens have been taken.
  __device__ __forceinline__ bool Take() {
    int32_t token;
    if (!tasks_.Take(&token)) return false;
    if (threadIdx.x % 32 == num_taken_ % 32) taken_ = token;
    ++num_taken_;
    loading_ = token;
    if (kRanks) ranks_ = RowsOfToken(args_, token).ranks;
    return true;
  }

  // Goes on to the next row that travels in batches; false after the last one.
  __device__ __forceinline__ bool NextRow() {
    do {
      if (++leaf_ >= args_.num_leaves) {
        if (!any_batches_ || !Take()) return false;
        leaf_ = 0;
      }
    } while (!TravelsInBatches(args_.leaves[leaf_]));
    const Leaf& leaf = args_.leaves[leaf_];
    const bool casts = leaf.quantize != Quantize::kNone;
    left_ = static_cast<int32_t>(leaf.row_bytes * (casts ? StorageBytes(leaf.dtype) : 1));
    from_ = leaf.tokens + int64_t{loading_} * left_;
    return true;
  }

  __device__ __forceinline__ void LoadNext() {
    if (left_ <= 0 && !NextRow()) return ring_.LoadNothing();
    const int32_t first = threadIdx.x % 32 * kPieceBytes;
    ring_.Load(from_ + first, max(0, min(kPieceBytes, left_ - first)));
    from_ += kBatchBytes;
    left_ -= kBatchBytes;
  }

  const MoveArgs& args_;
  Tasks tasks_;
  Ring ring_;
  bool any_batches_ = false;

  int32_t taken_ = 0;    // lane l: the latest of tokens l, l + 32, ... that were taken
  uint32_t num_taken_ = 0;
  uint32_t num_given_ = 0;

  // What is being loaded: the rest of a row.
  int32_t loading_ = -1;  // the token, the latest that was taken
  Pairs ranks_ = {};      // of that, which arrive while its rows do
  int32_t leaf_ = kMaxLeaves;
  const std::byte* from_ = nullptr;
  int32_t left_ = 0;     // bytes
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_STAGE_QUEUE_CUH_
