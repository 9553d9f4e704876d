#include "csrc/cpu/prepare.h"

#include <algorithm>
#include <string>

#include "csrc/core/slots.h"

namespace jax_ep::cpu {
namespace {

Status CountPairs(const Shape& shape, const std::vector<PrepareArgs>& ranks,
                  std::vector<int64_t>& counts) {
  for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
    const PrepareArgs& args = ranks[rank];
    for (int64_t pair = 0; pair < args.num_tokens * shape.num_topk; ++pair) {
      const int32_t expert = args.topk_idx[pair];
      if (expert < -1 || expert >= shape.num_experts) {
        return Status::Error("topk_idx[" + std::to_string(pair / shape.num_topk) + ", " +
                             std::to_string(pair % shape.num_topk) + "] of rank " +
                             std::to_string(rank) + " is " + std::to_string(expert) +
                             ", which is outside [-1, " + std::to_string(shape.num_experts) + ")");
      }
      if (expert >= 0) ++counts[expert];
    }
  }
  return Status();
}

// The receiver's entry for a pair: recv_slots[source rank, token, k].
int32_t& RecvSlot(const Shape& shape, const PrepareArgs& target, const Source& source) {
  const int64_t token = int64_t{source.rank} * shape.max_tokens_per_rank + source.token;
  return target.recv_slots[token * shape.num_topk + source.k];
}

// Layouts expert and padded: every pair gets the next position of its expert.
void PlacePairs(const Shape& shape, const std::vector<PrepareArgs>& ranks,
                const std::vector<int64_t>& offsets) {
  std::vector<int64_t> next(shape.num_experts, 0);
  for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
    const PrepareArgs& args = ranks[rank];
    for (int32_t token = 0; token < args.num_tokens; ++token) {
      for (int32_t k = 0; k < shape.num_topk; ++k) {
        const int64_t pair = int64_t{token} * shape.num_topk + k;
        const int32_t expert = args.topk_idx[pair];
        args.slots[pair] = kNoSlot;
        if (expert < 0) continue;
        const PrepareArgs& target = ranks[shape.rank_of_expert(expert)];
        const int32_t slot = PairSlot(shape, expert % shape.num_local_experts(), offsets[expert],
                                      next[expert]++);
        args.slots[pair] = slot;
        if (slot == kNoSlot) {
          ++*target.num_dropped;
        } else {
          target.row_source[slot] = EncodeSource(shape, {rank, token, k});
          RecvSlot(shape, target, {rank, token, k}) = slot;
        }
      }
    }
  }
}

// Layout rank: the first pair of a token on a rank takes that rank's next row,
// and the token's other pairs there share it. `group_sizes` counts kept pairs.
void PlaceTokens(const Shape& shape, const std::vector<PrepareArgs>& ranks) {
  std::vector<int64_t> next(shape.num_ranks, 0);
  std::vector<int64_t> row_of_rank(shape.num_ranks);
  for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
    const PrepareArgs& args = ranks[rank];
    for (int32_t token = 0; token < args.num_tokens; ++token) {
      std::fill(row_of_rank.begin(), row_of_rank.end(), -1);
      for (int32_t k = 0; k < shape.num_topk; ++k) {
        const int64_t pair = int64_t{token} * shape.num_topk + k;
        const int32_t expert = args.topk_idx[pair];
        args.slots[pair] = kNoSlot;
        if (expert < 0) continue;
        const int32_t target_rank = shape.rank_of_expert(expert);
        const PrepareArgs& target = ranks[target_rank];
        int64_t& row = row_of_rank[target_rank];
        if (row < 0) row = next[target_rank]++;
        if (row >= shape.capacity) {
          ++*target.num_dropped;
          continue;
        }
        const int32_t local_expert = expert % shape.num_local_experts();
        args.slots[pair] = static_cast<int32_t>(row);
        target.row_source[row] = EncodeSource(shape, {rank, token, 0});
        target.row_topk_idx[row * shape.num_topk + k] = local_expert;
        RecvSlot(shape, target, {rank, token, k}) = args.slots[pair];
        ++target.group_sizes[local_expert];
      }
    }
  }
  for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
    *ranks[rank].num_rows = static_cast<int32_t>(std::min(next[rank], shape.capacity));
  }
}

}  // namespace

Status Prepare(const Shape& shape, const std::vector<PrepareArgs>& ranks) {
  std::vector<int64_t> counts(shape.num_experts, 0);
  if (Status status = CountPairs(shape, ranks, counts); !status.ok()) return status;

  const int32_t num_local_experts = shape.num_local_experts();
  std::vector<int64_t> offsets(shape.num_experts, 0);
  for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
    const PrepareArgs& args = ranks[rank];
    std::fill_n(args.row_source, shape.num_rows(), -1);
    std::fill_n(args.recv_slots,
                int64_t{shape.num_ranks} * shape.max_tokens_per_rank * shape.num_topk, kNoSlot);
    *args.num_rows = 0;
    *args.num_dropped = 0;
    int64_t offset = 0;
    for (int32_t local = 0; local < num_local_experts; ++local) {
      const int32_t expert = rank * num_local_experts + local;
      args.expert_counts[local] = static_cast<int32_t>(counts[expert]);
      args.group_sizes[local] = 0;
      if (shape.layout == Layout::kRank) continue;
      const int64_t rows = ExpertRows(shape, counts[expert]);
      offsets[expert] = offset;
      args.group_sizes[local] = static_cast<int32_t>(ClippedSize(offset, rows, shape.capacity));
      *args.num_rows += args.group_sizes[local];
      if (shape.layout == Layout::kExpert) offset += rows;
    }
  }

  if (shape.layout == Layout::kRank) {
    for (const PrepareArgs& args : ranks) {
      std::fill_n(args.row_topk_idx, shape.num_rows() * shape.num_topk, -1);
    }
    PlaceTokens(shape, ranks);
  } else {
    PlacePairs(shape, ranks, offsets);
  }
  return Status();
}

}  // namespace jax_ep::cpu
