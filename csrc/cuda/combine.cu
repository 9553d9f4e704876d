#include <type_traits>

#include "csrc/core/dtype.h"
#include "csrc/core/slots.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/signal.cuh"

// Every rank sums its rows for each token of the other ranks and pushes the partial sum into the
// token's rank: one row a (token, rank) over the link. That rank adds up the partial sums, its own
// among them, in rank order. Some warps of a block push, the others reduce, tile by tile behind the
// pushers of all ranks.
namespace jax_ep::cuda {
namespace {

constexpr int kPushWarps = 8;
constexpr int kReduceWarps = 8;
constexpr int kPushThreads = kPushWarps * 32;
constexpr int kThreads = (kPushWarps + kReduceWarps) * 32;
constexpr int kTile = 8;  // tokens of each rank that become ready together
constexpr int kPushBarrier = 1;
constexpr int kMaxTopk = 64;
constexpr int kMaxTerms = kMaxTopk + kMaxRanks;
constexpr int kVectors = 3;  // of a lane that are summed at a time

// A row that enters a sum. The last of a rank, after which the partial sum is rounded, is marked in
// the top bit of the address, which is otherwise zero.
template <typename Acc>
struct Term {
  uint64_t marked_row;
  Acc weight;

  static constexpr uint64_t kEndsRank = uint64_t{1} << 63;
  __device__ const std::byte* row() const {
    return reinterpret_cast<const std::byte*>(marked_row & ~kEndsRank);
  }
  __device__ bool ends_rank() const { return (marked_row & kEndsRank) != 0; }
};

// The terms of one token, rows of dtype T, as one warp sees them. A lane stands for the pairs
// k = lane and lane + 32.
template <typename T>
class Terms {
 public:
  using Acc = typename T::Acc;
  using Storage = typename T::Storage;

  __device__ Terms(const MoveArgs& args, Term<Acc>* storage) : args_(args), terms_(storage) {}

  // This rank's rows for a token whose pairs have these slots here, with their weights.
  __device__ void AddLocal(const Leaf& leaf, const int32_t (&slots)[2], bool once) {
    const int32_t lane = threadIdx.x % 32;
    const int32_t before = count_;
    for (int half = 0; half < 2; ++half) {
      uint32_t mine = __ballot_sync(~0u, slots[half] != kNoSlot);
      if (once && mine != 0) mine = count_ == before ? mine & -mine : 0;
      if (mine >> lane & 1) {
        terms_[count_ + __popc(mine & ((1u << lane) - 1))] = {
            reinterpret_cast<uint64_t>(leaf.rows + slots[half] * leaf.row_bytes),
            Weight(slots[half])};
      }
      count_ += __popc(mine);
    }
    EndRank();
  }

  __device__ void AddPartial(const std::byte* row) {
    if (threadIdx.x % 32 == 0) {
      terms_[count_] = {reinterpret_cast<uint64_t>(row) | Term<Acc>::kEndsRank, 1};
    }
    ++count_;
    __syncwarp();
  }

  __device__ void Clear() {
    __syncwarp();
    count_ = 0;
  }

  // Writes the sum of the rows to `out`.
  __device__ void Sum(const Leaf& leaf, std::byte* out) const {
    // At most 8 elements, whose sums fit in registers.
    using Vector = std::conditional_t<sizeof(Storage) == 1, uint2, uint4>;
    if ((reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(leaf.rows) |
         static_cast<uintptr_t>(leaf.row_bytes)) % 16 == 0) {
      SumVectors<Vector>(leaf.row_bytes / sizeof(Vector), out);
    } else {
      SumVectors<Storage>(leaf.row_bytes / sizeof(Storage), out);
    }
  }

 private:
  __device__ Acc Weight(int32_t slot) const {
    if (args_.row_weights == nullptr) return 1;
    if (args_.weight_dtype == DType::kF64) {
      return static_cast<Acc>(reinterpret_cast<const double*>(args_.row_weights)[slot]);
    }
    return reinterpret_cast<const float*>(args_.row_weights)[slot];
  }

  __device__ void EndRank() {
    __syncwarp();
    if (count_ > 0 && threadIdx.x % 32 == 0) {
      terms_[count_ - 1].marked_row |= Term<Acc>::kEndsRank;
    }
    __syncwarp();
  }

  // Every lane sums its own vectors of the row, kVectors at a time, term by term; the vectors of the
  // next term are on their way while one is added.
  template <typename Vector>
  __device__ void SumVectors(int64_t count, std::byte* out) const {
    constexpr int kElements = sizeof(Vector) / sizeof(Storage);
    for (int64_t base = threadIdx.x % 32; base < count; base += 32 * kVectors) {
      Acc total[kVectors][kElements] = {};
      Acc partial[kVectors][kElements] = {};
      auto load = [&](int32_t t, Vector (&to)[kVectors]) {
        if (t >= count_) return;
        const auto* row = reinterpret_cast<const Vector*>(terms_[t].row()) + base;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (base + v * 32 < count) to[v] = Load(row + v * 32);
        }
      };
      auto add = [&](int32_t t, const Vector (&from)[kVectors]) {
        if (t >= count_) return;
        const Acc weight = terms_[t].weight;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          Storage elements[kElements];
          memcpy(elements, &from[v], sizeof(Vector));
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            // With weight 1 this is the plain sum: the product is exact.
            if constexpr (std::is_same_v<Acc, float>) {
              partial[v][e] = __fmaf_rn(weight, T::Load(elements[e]), partial[v][e]);
            } else {
              partial[v][e] = __fma_rn(weight, T::Load(elements[e]), partial[v][e]);
            }
          }
        }
        if (!terms_[t].ends_rank()) return;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            total[v][e] += T::Load(T::Round(partial[v][e]));
            partial[v][e] = 0;
          }
        }
      };
      // Two sets of registers, each with its own load instructions: waiting for one set is not
      // waiting for the other.
      Vector even[kVectors];
      Vector odd[kVectors];
      load(0, even);
      for (int32_t t = 0; t < count_; t += 2) {
        load(t + 1, odd);
        add(t, even);
        load(t + 2, even);
        add(t + 1, odd);
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        Storage elements[kElements];
#pragma unroll
        for (int e = 0; e < kElements; ++e) elements[e] = T::Round(total[v][e]);
        Vector result;
        memcpy(&result, elements, sizeof(Vector));
        if (base + v * 32 < count) Store(reinterpret_cast<Vector*>(out) + base + v * 32, result);
      }
    }
  }

  const MoveArgs& args_;
  Term<Acc>* const terms_;
  int32_t count_ = 0;
};

// Slots of a token's pairs on this rank, from the receiver's table.
__device__ void RecvSlots(const MoveArgs& args, int32_t source, int32_t token,
                          int32_t (&slots)[2]) {
  const Shape& shape = args.common.shape;
  const int64_t first = (int64_t{source} * shape.max_tokens_per_rank + token) * shape.num_topk;
  for (int half = 0; half < 2; ++half) {
    const int32_t k = half * 32 + threadIdx.x % 32;
    slots[half] = k < shape.num_topk ? args.recv_slots[first + k] : kNoSlot;
  }
}

// Where rank `from` puts its partial sum for token `token` of rank `to`.
__device__ std::byte* StagedRow(const MoveArgs& args, int32_t to, int32_t from, int32_t token) {
  const Workspace& workspace = args.common.workspace;
  const int64_t row = int64_t{from} * args.common.shape.max_tokens_per_rank + token;
  return workspace.base[to] + workspace.layout.staging_offset() + row * args.staging_row_bytes;
}

__device__ const std::byte* LocalValue(const MoveArgs& args, int32_t slot, int32_t k) {
  const bool by_token = args.common.shape.layout == Layout::kRank;
  const int64_t index = by_token ? int64_t{slot} * args.common.shape.num_topk + k : slot;
  return args.values.rows + index * args.values.bytes;
}

// Sums this rank's rows for token `token` of rank `source` and puts them there.
template <typename T>
__device__ void PushToken(const MoveArgs& args, Term<typename T::Acc>* storage, int32_t source, int32_t token) {
  int32_t slots[2];
  RecvSlots(args, source, token, slots);
  if (!__any_sync(~0u, slots[0] != kNoSlot || slots[1] != kNoSlot)) return;
  std::byte* const staged = StagedRow(args, source, args.common.workspace.rank, token);
  const bool once = args.common.shape.layout == Layout::kRank;
  Terms<T> terms(args, storage);
  for (int32_t i = 0; i < args.num_leaves; ++i) {
    const Leaf& leaf = args.leaves[i];
    terms.Clear();
    terms.AddLocal(leaf, slots, once);
    terms.Sum(leaf, staged + leaf.staging_offset);
  }
  if (args.values.rows == nullptr) return;
  for (int half = 0; half < 2; ++half) {
    if (slots[half] == kNoSlot) continue;
    const int32_t k = half * 32 + threadIdx.x % 32;
    CopyValue(staged + args.values.staging_offset + k * args.values.bytes,
              LocalValue(args, slots[half], k), args.values.bytes);
  }
}

template <typename T>
__device__ void Push(const MoveArgs& args, Operation& operation, Term<typename T::Acc>* storage, int warp) {
  const Workspace& workspace = args.common.workspace;
  const int32_t num_ranks = operation.num_ranks();
  const int32_t max_tokens = args.common.shape.max_tokens_per_rank;
  int32_t count = 0;
  for (int32_t first = blockIdx.x * kTile; first < max_tokens; first += gridDim.x * kTile) {
    for (int32_t turn = 1; turn < num_ranks; ++turn) {
      const int32_t source = (workspace.rank + turn) % num_ranks;
      for (int32_t token = first + warp; token < min(first + kTile, max_tokens);
           token += kPushWarps) {
        PushToken<T>(args, storage, source, token);
      }
    }
    ++count;
    ptx::NamedBarrier(kPushBarrier, kPushThreads);
    for (int32_t peer = threadIdx.x; peer < num_ranks; peer += kPushThreads) {
      if (peer != workspace.rank) operation.Ready(peer, count);
    }
  }
}

// Adds up the partial sums of one of this rank's own tokens.
template <typename T>
__device__ void ReduceToken(const MoveArgs& args, Operation& operation, Term<typename T::Acc>* storage,
                            int32_t token) {
  const Workspace& workspace = args.common.workspace;
  const Shape& shape = args.common.shape;
  const int32_t lane = threadIdx.x % 32;

  // The rank of each pair that has a row, and this rank's own slots.
  int32_t ranks[2];
  int32_t slots[2];
  for (int half = 0; half < 2; ++half) {
    const int32_t k = half * 32 + lane;
    const int64_t pair = int64_t{token} * shape.num_topk + k;
    const bool has_row = k < shape.num_topk && args.slots[pair] != kNoSlot;
    ranks[half] = has_row ? shape.rank_of_expert(args.topk_idx[pair]) : shape.num_ranks;
    slots[half] = ranks[half] == workspace.rank ? args.slots[pair] : kNoSlot;
  }
  // Visits the ranks that hold rows of this token, in order.
  auto next_rank = [&](int32_t after) {
    uint32_t least = shape.num_ranks;
    for (int half = 0; half < 2; ++half) {
      if (ranks[half] > after) least = min(least, static_cast<uint32_t>(ranks[half]));
    }
    return static_cast<int32_t>(__reduce_min_sync(~0u, least));
  };

  const int32_t tile = token / kTile;
  bool good = true;
  for (int32_t rank = next_rank(-1); rank < shape.num_ranks; rank = next_rank(rank)) {
    if (rank != workspace.rank && lane == 0) {
      good &= operation.WaitReady(rank, tile % gridDim.x, tile / gridDim.x + 1);
    }
  }
  good = __shfl_sync(~0u, good && !operation.Failed(), 0);
  __syncwarp();

  Terms<T> terms(args, storage);
  for (int32_t i = 0; i < args.num_leaves; ++i) {
    const Leaf& leaf = args.leaves[i];
    std::byte* const out = leaf.tokens + token * leaf.row_bytes;
    if (!good) {
      FillRow(out, leaf.row_bytes, 0xff);
      continue;
    }
    terms.Clear();
    for (int32_t rank = next_rank(-1); rank < shape.num_ranks; rank = next_rank(rank)) {
      if (rank == workspace.rank) {
        terms.AddLocal(leaf, slots, shape.layout == Layout::kRank);
      } else {
        terms.AddPartial(StagedRow(args, workspace.rank, rank, token) + leaf.staging_offset);
      }
    }
    terms.Sum(leaf, out);
  }
  if (args.values.tokens == nullptr) return;
  for (int half = 0; half < 2; ++half) {
    const int32_t k = half * 32 + lane;
    if (k >= shape.num_topk) continue;
    const int32_t bytes = args.values.bytes;
    std::byte* const to = args.values.tokens + (int64_t{token} * shape.num_topk + k) * bytes;
    if (ranks[half] == shape.num_ranks || !good) {
      for (int32_t i = 0; i < bytes; ++i) to[i] = static_cast<std::byte>(good ? 0 : 0xff);
    } else if (slots[half] != kNoSlot) {
      CopyValue(to, LocalValue(args, slots[half], k), bytes);
    } else {
      CopyValue(to,
                StagedRow(args, workspace.rank, ranks[half], token) + args.values.staging_offset +
                    k * bytes,
                bytes);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) CombineKernel(const __grid_constant__ MoveArgs args) {
  extern __shared__ __align__(16) std::byte shared[];
  const Workspace& workspace = args.common.workspace;
  const uint32_t site = static_cast<uint32_t>(args.staging_row_bytes / 16) * 8 +
                        static_cast<uint32_t>(args.num_leaves);
  Operation operation(workspace, Op::kCombine, site, args.common.position);
  operation.Enter();

  const int warp = threadIdx.x / 32;
  auto* const storage = reinterpret_cast<Term<typename T::Acc>*>(shared) + warp * kMaxTerms;
  if (warp < kPushWarps) {
    Push<T>(args, operation, storage, warp);
  } else {
    for (int32_t token = static_cast<int32_t>(blockIdx.x) * kReduceWarps + warp - kPushWarps;
         token < args.common.num_tokens; token += gridDim.x * kReduceWarps) {
      ReduceToken<T>(args, operation, storage, token);
    }
  }
  operation.Leave();
}

using Kernel = void (*)(MoveArgs);

Kernel Choose(DType dtype) {
  switch (dtype) {
    case DType::kF32: return CombineKernel<F32>;
    case DType::kF64: return CombineKernel<F64>;
    case DType::kBF16: return CombineKernel<BF16>;
    case DType::kF16: return CombineKernel<F16>;
    case DType::kF8E4M3FN: return CombineKernel<F8E4M3FN>;
    case DType::kF8E5M2: return CombineKernel<F8E5M2>;
  }
  return nullptr;
}

}  // namespace

Status Combine(cudaStream_t stream, const MoveArgs& args) {
  constexpr int64_t kSharedBytes =
      static_cast<int64_t>(sizeof(Term<double>)) * kMaxTerms * (kPushWarps + kReduceWarps);
  return Launch(Choose(args.dtype), args.common.workspace.num_sms, kThreads, kSharedBytes, stream,
                args);
}

Status LoadCombine() {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16, DType::kF8E4M3FN,
                            DType::kF8E5M2}) {
    if (Status status = Load(Choose(dtype)); !status.ok()) return status;
  }
  return Status();
}

}  // namespace jax_ep::cuda
