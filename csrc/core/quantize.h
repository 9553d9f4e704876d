#ifndef JAX_EP_CSRC_CORE_QUANTIZE_H_
#define JAX_EP_CSRC_CORE_QUANTIZE_H_

#include <cstdint>

#include "csrc/core/dtype.h"
#include "csrc/core/macros.h"

// The cast of rows to float8_e4m3fn on their way, with a scale for every block of 128 columns; the
// last block of a row may be shorter. docs/semantics.md gives the arithmetic, which the reference
// in jax_ep/reference.py mirrors once.
namespace jax_ep {

// The values are the FFI attribute `quantize`, named in jax_ep/primitives/lowering.py.
enum class Quantize : int32_t {
  kNone = 0,
  kFp8 = 1,            // float32 scales
  kFp8E8M0 = 2,        // scales that are powers of two, one byte each
  kFp8RoundScale = 3,  // those, as float32
};

inline constexpr int32_t kBlockColumns = 128;

JAX_EP_HOST_DEVICE int32_t NumBlocks(int32_t columns) {
  return (columns + kBlockColumns - 1) / kBlockColumns;
}

JAX_EP_HOST_DEVICE int32_t ScaleBytes(Quantize quantize) {
  return quantize == Quantize::kFp8E8M0 ? 1 : 4;
}

// |x| as an integer: ordered as magnitudes are, infinity above all numbers and NaN above infinity.
JAX_EP_ALWAYS_INLINE uint32_t Magnitude(float x) { return BitCast<uint32_t>(x) & 0x7fffffff; }

struct BlockScale {
  float inverse;  // what the block's values are multiplied by
  uint32_t bits;  // of the scale: a float32, or an e8m0 in the low byte
};

// The scale of a block from the largest Magnitude in it. `inverse_of(amax)` is 448 / amax, rounded
// to nearest, for an amax of 2^-107 at least; if that is infinite or NaN it is not used. Without
// branches, on which kernels would wait.
template <typename Inverse>
JAX_EP_ALWAYS_INLINE BlockScale ScaleOf(Quantize quantize, uint32_t magnitude,
                                        const Inverse& inverse_of) {
  constexpr uint32_t kInfinity = 0x7f800000;
  constexpr uint32_t kNan = 0x7fc00000;
  // Blocks are scaled as if they had a 2^-107. So zeros have a scale; scale and inverse are normal
  // numbers; and since the inverse is below 2^116, a subnormal x times it is at most half of the
  // least e4m3 number, which rounds to zero of x's sign whether x is flushed to zero or not.
  constexpr uint32_t kLeast = (127 - 107) << 23;
  const bool e8m0 = quantize == Quantize::kFp8E8M0;
  const bool finite = magnitude < kInfinity;
  if (magnitude < kLeast) magnitude = kLeast;
  // The exponent less 8, and one more where the mantissa is past that of 448 = 1.75 * 2^8.
  const uint32_t biased = (magnitude - (8u << 23) + 0x1fffff) >> 23;
  float inverse = BitCast<float>((254 - biased) << 23);
  uint32_t bits = e8m0 ? biased : biased << 23;
  if (quantize == Quantize::kFp8) {
    const float amax = BitCast<float>(magnitude);
    inverse = inverse_of(amax);
    bits = BitCast<uint32_t>(amax * (1.0f / 448.0f));
  }
  return {finite ? inverse : BitCast<float>(kNan), finite ? bits : e8m0 ? 0xff : kNan};
}

JAX_EP_ALWAYS_INLINE BlockScale ScaleOf(Quantize quantize, uint32_t magnitude) {
  return ScaleOf(quantize, magnitude, [](float amax) { return 448.0f / amax; });
}

// x as float8_e4m3fn. NaN only in a block whose inverse is, and then the positive one.
JAX_EP_ALWAYS_INLINE uint8_t QuantizeValue(float x, float inverse) {
  const float scaled = x * inverse;
  return scaled != scaled ? uint8_t{F8E4M3FN::kNan} : F8E4M3FN::Round(scaled);
}

}  // namespace jax_ep

#endif  // JAX_EP_CSRC_CORE_QUANTIZE_H_
