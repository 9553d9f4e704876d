#include "csrc/cpu/parallel.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

namespace jax_ep::cpu {
namespace {

struct Loop {
  int64_t num_blocks;
  std::function<Status(int64_t)> body;
  std::function<void(const Status&)> finished;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> ended{0};
  std::mutex mutex;
  Status first_error;

  void Run() {
    for (int64_t block = next++; block < num_blocks; block = next++) {
      const Status status = body(block);
      if (!status.ok()) {
        std::lock_guard<std::mutex> lock(mutex);
        if (first_error.ok()) first_error = status;
      }
      if (++ended == num_blocks) finished(first_error);
    }
  }
};

}  // namespace

void ParallelFor(int64_t num_blocks, int64_t num_helpers, const Schedule& schedule,
                 std::function<Status(int64_t)> body,
                 std::function<void(const Status&)> finished) {
  if (num_blocks == 0) return finished(Status());
  auto loop = std::make_shared<Loop>();
  loop->num_blocks = num_blocks;
  loop->body = std::move(body);
  loop->finished = std::move(finished);
  for (int64_t i = 0; i < std::min(num_helpers, num_blocks - 1); ++i) {
    schedule([loop] { loop->Run(); });
  }
  loop->Run();
}

}  // namespace jax_ep::cpu
