#include "csrc/cpu/watchdog.h"

#include <thread>

namespace jax_ep::cpu {

Watchdog& Watchdog::Get() {
  // Never destroyed, and its thread never joined: an execution may still be
  // waiting when the process exits.
  static Watchdog* watchdog = [] {
    auto* created = new Watchdog;
    std::thread([created] { created->Run(); }).detach();
    return created;
  }();
  return *watchdog;
}

Watchdog::Id Watchdog::Call(Clock::time_point deadline, std::function<void()> function) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Id id{deadline, next_++};
  const bool first = pending_.empty() || id < pending_.begin()->first;
  pending_.emplace(id, std::move(function));
  if (first) changed_.notify_one();
  return id;
}

void Watchdog::Cancel(const Id& id) {
  std::lock_guard<std::mutex> lock(mutex_);
  pending_.erase(id);
}

void Watchdog::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (pending_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const auto first = pending_.begin();
    const Clock::time_point deadline = first->first.first;
    if (Clock::now() < deadline) {
      changed_.wait_until(lock, deadline);
      continue;
    }
    const std::function<void()> function = std::move(first->second);
    pending_.erase(first);
    lock.unlock();
    function();
    lock.lock();
  }
}

}  // namespace jax_ep::cpu
