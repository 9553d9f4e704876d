#include "csrc/core/dtype.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "csrc/testing/check.h"

namespace jax_ep {
namespace {

// The nearest of all 8-bit numbers, ties to the even code; beyond the largest
// finite number by half a step or more is what overflow gives.
template <typename T>
uint8_t NearestCode(float x, uint32_t overflow) {
  const uint32_t sign = std::signbit(x) ? 0x80 : 0;
  const double magnitude = std::fabs(static_cast<double>(x));
  uint32_t best = 0;
  for (uint32_t code = 0; code < overflow; ++code) {
    const double distance = std::fabs(T::Load(static_cast<uint8_t>(code)) - magnitude);
    const double best_distance = std::fabs(T::Load(static_cast<uint8_t>(best)) - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  const double largest = T::Load(static_cast<uint8_t>(overflow - 1));
  const double step = largest - T::Load(static_cast<uint8_t>(overflow - 2));
  const double limit = largest + step / 2;
  const bool past = magnitude > limit || (magnitude == limit && (overflow - 1) % 2 == 1);
  return static_cast<uint8_t>(sign | (past ? overflow : best));
}

template <typename T>
void RoundsToNearestEven(uint32_t overflow) {
  std::mt19937 random(0);
  std::uniform_real_distribution<float> exponent(-20, 17);
  for (int i = 0; i < 20000; ++i) {
    const float x = (i % 2 ? 1.0f : -1.0f) * std::exp2(exponent(random));
    CHECK_EQ(int{T::Round(x)}, int{NearestCode<T>(x, overflow)});
  }
  // Exact numbers, and the points half way between two of them.
  for (uint32_t code = 0; code < overflow; ++code) {
    const float x = T::Load(static_cast<uint8_t>(code));
    CHECK_EQ(uint32_t{T::Round(x)}, code);
    if (code + 1 < overflow) {
      const float half = (x + T::Load(static_cast<uint8_t>(code + 1))) / 2;
      CHECK_EQ(int{T::Round(half)}, int{NearestCode<T>(half, overflow)});
    }
  }
}

void F8E4M3FNHasNoInfinity() {
  RoundsToNearestEven<F8E4M3FN>(0x7f);
  CHECK_EQ(int{F8E4M3FN::Round(448.0f)}, 0x7e);
  CHECK_EQ(int{F8E4M3FN::Round(464.0f)}, 0x7e);
  CHECK_EQ(int{F8E4M3FN::Round(465.0f)}, 0x7f);
  CHECK_EQ(int{F8E4M3FN::Round(std::numeric_limits<float>::infinity())}, 0x7f);
  CHECK(std::isnan(F8E4M3FN::Load(0xff)));
}

void F8E5M2HasInfinity() {
  RoundsToNearestEven<F8E5M2>(0x7c);
  CHECK_EQ(int{F8E5M2::Round(-std::numeric_limits<float>::infinity())}, 0xfc);
  CHECK(std::isnan(F8E5M2::Load(F8E5M2::Round(std::nanf("")))));
  CHECK(std::isinf(F8E5M2::Load(0x7c)));
}

void BF16RoundsToNearestEven() {
  CHECK_EQ(int{BF16::Round(1.0f)}, 0x3f80);
  CHECK_EQ(int{BF16::Round(BitCast<float>(0x3f808000u))}, 0x3f80);  // a tie, to even
  CHECK_EQ(int{BF16::Round(BitCast<float>(0x3f818000u))}, 0x3f82);
  CHECK_EQ(int{BF16::Round(BitCast<float>(0x3f808001u))}, 0x3f81);
  CHECK_EQ(int{BF16::Round(BitCast<float>(0x00010000u))}, 1);       // a subnormal
  CHECK_EQ(int{BF16::Round(std::numeric_limits<float>::max())}, 0x7f80);
  CHECK(std::isnan(BF16::Load(BF16::Round(BitCast<float>(0x7f800001u)))));
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::F8E4M3FNHasNoInfinity();
  jax_ep::F8E5M2HasInfinity();
  jax_ep::BF16RoundsToNearestEven();
}
