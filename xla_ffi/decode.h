#ifndef JAX_EP_XLA_FFI_DECODE_H_
#define JAX_EP_XLA_FFI_DECODE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/core/dtype.h"
#include "csrc/core/quantize.h"
#include "xla/ffi/api/ffi.h"

// What the handlers of all backends bind and decode alike. The operands of an operation are, in
// this order, its position, its routing and its payload; jax_ep/primitives names them.
namespace jax_ep {

using I32 = xla::ffi::Buffer<xla::ffi::S32>;
using U32 = xla::ffi::Buffer<xla::ffi::U32>;

// Binds what every operation has, after its backend's contexts.
template <typename Binding>
auto BindCommon(Binding&& binding) {
  return std::move(binding)
      .template Attr<int64_t>("group")
      .template Attr<int32_t>("layout")
      .template Attr<int64_t>("capacity")
      .template Attr<int64_t>("expert_alignment")
      .template Arg<I32>();  // position
}

// Each operation's own operands, after the common ones.
template <typename Binding>
auto BindPrepare(Binding&& binding) {
  return std::move(binding)
      .template Arg<I32>()   // topk_idx
      .template Ret<I32>()   // slots
      .template Ret<I32>()   // row_source
      .template Ret<I32>()   // row_topk_idx
      .template Ret<I32>()   // recv_slots
      .template Ret<I32>()   // group_sizes
      .template Ret<I32>()   // expert_counts
      .template Ret<I32>()   // num_rows
      .template Ret<I32>();  // num_dropped
}

template <typename Binding>
auto BindRouting(Binding&& binding) {
  return std::move(binding)
      .template Arg<I32>()   // topk_idx
      .template Arg<I32>()   // slots
      .template Arg<I32>()   // row_source
      .template Arg<I32>()   // row_topk_idx
      .template Arg<I32>();  // recv_slots
}

template <typename Binding>
auto BindDispatch(Binding&& binding) {
  return BindRouting(std::move(binding))
      .template Attr<bool>("has_weights")
      .template Attr<int32_t>("quantize")
      .RemainingArgs()
      .RemainingRets();
}

template <typename Binding>
auto BindCombine(Binding&& binding) {
  return BindRouting(std::move(binding))
      .template Attr<int32_t>("values")
      .RemainingArgs()
      .RemainingRets();
}

// The low-latency operations: what the whole of each and its two halves bind alike. The first half
// has one result, its ticket; the second takes that before the same operands, and after them some
// that are there for the order alone.
template <typename Binding>
auto BindTicket(Binding&& binding) {
  return std::move(binding)
      .template Arg<xla::ffi::Buffer<xla::ffi::U32>>()
      .template Attr<int32_t>("num_after");
}

template <typename Binding>
auto BindLowLatencyDispatch(Binding&& binding) {
  return std::move(binding)
      .template Arg<I32>()  // topk_idx
      .template Attr<bool>("has_weights")
      .template Attr<int32_t>("quantize")
      .RemainingArgs();
}

template <typename Binding>
auto BindLowLatencyDispatchResults(Binding&& binding) {
  return std::move(binding)
      .template Ret<I32>()   // slots
      .template Ret<I32>()   // row_source
      .template Ret<I32>()   // recv_slots
      .template Ret<I32>()   // group_sizes
      .template Ret<I32>()   // expert_counts
      .template Ret<I32>()   // num_rows
      .template Ret<I32>()   // num_dropped
      .RemainingRets();
}

template <typename Binding>
auto BindLowLatencyCombine(Binding&& binding) {
  return BindRouting(std::move(binding)).template Attr<int32_t>("values").RemainingArgs();
}

// The role of the value per pair that is the payload's last operand.
enum class Values : int32_t {
  kNone = 0,
  kWeights = 1,  // combine's row weights, by which the rows enter their sums
  kMoved = 2,    // dispatch's weights to their rows; combine's "returned" values to their pairs
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

// Elements of a row of `buffer`, whose first dimensions, usually one, count rows.
inline int64_t RowElements(const xla::ffi::AnyBuffer& buffer, size_t row_dimensions = 1) {
  const auto dimensions = buffer.dimensions();
  int64_t elements = 1;
  for (size_t i = row_dimensions; i < dimensions.size(); ++i) elements *= dimensions[i];
  return elements;
}

inline int64_t ElementBytes(const xla::ffi::AnyBuffer& buffer) {
  return static_cast<int64_t>(xla::ffi::ByteWidth(buffer.element_type()));
}

inline std::byte* Data(const xla::ffi::AnyBuffer& buffer) {
  return static_cast<std::byte*>(buffer.untyped_data());
}

// How dispatch casts a leaf.
struct Cast {
  Quantize quantize = Quantize::kNone;
  DType dtype = DType::kF32;  // of the tokens
  int32_t columns = 0;        // their last dimension
  int64_t scale_bytes = 0;    // of a row
};

// The cast of a leaf of dispatch's payload; kNone where it moves as it is.
inline Cast CastOf(const xla::ffi::AnyBuffer& tokens, Quantize quantize) {
  const auto dtype = ToDType(tokens.element_type());
  if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16) return {};
  if (quantize == Quantize::kNone) return {};
  const auto columns = static_cast<int32_t>(tokens.dimensions().back());
  const int64_t lines = columns == 0 ? 0 : RowElements(tokens) / columns;
  return {quantize, *dtype, columns, lines * NumBlocks(columns) * ScaleBytes(quantize)};
}

// What dispatch or combine moves, and where to.
struct Payload {
  struct Leaf {
    xla::ffi::AnyBuffer from;
    xla::ffi::AnyBuffer to;
    Cast cast;                                      // dispatch only
    std::optional<xla::ffi::AnyBuffer> scales = {};  // where it is cast
  };
  std::vector<Leaf> leaves;
  std::optional<xla::ffi::AnyBuffer> values;
  std::optional<xla::ffi::AnyBuffer> moved_values;  // with Values::kMoved
};

// Pairs operands with results; nothing where there are too few or too many of them. The last
// `num_after` operands have no result.
inline std::optional<Payload> DecodePayload(const xla::ffi::RemainingArgs& operands,
                                            xla::ffi::RemainingRets& results, Values role,
                                            Quantize quantize = Quantize::kNone,
                                            size_t num_after = 0) {
  const size_t num_operands = operands.size() - num_after;
  size_t taken = 0;
  const auto take = [&]() -> std::optional<xla::ffi::AnyBuffer> {
    if (taken == results.size()) return std::nullopt;
    return **results.get<xla::ffi::AnyBuffer>(taken++);
  };
  Payload payload;
  for (size_t i = 0; i < num_operands; ++i) {
    const xla::ffi::AnyBuffer from = *operands.get<xla::ffi::AnyBuffer>(i);
    if (role != Values::kNone && i + 1 == num_operands) {
      payload.values = from;
      if (role == Values::kWeights) continue;
      payload.moved_values = take();
      if (!payload.moved_values) return std::nullopt;
      continue;
    }
    const auto to = take();
    if (!to) return std::nullopt;
    const Cast cast = CastOf(from, quantize);
    payload.leaves.push_back({from, *to, cast});
    if (cast.quantize == Quantize::kNone) continue;
    payload.leaves.back().scales = take();
    if (!payload.leaves.back().scales) return std::nullopt;
  }
  if (taken != results.size()) return std::nullopt;
  return payload;
}

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_DECODE_H_
