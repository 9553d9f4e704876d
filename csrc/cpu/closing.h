#ifndef JAX_EP_CSRC_CPU_CLOSING_H_
#define JAX_EP_CSRC_CPU_CLOSING_H_

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace jax_ep::cpu {

// What is to be called when a group is closed.
class Closing {
 public:
  using Id = uint64_t;
  static constexpr Id kClosed = 0;

  // The id by which it is removed again, or kClosed if the group is closed
  // already; then `function` will not be called.
  Id Add(std::function<void()> function) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return kClosed;
    functions_.emplace(++last_, std::move(function));
    return last_;
  }

  void Remove(Id id) {
    std::lock_guard<std::mutex> lock(mutex_);
    functions_.erase(id);
  }

  void Run() {
    std::map<Id, std::function<void()>> functions;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
      functions.swap(functions_);
    }
    for (const auto& each : functions) each.second();
  }

 private:
  std::mutex mutex_;
  bool closed_ = false;
  Id last_ = kClosed;
  std::map<Id, std::function<void()>> functions_;
};

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CSRC_CPU_CLOSING_H_
