#ifndef JAX_EP_CSRC_CPU_FLOAT_ENVIRONMENT_H_
#define JAX_EP_CSRC_CPU_FLOAT_ENVIRONMENT_H_

#include <cfenv>

namespace jax_ep::cpu {

// The floating-point environment of a thread. XLA:CPU flushes subnormals to
// zero on the threads that run its programs, and does not say on which.
class FloatEnvironment {
 public:
  // That of the calling thread.
  FloatEnvironment() { std::fegetenv(&environment_); }
  void Apply() const { std::fesetenv(&environment_); }

 private:
  std::fenv_t environment_;
};

// IEEE arithmetic, with subnormals, in a scope: the same sums on every thread.
class ScopedIeeeArithmetic {
 public:
  ScopedIeeeArithmetic() { std::fesetenv(FE_DFL_ENV); }
  ~ScopedIeeeArithmetic() { outer_.Apply(); }

 private:
  const FloatEnvironment outer_;
};

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CSRC_CPU_FLOAT_ENVIRONMENT_H_
