#ifndef JAX_EP_CSRC_CPU_THREADS_H_
#define JAX_EP_CSRC_CPU_THREADS_H_

#include <functional>

namespace jax_ep::cpu {

// Runs `task` on a thread that nothing else is waiting for: an idle one, or a
// new one. To complete an XLA future is to run the rest of a device's program
// then and there, up to its next collective, where it blocks until all devices
// have come; no bounded pool of threads is safe for that.
void RunOnOwnThread(std::function<void()> task);

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CSRC_CPU_THREADS_H_
