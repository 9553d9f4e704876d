#ifndef JAX_EP_CSRC_CPU_PARALLEL_H_
#define JAX_EP_CSRC_CPU_PARALLEL_H_

#include <cstdint>
#include <functional>

#include "csrc/core/status.h"

namespace jax_ep::cpu {

// Hands a task to another thread, now or later.
using Schedule = std::function<void(std::function<void()>)>;

// Runs body(block) for every block in [0, num_blocks) on this thread and on up
// to `num_helpers` scheduled ones, and calls `finished` once, from the thread
// that ends the last block, with the first error or success. This thread takes
// blocks until none is left, so the work ends even where no helper ever starts.
void ParallelFor(int64_t num_blocks, int64_t num_helpers, const Schedule& schedule,
                 std::function<Status(int64_t)> body, std::function<void(const Status&)> finished);

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CSRC_CPU_PARALLEL_H_
