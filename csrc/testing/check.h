#ifndef JAX_EP_CSRC_TESTING_CHECK_H_
#define JAX_EP_CSRC_TESTING_CHECK_H_

#include <cstdlib>
#include <iostream>

// What a C++ unit test needs, and no more: a test is a `main` that checks and returns 0.

// Ends the test with the place and the condition unless `condition` holds.
#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::cerr << __FILE__ << ":" << __LINE__ << ": CHECK(" #condition ") failed\n";     \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (false)

// The same for `actual == expected`, with both values.
#define CHECK_EQ(actual, expected) \
  ::jax_ep::testing::CheckEq((actual), (expected), __FILE__, __LINE__, #actual " == " #expected)

namespace jax_ep::testing {

template <typename Actual, typename Expected>
void CheckEq(const Actual& actual, const Expected& expected, const char* file, int line,
             const char* text) {
  if (actual == expected) return;
  std::cerr << file << ":" << line << ": " << text << " failed: " << actual << " vs. " << expected
            << "\n";
  std::exit(1);
}

}  // namespace jax_ep::testing

#endif  // JAX_EP_CSRC_TESTING_CHECK_H_
