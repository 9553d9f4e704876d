#include "csrc/cpu/threads.h"

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace jax_ep::cpu {
namespace {

class Threads {
 public:
  void Run(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() > idle_) {
      std::thread([this] { Serve(); }).detach();
    } else {
      changed_.notify_one();
    }
  }

 private:
  void Serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      // A thread counts as idle until it holds its task, so that `idle_` is
      // never more than the threads that can take one.
      while (tasks_.empty()) {
        ++idle_;
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        --idle_;
      }
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;
};

}  // namespace

void RunOnOwnThread(std::function<void()> task) {
  // Never destroyed: its threads outlive main().
  static Threads* threads = new Threads;
  threads->Run(std::move(task));
}

}  // namespace jax_ep::cpu
