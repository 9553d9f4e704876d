#include "csrc/cpu/rendezvous.h"

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "csrc/testing/check.h"

namespace jax_ep::cpu {
namespace {

std::shared_ptr<const Group> MakeGroup(double timeout_s) {
  auto group = std::make_shared<Group>();
  group->axis = "expert";
  group->num_ranks = 3;
  group->timeout_s = timeout_s;
  return group;
}

struct Rank {
  std::promise<Status> promise;
  std::future<Status> future = promise.get_future();

  Rendezvous::Done Done() {
    return [this](const Status& status) { promise.set_value(status); };
  }
};

std::vector<Rendezvous::Args> Come(Rendezvous& rendezvous, const std::shared_ptr<const Group>& group,
                                   int64_t run_id, int32_t rank, Rendezvous::Done* done) {
  return rendezvous.Arrive({"dispatch", group, run_id, 0, rank}, std::make_shared<int>(rank * 10),
                           done);
}

bool Contains(const Status& status, const std::string& text) {
  return status.message().find(text) != std::string::npos;
}

void TheLastRankGetsAllArgumentsInRankOrder() {
  Rendezvous rendezvous;
  const auto group = MakeGroup(100);
  for (int round = 0; round < 2; ++round) {  // as a loop comes again
    std::vector<Rank> ranks(3);
    std::vector<Rendezvous::Args> all;
    Rendezvous::Done last;
    for (const int32_t rank : {2, 0, 1}) {
      CHECK(all.empty());
      last = ranks[rank].Done();
      all = Come(rendezvous, group, 7, rank, &last);
    }
    CHECK_EQ(all.size(), 3u);
    for (int rank = 0; rank < 3; ++rank) CHECK_EQ(*static_cast<int*>(all[rank].get()), rank * 10);
    last(Status());
    for (Rank& rank : ranks) CHECK(rank.future.get().ok());
  }
}

void ExecutionsAtOnceDoNotMeet() {
  Rendezvous rendezvous;
  const auto group = MakeGroup(100);
  std::vector<Rank> ranks(6);
  for (int64_t run = 0; run < 2; ++run) {
    for (int32_t rank = 0; rank < 2; ++rank) {
      Rendezvous::Done done = ranks[run * 3 + rank].Done();
      CHECK(Come(rendezvous, group, run, rank, &done).empty());
    }
  }
  for (int64_t run = 0; run < 2; ++run) {
    Rendezvous::Done done = ranks[run * 3 + 2].Done();
    CHECK_EQ(Come(rendezvous, group, run, 2, &done).size(), 3u);
    done(Status());
  }
  for (Rank& rank : ranks) CHECK(rank.future.get().ok());
}

void AMissingRankIsNamedToEveryoneWhoCame() {
  Rendezvous rendezvous;
  const auto group = MakeGroup(0.05);
  std::vector<Rank> ranks(3);
  for (const int32_t rank : {0, 2}) {
    Rendezvous::Done done = ranks[rank].Done();
    Come(rendezvous, group, 1, rank, &done);
  }
  for (const int32_t rank : {0, 2}) {
    const Status status = ranks[rank].future.get();
    CHECK(!status.ok());
    CHECK(Contains(status, "dispatch on axis expert: rank " + std::to_string(rank) + " waited"));
    CHECK(Contains(status, "missing ranks [1]"));
    CHECK(Contains(status, "arrived: [0, 2]"));
  }
  Rendezvous::Done done = ranks[1].Done();
  CHECK(Come(rendezvous, group, 1, 1, &done).empty());
  CHECK(Contains(ranks[1].future.get(), "rank 1 came too late"));
}

void ClosingTheGroupEndsTheWait() {
  Rendezvous rendezvous;
  const auto group = MakeGroup(100);
  std::vector<Rank> ranks(3);
  Rendezvous::Done done = ranks[2].Done();
  Come(rendezvous, group, 1, 2, &done);
  group->closing->Run();
  const Status status = ranks[2].future.get();
  CHECK(Contains(status, "rank 2 waited until the Group was closed for missing ranks [0, 1]"));
  // A rank that had found the group open comes to this meeting, or begins another.
  done = ranks[0].Done();
  CHECK(Come(rendezvous, group, 1, 0, &done).empty());
  CHECK(Contains(ranks[0].future.get(), "rank 0 came too late"));
  done = ranks[1].Done();
  CHECK(Come(rendezvous, group, 2, 1, &done).empty());
  CHECK(Contains(ranks[1].future.get(), "rank 1 waited until the Group was closed"));
}

}  // namespace
}  // namespace jax_ep::cpu

int main() {
  jax_ep::cpu::TheLastRankGetsAllArgumentsInRankOrder();
  jax_ep::cpu::ExecutionsAtOnceDoNotMeet();
  jax_ep::cpu::AMissingRankIsNamedToEveryoneWhoCame();
  jax_ep::cpu::ClosingTheGroupEndsTheWait();
}
