#ifndef JAX_EP_CSRC_CORE_DTYPE_H_
#define JAX_EP_CSRC_CORE_DTYPE_H_

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

#include "csrc/core/macros.h"

// Row dtypes that combine can sum: conversion to the accumulator and back,
// rounded to nearest even as XLA's and numpy's casts are.
namespace jax_ep {

enum class DType : int32_t { kF32, kF64, kBF16, kF16, kF8E4M3FN, kF8E5M2 };

JAX_EP_HOST_DEVICE int32_t StorageBytes(DType dtype) {
  switch (dtype) {
    case DType::kF64: return 8;
    case DType::kF32: return 4;
    case DType::kBF16:
    case DType::kF16: return 2;
    case DType::kF8E4M3FN:
    case DType::kF8E5M2: return 1;
  }
  return 0;
}

// Inlined everywhere, so that a function compiled for a wider instruction set
// gets a version of its own (see csrc/cpu/combine.cc).
#ifdef __CUDACC__
#define JAX_EP_ALWAYS_INLINE __host__ __device__ __forceinline__
#else
#define JAX_EP_ALWAYS_INLINE inline __attribute__((always_inline))
#endif

template <typename To, typename From>
JAX_EP_ALWAYS_INLINE To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(static_cast<void*>(&to), &from, sizeof(to));  // To's constructors do not matter
  return to;
}

struct F32 {
  using Storage = float;
  using Acc = float;
  static JAX_EP_ALWAYS_INLINE Acc Load(Storage x) { return x; }
  static JAX_EP_ALWAYS_INLINE Storage Round(Acc x) { return x; }
};

struct F64 {
  using Storage = double;
  using Acc = double;
  static JAX_EP_ALWAYS_INLINE Acc Load(Storage x) { return x; }
  static JAX_EP_ALWAYS_INLINE Storage Round(Acc x) { return x; }
};

struct BF16 {
  using Storage = uint16_t;
  using Acc = float;
  static JAX_EP_ALWAYS_INLINE Acc Load(Storage x) {
    return BitCast<float>(static_cast<uint32_t>(x) << 16);
  }
  static JAX_EP_ALWAYS_INLINE Storage Round(Acc x) {
    const uint32_t bits = BitCast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40;  // stays a NaN where rounding would carry over
    return static_cast<uint16_t>(x != x ? nan : rounded);
  }
};

struct F16 {
  using Storage = uint16_t;
  using Acc = float;
#ifdef __CUDACC__
  static JAX_EP_ALWAYS_INLINE Acc Load(Storage x) { return __half2float(BitCast<__half>(x)); }
  static JAX_EP_ALWAYS_INLINE Storage Round(Acc x) {
    return BitCast<uint16_t>(__float2half_rn(x));
  }
#else
  static JAX_EP_ALWAYS_INLINE Acc Load(Storage x) { return BitCast<_Float16>(x); }
  static JAX_EP_ALWAYS_INLINE Storage Round(Acc x) {
    return BitCast<uint16_t>(static_cast<_Float16>(x));
  }
#endif
};

// An 8-bit float with `kMantissa` bits after the sign and exponent. IEEE-like
// (E5M2), or "FN": no infinity, and one NaN pattern (E4M3FN).
template <int kExponent, int kMantissa, bool kFn>
struct F8 {
  using Storage = uint8_t;
  using Acc = float;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr uint32_t kNan = kFn ? 0x7f : 0x7e;
  // The first pattern that is no finite number: NaN in FN, else infinity.
  static constexpr uint32_t kOverflow = kFn ? 0x7f : ((1u << kExponent) - 1) << kMantissa;

  static JAX_EP_ALWAYS_INLINE Acc Load(Storage x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x80) << 24;
    const uint32_t magnitude = x & 0x7f;
    if (magnitude >= kOverflow) {
      const bool infinite = !kFn && magnitude == kOverflow;
      return BitCast<float>(sign | (infinite ? 0x7f800000u : 0x7fc00000u));
    }
    // Put the bits where float has them, then mend the exponent's bias; the
    // product is exact, subnormals included.
    const float scale = BitCast<float>(static_cast<uint32_t>(127 + 127 - kBias) << 23);
    const float value = BitCast<float>(magnitude << (23 - kMantissa)) * scale;
    return BitCast<float>(BitCast<uint32_t>(value) | sign);
  }

  static JAX_EP_ALWAYS_INLINE Storage Round(Acc x) {
    const uint32_t bits = BitCast<uint32_t>(x);
    const uint32_t sign = (bits >> 24) & 0x80;
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<Storage>(sign | kNan);
    uint32_t code;
    if (magnitude < (static_cast<uint32_t>(128 - kBias) << 23)) {
      // Subnormal result: adding this power of two leaves the rounded code in
      // the low bits of the sum.
      constexpr int kShift = 23 - kMantissa + 1 - kBias;
      const float magic = BitCast<float>(static_cast<uint32_t>(127 + kShift) << 23);
      code = BitCast<uint32_t>(BitCast<float>(magnitude) + magic) - BitCast<uint32_t>(magic);
    } else {
      const uint32_t rebiased = magnitude - (static_cast<uint32_t>(127 - kBias) << 23);
      constexpr int kDropped = 23 - kMantissa;
      code = (rebiased + (1u << (kDropped - 1)) - 1 + ((rebiased >> kDropped) & 1)) >> kDropped;
      if (code > kOverflow) code = kOverflow;
    }
    return static_cast<Storage>(sign | code);
  }
};

using F8E4M3FN = F8<4, 3, true>;
using F8E5M2 = F8<5, 2, false>;

}  // namespace jax_ep

#endif  // JAX_EP_CSRC_CORE_DTYPE_H_
