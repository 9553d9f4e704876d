#include "csrc/cpu/rendezvous.h"

#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>
#include <tuple>

#include "csrc/cpu/watchdog.h"

namespace jax_ep::cpu {

struct Rendezvous::Meeting {
  explicit Meeting(const Arrival& first)
      : op(first.op), group(first.group), args(group->num_ranks), done(group->num_ranks) {}

  std::string RanksThat(bool came) const {
    std::string list;
    for (size_t rank = 0; rank < done.size(); ++rank) {
      if (static_cast<bool>(done[rank]) != came) continue;
      list += (list.empty() ? "" : ", ") + std::to_string(rank);
    }
    return "[" + list + "]";
  }

  const char* op;
  std::shared_ptr<const Group> group;
  std::vector<Args> args;
  std::vector<Done> done;  // set for the ranks that have come
  int32_t arrived = 0;
  std::string failure;     // set once the others are not waited for any more
  Watchdog::Id timer;
  Closing::Id closing;
};

struct Rendezvous::State {
  using Key = std::pair<int64_t, int32_t>;  // run_id, subgroup

  std::mutex mutex;
  std::map<Key, std::shared_ptr<Meeting>> open;

  static void Expire(const std::weak_ptr<State>& weak_state, const std::weak_ptr<Meeting>& weak,
                     bool closed) {
    const std::shared_ptr<State> state = weak_state.lock();
    const std::shared_ptr<Meeting> meeting = weak.lock();
    if (!state || !meeting) return;
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      if (!meeting->failure.empty() || meeting->arrived == meeting->group->num_ranks) return;
      char waited[64] = " waited until the Group was closed";
      if (!closed) {
        std::snprintf(waited, sizeof(waited), " waited timeout_s=%g s", meeting->group->timeout_s);
      }
      meeting->failure = waited + (" for missing ranks " + meeting->RanksThat(false)) +
                         " (arrived: " + meeting->RanksThat(true) + ")";
    }
    meeting->group->closing->Remove(meeting->closing);
    Watchdog::Get().Cancel(meeting->timer);
    // The meeting stays, as failed, for ranks that come after all.
    for (size_t rank = 0; rank < meeting->done.size(); ++rank) {
      if (!meeting->done[rank]) continue;
      meeting->done[rank](Status::Error("jax_ep " + std::string(meeting->op) + " on axis " +
                                        meeting->group->axis + ": rank " + std::to_string(rank) +
                                        meeting->failure));
    }
  }
};

Rendezvous::Rendezvous() : state_(std::make_shared<State>()) {}

std::vector<Rendezvous::Args> Rendezvous::Arrive(const Arrival& arrival, Args args, Done* done) {
  const int32_t rank = arrival.rank;
  const State::Key key{arrival.run_id, arrival.subgroup};
  std::unique_lock<std::mutex> lock(state_->mutex);
  std::shared_ptr<Meeting>& slot = state_->open[key];
  if (!slot) {
    slot = std::make_shared<Meeting>(arrival);
    const auto timeout = std::chrono::duration_cast<Watchdog::Clock::duration>(
        std::chrono::duration<double>(arrival.group->timeout_s));
    const auto expire = [state = std::weak_ptr<State>(state_),
                         meeting = std::weak_ptr<Meeting>(slot)](bool closed) {
      State::Expire(state, meeting, closed);
    };
    slot->timer =
        Watchdog::Get().Call(Watchdog::Clock::now() + timeout, [expire] { expire(false); });
    slot->closing = arrival.group->closing->Add([expire] { expire(true); });
  }
  const std::shared_ptr<Meeting> meeting = slot;

  if (!meeting->failure.empty()) {
    if (++meeting->arrived == meeting->group->num_ranks) state_->open.erase(key);
    lock.unlock();
    (*done)(Status::Error("jax_ep " + std::string(arrival.op) + " on axis " + arrival.group->axis +
                          ": rank " + std::to_string(rank) +
                          " came too late; the others" + meeting->failure));
    return {};
  }
  if (meeting->done[rank]) {
    lock.unlock();
    (*done)(Status::Error("jax_ep " + std::string(arrival.op) + " on axis " + arrival.group->axis +
                          ": rank " + std::to_string(rank) + " came twice"));
    return {};
  }

  meeting->args[rank] = std::move(args);
  meeting->done[rank] = std::move(*done);
  if (++meeting->arrived < meeting->group->num_ranks) {
    lock.unlock();
    if (meeting->closing == Closing::kClosed) State::Expire(state_, meeting, true);
    return {};
  }

  state_->open.erase(key);
  lock.unlock();
  Watchdog::Get().Cancel(meeting->timer);
  meeting->group->closing->Remove(meeting->closing);
  *done = [meeting](const Status& status) {
    for (const Done& each : meeting->done) each(status);
  };
  return meeting->args;
}

}  // namespace jax_ep::cpu
