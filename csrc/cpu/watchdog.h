#ifndef JAX_EP_CSRC_CPU_WATCHDOG_H_
#define JAX_EP_CSRC_CPU_WATCHDOG_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace jax_ep::cpu {

// Calls functions at deadlines, on a thread of its own.
class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;
  using Id = std::pair<Clock::time_point, uint64_t>;

  // The process's watchdog; its thread starts on first use.
  static Watchdog& Get();

  Id Call(Clock::time_point deadline, std::function<void()> function);

  // The function will not be called, unless it is being called already.
  void Cancel(const Id& id);

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Id, std::function<void()>> pending_;
  uint64_t next_ = 0;
};

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CSRC_CPU_WATCHDOG_H_
