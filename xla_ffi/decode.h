#ifndef JAX_EP_XLA_FFI_DECODE_H_
#define JAX_EP_XLA_FFI_DECODE_H_

#include <cstdint>
#include <optional>

#include "csrc/core/dtype.h"
#include "xla/ffi/api/ffi.h"

// What the handlers of all backends decode alike. The operands of an operation are, in this order,
// its routing and its payload; jax_ep/primitives names them.
namespace jax_ep {

using I32 = xla::ffi::Buffer<xla::ffi::S32>;

// The role of the value per pair that is combine's last operand.
enum class Values : int32_t {
  kNone = 0,
  kWeights = 1,   // row weights, by which the rows enter their sums
  kReturned = 2,  // moved back to their pairs: the transpose of dispatch's weights
};

// The dtypes that combine sums.
inline std::optional<DType> ToDType(xla::ffi::DataType dtype) {
  switch (dtype) {
    case xla::ffi::F32: return DType::kF32;
    case xla::ffi::F64: return DType::kF64;
    case xla::ffi::BF16: return DType::kBF16;
    case xla::ffi::F16: return DType::kF16;
    case xla::ffi::F8E4M3FN: return DType::kF8E4M3FN;
    case xla::ffi::F8E5M2: return DType::kF8E5M2;
    default: return std::nullopt;
  }
}

// Elements of a row of `buffer`, whose first dimension counts rows.
inline int64_t RowElements(const xla::ffi::AnyBuffer& buffer) {
  const auto dimensions = buffer.dimensions();
  int64_t elements = 1;
  for (size_t i = 1; i < dimensions.size(); ++i) elements *= dimensions[i];
  return elements;
}

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_DECODE_H_
