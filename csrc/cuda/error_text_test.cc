#include "csrc/cuda/error_text.h"

#include "csrc/testing/check.h"

namespace jax_ep::cuda {
namespace {

ErrorRecord Record(Op op, Phase phase, uint64_t expected, uint64_t seen) {
  ErrorRecord record;
  record.op = static_cast<int32_t>(op);
  record.phase = static_cast<int32_t>(phase);
  record.rank = 2;
  record.peer = 5;
  record.expected = expected;
  record.seen = seen;
  return record;
}

bool Says(const ErrorRecord& record, const std::string& part) {
  const std::string text = ErrorText(record, "expert", 1.5);
  const bool found = text.find(part) != std::string::npos;
  if (!found) std::cerr << text << "\n";
  return found && text.find("on axis expert: ") != std::string::npos &&
         text.find("the Group must be closed") != std::string::npos;
}

uint64_t Word(uint64_t epoch, Op op, uint64_t site) {
  return epoch << 32 | static_cast<uint64_t>(op) << 28 | site;
}

void TestTexts() {
  CHECK(Says(Record(Op::kDispatch, Phase::kEnter, 6, Word(4, Op::kCombine, 0)),
             "dispatch on axis expert: rank 2 waited 1.5 s in vain for rank 5 to leave the "
             "operation before (it has left operation 4, and this one is 7)"));
  CHECK(Says(Record(Op::kCombine, Phase::kReady, Word(7, Op::kCombine, 3),
                    Word(6, Op::kDispatch, 1)),
             "for rank 5's data (expected operation 7; last seen dispatch as operation 6)"));
  CHECK(Says(Record(Op::kCombine, Phase::kReady, Word(1, Op::kCombine, 3), 0),
             "last seen no operation as operation 0"));
  CHECK(Says(Record(Op::kDispatch, Phase::kBarrier, 64, 40), "expected 64 arrivals, seen 40"));
  CHECK(Says(Record(Op::kDispatch, Phase::kMismatch, 0x20000001, 0x30000001),
             "rank 2 runs dispatch while rank 5 runs combine"));
  CHECK(Says(Record(Op::kDispatch, Phase::kMismatch, 0x20000001, 0x20000002),
             "rank 2 runs dispatch while rank 5 runs another dispatch"));
  CHECK(Says(Record(Op::kPrepare, Phase::kPosition, 2, 3), "takes rank 2's device for rank 3"));
  CHECK(Says(Record(Op::kPrepare, Phase::kInput, 8, static_cast<uint64_t>(-2)),
             "prepare on axis expert: rank 2 has a topk_idx of -2, outside [-1, 8)"));
  CHECK(Says(Record(Op::kCombine, Phase::kPeerFailed, 0, 0),
             "rank 2 stopped because rank 5 had failed"));
  CHECK(Says(Record(Op::kLowLatencyCombineDone, Phase::kTicket, 5, 3),
             "combine_done on axis expert: rank 2 was given what no start in flight has returned "
             "(of operation 3)"));
  CHECK(Says(Record(Op::kLowLatencyDispatchDone, Phase::kReady,
                    Word(7, Op::kLowLatencyDispatchStart, 3), Word(5, Op::kLowLatencyDispatch, 3)),
             "dispatch_done on axis expert: rank 2 waited 1.5 s in vain for rank 5's data "
             "(expected operation 7; last seen prepare_and_dispatch as operation 5)"));
  CHECK(Says(Record(Op::kPrepare, static_cast<Phase>(77), 8, 9),
             "failed in phase 77 at rank 5 (expected 8, seen 9)"));
}

}  // namespace
}  // namespace jax_ep::cuda

int main() {
  jax_ep::cuda::TestTexts();
  return 0;
}
