#include "csrc/cuda/error_text.h"

#include <cstdint>
#include <cstdio>

namespace jax_ep::cuda {
namespace {

const char* OpName(int64_t op) {
  switch (static_cast<Op>(op)) {
    case Op::kPrepare: return "prepare";
    case Op::kDispatch: return "dispatch";
    case Op::kCombine: return "combine";
    case Op::kLowLatencyDispatch: return "prepare_and_dispatch";
    case Op::kLowLatencyDispatchStart: return "dispatch_start";
    case Op::kLowLatencyDispatchDone: return "dispatch_done";
    case Op::kLowLatencyCombine: return "low-latency combine";
    case Op::kLowLatencyCombineStart: return "combine_start";
    case Op::kLowLatencyCombineDone: return "combine_done";
  }
  return "no operation";
}

constexpr int kOpShift = 28;  // in a tag

// A word of signal.cuh: an operation's number, and a tag that says which operation it is.
struct Signal {
  explicit Signal(uint64_t word) : epoch(word >> 32), tag(word & 0xffffffff) {}
  std::string Op() const { return OpName(tag >> kOpShift); }

  uint64_t epoch;
  uint64_t tag;
};

std::string Number(uint64_t value) { return std::to_string(value); }

std::string Rank(int32_t rank) { return "rank " + std::to_string(rank); }

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", seconds);
  return text;
}

std::string Happened(const ErrorRecord& record, const std::string& waited) {
  const std::string rank = Rank(record.rank);
  const std::string peer = Rank(record.peer);
  switch (static_cast<Phase>(record.phase)) {
    case Phase::kEnter:
      return rank + waited + peer + " to leave the operation before (it has left operation " +
             Number(Signal(record.seen).epoch) + ", and this one is " +
             Number(record.expected + 1) + ")";
    case Phase::kReady: {
      const Signal expected(record.expected);
      const Signal seen(record.seen);
      return rank + waited + peer + "'s data (expected operation " + Number(expected.epoch) +
             "; last seen " + seen.Op() + " as operation " + Number(seen.epoch) + ")";
    }
    case Phase::kBarrier:
      return rank + waited + "its own thread blocks (expected " + Number(record.expected) +
             " arrivals, seen " + Number(record.seen) +
             "): the blocks of all ranks that share a GPU must fit on it together, see num_sms";
    case Phase::kMismatch: {
      const std::string mine = OpName(static_cast<int64_t>(record.expected) >> kOpShift);
      const std::string theirs = OpName(static_cast<int64_t>(record.seen) >> kOpShift);
      return rank + " runs " + mine + " while " + peer + " runs " +
             (mine == theirs ? "another " : "") + theirs + " (expected tag " +
             Number(record.expected) + ", seen " + Number(record.seen) +
             "): all ranks must run the same operations in the same order";
    }
    case Phase::kPosition:
      return "the program takes " + Rank(static_cast<int32_t>(record.expected)) +
             "'s device for " + Rank(static_cast<int32_t>(record.seen)) + " of subgroup " +
             Number(record.peer) + ": its mesh has the devices in another order than the Group's";
    case Phase::kInput:
      return rank + " has a topk_idx of " + std::to_string(static_cast<int64_t>(record.seen)) +
             ", outside [-1, " + Number(record.expected) + ")";
    case Phase::kPeerFailed:
      return rank + " stopped because " + peer + " had failed; its own error says why";
    case Phase::kTicket:
      return rank + " was given what no start in flight has returned (of operation " +
             Number(record.seen) + "): it is done already, or of another kind or run";
  }
  return rank + " failed in phase " + std::to_string(record.phase) + " at " + peer +
         " (expected " + Number(record.expected) + ", seen " + Number(record.seen) + ")";
}

}  // namespace

std::string ErrorText(const ErrorRecord& record, const std::string& axis, double timeout_s) {
  return "jax_ep " + std::string(OpName(record.op)) + " on axis " + axis + ": " +
         Happened(record, " waited " + Seconds(timeout_s) + " in vain for ") +
         ". What this rank's operations have given since is not valid; the Group must be closed";
}

}  // namespace jax_ep::cuda
