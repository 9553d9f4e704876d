#include "csrc/core/slots.h"

#include "csrc/testing/check.h"

namespace jax_ep {
namespace {

Shape MakeShape(Layout layout, int64_t capacity) {
  Shape shape;
  shape.num_ranks = 3;
  shape.num_experts = 12;
  shape.num_topk = 5;
  shape.max_tokens_per_rank = 7;
  shape.layout = layout;
  shape.capacity = capacity;
  shape.expert_alignment = 8;
  return shape;
}

void ExpertsAreSpreadInBlocks() {
  const Shape shape = MakeShape(Layout::kExpert, 10);
  CHECK_EQ(shape.num_local_experts(), 4);
  CHECK_EQ(shape.rank_of_expert(3), 0);
  CHECK_EQ(shape.rank_of_expert(4), 1);
  CHECK_EQ(shape.rank_of_expert(11), 2);
}

void OnlyLayoutExpertAligns() {
  CHECK_EQ(ExpertRows(MakeShape(Layout::kExpert, 10), 0), 0);
  CHECK_EQ(ExpertRows(MakeShape(Layout::kExpert, 10), 8), 8);
  CHECK_EQ(ExpertRows(MakeShape(Layout::kExpert, 10), 9), 16);
  CHECK_EQ(ExpertRows(MakeShape(Layout::kPadded, 10), 9), 9);
}

void SizesAreClippedAtCapacity() {
  CHECK_EQ(ClippedSize(0, 8, 20), 8);
  CHECK_EQ(ClippedSize(16, 8, 20), 4);
  CHECK_EQ(ClippedSize(24, 8, 20), 0);
  CHECK_EQ(ClippedSize(0, 8, 0), 0);
}

void RowsAtOrPastCapacityAreDropped() {
  const Shape expert = MakeShape(Layout::kExpert, 20);
  CHECK_EQ(PairSlot(expert, 2, 16, 3), 19);
  CHECK_EQ(PairSlot(expert, 2, 16, 4), kNoSlot);
  const Shape padded = MakeShape(Layout::kPadded, 20);
  CHECK_EQ(PairSlot(padded, 2, 0, 19), 59);
  CHECK_EQ(PairSlot(padded, 2, 0, 20), kNoSlot);
  CHECK_EQ(PairSlot(MakeShape(Layout::kPadded, 0), 0, 0, 0), kNoSlot);
}

void SourcesDecodeToWhatWasEncoded() {
  for (const Layout layout : {Layout::kExpert, Layout::kRank, Layout::kPadded}) {
    const Shape shape = MakeShape(layout, 10);
    for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
      for (int32_t token = 0; token < shape.max_tokens_per_rank; ++token) {
        for (int32_t k = 0; k < (layout == Layout::kRank ? 1 : shape.num_topk); ++k) {
          const Source source = DecodeSource(shape, EncodeSource(shape, {rank, token, k}));
          CHECK_EQ(source.rank, rank);
          CHECK_EQ(source.token, token);
          CHECK_EQ(source.k, k);
        }
      }
    }
  }
}

void OffsetsBeyond32BitsAreClipped() {
  CHECK_EQ(ClippedSize(int64_t{1} << 33, int64_t{1} << 33, 1 << 30), 0);
  CHECK_EQ(PairSlot(MakeShape(Layout::kExpert, 1 << 30), 0, int64_t{1} << 33, 5), kNoSlot);
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::ExpertsAreSpreadInBlocks();
  jax_ep::OnlyLayoutExpertAligns();
  jax_ep::SizesAreClippedAtCapacity();
  jax_ep::RowsAtOrPastCapacityAreDropped();
  jax_ep::SourcesDecodeToWhatWasEncoded();
  jax_ep::OffsetsBeyond32BitsAreClipped();
}
