#include "csrc/core/quantize.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "csrc/testing/check.h"

namespace jax_ep {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMax = std::numeric_limits<float>::max();

BlockScale ScaleOfMax(Quantize quantize, float amax) {
  return ScaleOf(quantize, Magnitude(amax));
}

// Calls f with numbers of all magnitudes, powers of two and their neighbours among them.
template <typename F>
void ForManyNumbers(F f) {
  std::mt19937 random(0);
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (const uint32_t mantissa : {0u, 1u, 0x5fffffu, 0x600000u, 0x600001u, 0x7fffffu}) {
      f(BitCast<float>(exponent << 23 | mantissa));
    }
    for (int i = 0; i < 50; ++i) {
      f(BitCast<float>(exponent << 23 | static_cast<uint32_t>(random() & 0x7fffff)));
    }
  }
}

void MagnitudesAreOrdered() {
  CHECK_EQ(Magnitude(-3.0f), Magnitude(3.0f));
  CHECK_EQ(Magnitude(-0.0f), 0u);
  CHECK(Magnitude(1e-40f) > Magnitude(0.0f));
  CHECK(Magnitude(-kInfinity) > Magnitude(kMax));
  CHECK(Magnitude(std::nanf("")) > Magnitude(kInfinity));
}

void Float32ScaleMapsTheLargestTo448() {
  ForManyNumbers([](float amax) {
    const double clamped = std::fmax(amax, std::ldexp(1.0, -107));
    const BlockScale scale = ScaleOfMax(Quantize::kFp8, amax);
    // Both in float64 and rounded once: the quotient's 53 bits are enough for that.
    CHECK_EQ(scale.inverse, static_cast<float>(448 / clamped));
    CHECK_EQ(BitCast<float>(scale.bits),
             static_cast<float>(clamped * double{static_cast<float>(1.0 / 448)}));
    CHECK(std::isnormal(scale.inverse) && std::isnormal(BitCast<float>(scale.bits)));
    if (amax == clamped) CHECK_EQ(int{QuantizeValue(-amax, scale.inverse)}, 0xfe);
  });
}

void E8M0ScaleIsTheLeastPowerOfTwoThatFits() {
  ForManyNumbers([](float amax) {
    const double clamped = std::fmax(amax, std::ldexp(1.0, -107));
    const BlockScale scale = ScaleOfMax(Quantize::kFp8E8M0, amax);
    CHECK(scale.bits < 255);
    const int exponent = static_cast<int>(scale.bits) - 127;
    CHECK(std::ldexp(clamped, -exponent) <= 448);
    CHECK(std::ldexp(clamped, -(exponent - 1)) > 448);
    CHECK_EQ(scale.inverse, static_cast<float>(std::ldexp(1.0, -exponent)));
    CHECK(std::isnormal(scale.inverse));
  });
  CHECK_EQ(ScaleOfMax(Quantize::kFp8E8M0, 448.0f).bits, 127u);
  CHECK_EQ(ScaleOfMax(Quantize::kFp8E8M0, std::nextafter(448.0f, kInfinity)).bits, 128u);
  CHECK_EQ(ScaleOfMax(Quantize::kFp8E8M0, kMax).bits, 127u + 120u);
}

void RoundedScaleIsThatOfE8M0InFloat32() {
  CHECK_EQ(ScaleBytes(Quantize::kFp8RoundScale), 4);
  ForManyNumbers([](float amax) {
    const BlockScale scale = ScaleOfMax(Quantize::kFp8RoundScale, amax);
    const BlockScale e8m0 = ScaleOfMax(Quantize::kFp8E8M0, amax);
    CHECK_EQ(scale.inverse, e8m0.inverse);
    CHECK_EQ(BitCast<float>(scale.bits),
             static_cast<float>(std::ldexp(1.0, static_cast<int>(e8m0.bits) - 127)));
  });
}

void NanAndInfinityMakeTheBlockNan() {
  for (const float x : {kInfinity, -kInfinity, std::nanf(""), -std::nanf("")}) {
    const BlockScale f32 = ScaleOfMax(Quantize::kFp8, x);
    const BlockScale e8m0 = ScaleOfMax(Quantize::kFp8E8M0, x);
    const BlockScale rounded = ScaleOfMax(Quantize::kFp8RoundScale, x);
    CHECK_EQ(f32.bits, 0x7fc00000u);
    CHECK_EQ(e8m0.bits, 0xffu);
    CHECK_EQ(rounded.bits, 0x7fc00000u);
    for (const float value : {0.0f, -1.0f, x}) {
      CHECK_EQ(int{QuantizeValue(value, f32.inverse)}, 0x7f);
      CHECK_EQ(int{QuantizeValue(value, e8m0.inverse)}, 0x7f);
      CHECK_EQ(int{QuantizeValue(value, rounded.inverse)}, 0x7f);
    }
  }
}

// Flushing subnormals must change nothing: theirs are zeros of their sign in every block.
void SubnormalsBecomeZero() {
  const float largest = BitCast<float>(0x007fffffu);
  for (const Quantize quantize :
       {Quantize::kFp8, Quantize::kFp8E8M0, Quantize::kFp8RoundScale}) {
    for (const float amax : {0.0f, largest, 1e-30f, 1.0f, kMax}) {
      const float inverse = ScaleOfMax(quantize, amax).inverse;
      CHECK_EQ(int{QuantizeValue(largest, inverse)}, 0);
      CHECK_EQ(int{QuantizeValue(-largest, inverse)}, 0x80);
      CHECK_EQ(int{QuantizeValue(-0.0f, inverse)}, 0x80);
    }
  }
}

void LastBlockMayBeShort() {
  CHECK_EQ(NumBlocks(0), 0);
  CHECK_EQ(NumBlocks(1), 1);
  CHECK_EQ(NumBlocks(128), 1);
  CHECK_EQ(NumBlocks(2880), 23);
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::MagnitudesAreOrdered();
  jax_ep::Float32ScaleMapsTheLargestTo448();
  jax_ep::E8M0ScaleIsTheLeastPowerOfTwoThatFits();
  jax_ep::RoundedScaleIsThatOfE8M0InFloat32();
  jax_ep::NanAndInfinityMakeTheBlockNan();
  jax_ep::SubnormalsBecomeZero();
  jax_ep::LastBlockMayBeShort();
}
