#include <algorithm>

#include "csrc/core/dtype.h"
#include "csrc/core/slots.h"
#include "csrc/cuda/copy.cuh"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/pairs.cuh"
#include "csrc/cuda/payload.cuh"
#include "csrc/cuda/publisher.cuh"
#include "csrc/cuda/row_ring.cuh"
#include "csrc/cuda/signal.cuh"
#include "csrc/cuda/sum.cuh"
#include "csrc/cuda/vector.cuh"

// Every rank sums its rows for each token of the other ranks and pushes the partial sum into the
// token's rank: one row a (token, rank) over the link. That rank adds up the partial sums, its own
// among them, in rank order. Some blocks push first; all reduce, token by token behind the
// pushers of the other ranks.
namespace jax_ep::cuda {
namespace {

constexpr int kMaxWarps = 16;
// More blocks would push faster than the link takes it, and could reduce meanwhile.
constexpr int kMaxPushBlocks = 24;
constexpr int kPushQueue = 0;
constexpr int kReduceQueue = 1;
// A batch takes some hundred instructions besides those of its sums, so that two large ones are
// better than three small ones. 16 warps have no room for larger ones.
using SumBulkRing = BulkRing<3, 2>;
using SumVectorRing = VectorRing<3, 2>;

// A row that enters a sum. The bits at the top of the address, which are otherwise zero, are marks.
template <typename Acc>
struct alignas(16) Term {
  uint64_t marked_row;
  Acc weight;

  static constexpr uint64_t kEndsRank = uint64_t{1} << 63;  // the last one of its rank
  static constexpr uint64_t kWhole = uint64_t{1} << 62;     // the only one, and rounded already
  static constexpr uint64_t kPlain = uint64_t{1} << 61;     // the same, of weight 1: no other mark
  __device__ const std::byte* row() const {
    return reinterpret_cast<const std::byte*>(marked_row & ~(kEndsRank | kWhole | kPlain));
  }
  __device__ bool ends_rank() const { return (marked_row & kEndsRank) != 0; }
  __device__ bool whole() const { return (marked_row & kWhole) != 0; }
  __device__ bool plain() const { return (marked_row & kPlain) != 0; }
};

// The sums of one warp, of rows of dtype T.
template <typename T, typename Ring>
class Sums {
 public:
  using Acc = typename T::Acc;
  using Storage = typename T::Storage;

  __device__ Sums(const MoveArgs& args, std::byte* ring, Term<Acc>* terms)
      : args_(args), ring_(ring), terms_(terms) {}

  __device__ void Clear() {
    __syncwarp();
    count_ = 0;
  }

  // Adds this rank's rows for a token whose pairs have these slots here, with their weights. In
  // layout rank they share one row, which enters once.
  __device__ void AddLocal(const Leaf& leaf, const Pairs& slots) {
    const int32_t lane = threadIdx.x % 32;
    const bool once = args_.common.shape.layout == Layout::kRank;
    uint64_t marks = 0;
    if (once) {
      marks = args_.row_weights == nullptr ? Term<Acc>::kPlain
                                           : Term<Acc>::kWhole | Term<Acc>::kEndsRank;
    }
    const int32_t before = count_;
    for (int half = 0; half < 2; ++half) {
      uint32_t mine = __ballot_sync(~0u, slots[half] != kNoSlot);
      if (once && mine != 0) mine = count_ == before ? mine & -mine : 0;
      if (mine >> lane & 1) {
        terms_[count_ + __popc(mine & ((1u << lane) - 1))] = {
            reinterpret_cast<uint64_t>(leaf.rows + slots[half] * leaf.row_bytes) | marks,
            RowWeight<Acc>(args_, slots[half])};
      }
      count_ += __popc(mine);
    }
    __syncwarp();
    if (!once && count_ > before && lane == 0) {
      terms_[count_ - 1].marked_row |= Term<Acc>::kEndsRank;
    }
    __syncwarp();
  }

  __device__ void AddPartial(const std::byte* row) {
    if (threadIdx.x % 32 == 0) {
      terms_[count_] = {reinterpret_cast<uint64_t>(row) | Term<Acc>::kPlain, 1};
    }
    ++count_;
    __syncwarp();
  }

  // Writes the sum to `out`. With kPartial all rows are of one rank.
  template <bool kPartial>
  __device__ void Sum(const Leaf& leaf, std::byte* out) {
    if ((reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(leaf.rows) |
         static_cast<uintptr_t>(leaf.row_bytes)) % 16 == 0) {
      SumPieces<kPartial>(static_cast<int32_t>(leaf.row_bytes), out);
    } else {
      SumElements(leaf.row_bytes / static_cast<int64_t>(sizeof(Storage)), out);
    }
  }

 private:
  // Of a row, at a time: as much as a lane can hold the sums of in registers. A vector of 8-bit
  // floats is 16 of them, and takes more registers to unpack.
  static constexpr int32_t kPieceBytes =
      sizeof(Storage) == 1 ? 512
                           : std::min<int32_t>(Ring::kPieceBytes,
                                               1024 * static_cast<int32_t>(sizeof(Storage)));
  static constexpr int kVectors = kPieceBytes / (32 * 16);  // of a lane
  static constexpr int kElements = kVectorElements<T>;

  // A row's pieces, of all terms in turn, then the next piece of all.
  template <bool kPartial>
  __device__ void SumPieces(int32_t row_bytes, std::byte* out) {
    if (count_ == 0) return FillRow(out, row_bytes, 0);
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    // What this lane loads next.
    int32_t load_term = lane % count_;
    int32_t load_offset = lane / count_ * kPieceBytes;
    int32_t unloaded = (row_bytes + kPieceBytes - 1) / kPieceBytes * count_;  // pieces
    auto load_next = [&] {
      if (unloaded <= 0) return ring_.LoadNothing();
      ring_.Load(terms_[load_term].row() + load_offset,
                 max(0, min(kPieceBytes, row_bytes - load_offset)));
      unloaded -= Ring::kBatch;
      for (load_term += Ring::kBatch; load_term >= count_; load_term -= count_) {
        load_offset += kPieceBytes;
      }
    };
    for (int i = 0; i < Ring::kLoadsAhead; ++i) load_next();

    // Vectors past the end of the row are summed too, whatever they are, but not stored.
    Acc total[kVectors][kElements] = {};
    Acc partial[kVectors][kElements] = {};
    int32_t offset = 0;
    int32_t t = 0;
    while (offset < row_bytes) {
      load_next();
      const auto* piece = reinterpret_cast<const uint4*>(ring_.Front()) + lane;
      for (int i = 0; i < Ring::kBatch && offset < row_bytes; ++i) {
        const Term<Acc> term = terms_[t];
        const bool plain = !kPartial && term.plain();
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          Acc x[kElements];
          Unpack<T>(piece[v * 32], x);
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            if (plain) {
              total[v][e] += x[e];
            } else {
              partial[v][e] = MultiplyAdd(term.weight, x[e], partial[v][e]);
            }
          }
        }
        piece += Ring::kPieceBytes / 16;
        ++t;
        if (!kPartial && term.ends_rank()) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (!term.whole()) Unpack<T>(Pack<T>(partial[v]), partial[v]);
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
              total[v][e] += partial[v][e];
              partial[v][e] = 0;
            }
          }
        }
        if (t < count_) continue;
        t = 0;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int32_t place = offset + (v * 32 + lane) * 16;
          auto& sum = kPartial ? partial[v] : total[v];
          if (place < row_bytes) Store(reinterpret_cast<uint4*>(out + place), Pack<T>(sum));
#pragma unroll
          for (int e = 0; e < kElements; ++e) sum[e] = 0;
        }
        offset += kPieceBytes;
      }
      ring_.Pop();
    }
  }

  // Rows of any alignment, an element a lane.
  __device__ void SumElements(int64_t num_elements, std::byte* out) const {
    for (int64_t i = threadIdx.x % 32; i < num_elements; i += 32) {
      Acc total = 0;
      Acc partial = 0;
      for (int32_t t = 0; t < count_; ++t) {
        const Term<Acc> term = terms_[t];
        const Acc x = T::Load(Load(reinterpret_cast<const Storage*>(term.row()) + i));
        if (term.plain()) {
          total += x;
          continue;
        }
        partial = MultiplyAdd(term.weight, x, partial);
        if (!term.ends_rank()) continue;
        total += term.whole() ? partial : T::Load(T::Round(partial));
        partial = 0;
      }
      Store(reinterpret_cast<Storage*>(out) + i, T::Round(total));
    }
  }

  const MoveArgs& args_;
  Ring ring_;
  Term<Acc>* const terms_;  // of the token and leaf being summed
  int32_t count_ = 0;
};

__device__ const std::byte* LocalValue(const MoveArgs& args, int32_t slot, int32_t k) {
  const bool by_token = args.common.shape.layout == Layout::kRank;
  const int64_t index = by_token ? int64_t{slot} * args.common.shape.num_topk + k : slot;
  return args.values.rows + index * args.values.bytes;
}

// Sums this rank's rows for token `token` of rank `source` and puts the sum there; false if it has
// none.
template <typename Sums>
__device__ bool PushToken(const MoveArgs& args, Sums& sums, int32_t source, int32_t token) {
  const Pairs slots = ReceivedSlots(args, source, token);
  if (!__any_sync(~0u, slots[0] != kNoSlot || slots[1] != kNoSlot)) return false;
  std::byte* const staged = StagedRow(args, source, args.common.workspace.rank, token);
  for (int32_t i = 0; i < args.num_leaves; ++i) {
    const Leaf& leaf = args.leaves[i];
    sums.Clear();
    sums.AddLocal(leaf, slots);
    sums.template Sum<true>(leaf, staged + leaf.staging_offset);
  }
  for (int half = 0; half < 2; ++half) {
    if (args.values.rows == nullptr || slots[half] == kNoSlot) continue;
    const int32_t k = half * 32 + threadIdx.x % 32;
    CopyValue(staged + args.values.staging_offset + k * args.values.bytes,
              LocalValue(args, slots[half], k), args.values.bytes);
  }
  return true;
}

// Adds up the partial sums of one of this rank's own tokens.
template <typename Sums>
__device__ void ReduceToken(const MoveArgs& args, Operation& operation, Sums& sums,
                            int32_t token) {
  const Workspace& workspace = args.common.workspace;
  const Shape& shape = args.common.shape;
  const int32_t lane = threadIdx.x % 32;

  const SentRows rows = RowsOfToken(args, token);
  const Pairs& ranks = rows.ranks;
  Pairs slots;  // of this rank's own rows
  bool good = true;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool own = ranks[half] == workspace.rank;
    slots[half] = own ? rows.slots[half] : kNoSlot;
    if (!own && ranks[half] != shape.num_ranks) good &= operation.WaitReady(ranks[half], token);
  }
  good = __all_sync(~0u, good);
  ptx::FenceProxyAsyncGlobal();
  __syncwarp();

  const auto next_rank = [&](int32_t after) { return NextRank(ranks, after, shape.num_ranks); };
  for (int32_t i = 0; i < args.num_leaves; ++i) {
    const Leaf& leaf = args.leaves[i];
    std::byte* const out = leaf.tokens + token * leaf.row_bytes;
    if (!good) {
      FillRow(out, leaf.row_bytes, kPoison);
      continue;
    }
    sums.Clear();
    for (int32_t rank = next_rank(-1); rank < shape.num_ranks; rank = next_rank(rank)) {
      if (rank == workspace.rank) {
        sums.AddLocal(leaf, slots);
      } else {
        sums.AddPartial(StagedRow(args, workspace.rank, rank, token) + leaf.staging_offset);
      }
    }
    sums.template Sum<false>(leaf, out);
  }

  for (int half = 0; half < 2; ++half) {
    const int32_t k = half * 32 + lane;
    if (args.values.tokens == nullptr || k >= shape.num_topk) continue;
    const int32_t bytes = args.values.bytes;
    std::byte* const to = args.values.tokens + (int64_t{token} * shape.num_topk + k) * bytes;
    if (!good) {
      StoreValue(to, ~uint64_t{0}, bytes);
    } else if (ranks[half] == shape.num_ranks) {
      StoreValue(to, 0, bytes);
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

template <typename T, typename Ring>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    CombineKernel(const __grid_constant__ MoveArgs args) {
  extern __shared__ __align__(128) std::byte shared[];
  using Acc = typename T::Acc;
  const Workspace& workspace = args.common.workspace;
  const Shape& shape = args.common.shape;
  Operation operation(args.common, Op::kCombine, PayloadSite(args));
  if (!operation.Enter()) return PoisonTokens(args);

  const int32_t warp = threadIdx.x / 32;
  const int32_t num_warps = blockDim.x / 32;
  auto* const terms = reinterpret_cast<Term<Acc>*>(shared + num_warps * Ring::kSharedBytes);
  Sums<T, Ring> sums(args, shared + warp * Ring::kSharedBytes,
                     terms + warp * (shape.num_topk + shape.num_ranks));

  // A push task is a partial sum: of each token of the other ranks, the ranks in turn.
  const int32_t peers = shape.num_ranks - 1;
  auto token_of = [&](int32_t task) { return task / peers; };
  auto source_of = [&](int32_t task) {
    return (workspace.rank + 1 + task % peers) % shape.num_ranks;
  };
  __shared__ Publisher::Shared shared_publisher;
  Publisher publisher(&shared_publisher, num_warps - 1);
  if (warp == num_warps - 1) {
    publisher.Run([&](int32_t task) { operation.Ready(source_of(task), token_of(task)); });
  } else {
    if (blockIdx.x < args.stagers.blocks) {
      Tasks tasks(operation, kPushQueue, int64_t{peers} * shape.max_tokens_per_rank);
      for (int32_t task; tasks.Take(&task);) {
        if (PushToken(args, sums, source_of(task), token_of(task))) publisher.Finished(task);
      }
    }
    publisher.End();
  }
  Tasks tasks(operation, kReduceQueue, args.common.num_tokens);
  for (int32_t token; tasks.Take(&token);) ReduceToken(args, operation, sums, token);
  operation.Leave();
}

template <typename Ring>
auto Choose(DType dtype) -> void (*)(MoveArgs) {
  switch (dtype) {
    case DType::kF32: return CombineKernel<F32, Ring>;
    case DType::kF64: return CombineKernel<F64, Ring>;
    case DType::kBF16: return CombineKernel<BF16, Ring>;
    case DType::kF16: return CombineKernel<F16, Ring>;
    case DType::kF8E4M3FN: return CombineKernel<F8E4M3FN, Ring>;
    case DType::kF8E5M2: return CombineKernel<F8E5M2, Ring>;
  }
  return nullptr;
}

template <typename Ring>
Status LaunchWith(cudaStream_t stream, MoveArgs args) {
  const auto kernel = Choose<Ring>(args.dtype);
  const int64_t warp_bytes =
      Ring::kSharedBytes +
      static_cast<int64_t>(sizeof(Term<double>)) *
          (args.common.shape.num_topk + args.common.shape.num_ranks);
  const int64_t num_warps = std::min<int64_t>(kMaxWarps, MaxSharedBytes(kernel) / warp_bytes);
  args.stagers.blocks = std::clamp(args.common.workspace.num_sms / 2, 1, kMaxPushBlocks);
  return Launch(kernel, args.common.workspace.num_sms, static_cast<int>(num_warps) * 32,
                num_warps * warp_bytes, stream, args);
}

}  // namespace

Status Combine(cudaStream_t stream, const MoveArgs& args) {
  if (Status status = CheckStaging(args); !status.ok()) return status;
  return HasBulkCopies() ? LaunchWith<SumBulkRing>(stream, args)
                         : LaunchWith<SumVectorRing>(stream, args);
}

Status LoadCombine() {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16, DType::kF8E4M3FN,
                            DType::kF8E5M2}) {
    const auto kernel = HasBulkCopies() ? Choose<SumBulkRing>(dtype) : Choose<SumVectorRing>(dtype);
    if (Status status = Load(kernel); !status.ok()) return status;
  }
  return Status();
}

}  // namespace jax_ep::cuda
