#include "xla_ffi/cuda/call.h"
#include "xla_ffi/cuda/handlers.h"

// The low-latency dispatch as a whole, its start and its done. Operands: [the ticket,] topk_idx,
// the leaves [T, ...] and, with `has_weights`, the top-k weights [T, K]; of a done, then
// `num_after` arrays that XLA computes before it and nobody reads. Results: the ticket; or the
// handle's arrays, the rows of each leaf, after those of a leaf that is cast their scales, and the
// row weights.
namespace jax_ep::ffi_cuda {
namespace {

// What all three are called with.
struct Operands {
  int64_t group;
  int32_t layout;
  int64_t capacity;
  int64_t expert_alignment;
  I32 position;
  I32 topk_idx;
  bool has_weights;
  Quantize quantize;
  ffi::RemainingArgs payload;
  int32_t num_after = 0;
};

Status SetOperands(const Operands& operands, std::shared_ptr<const cuda::Group>* held,
                   cuda::LowLatencyDispatchArgs* args) {
  cuda::MoveArgs& move = args->move;
  const int64_t num_tokens = operands.topk_idx.dimensions()[0];
  if (Status status =
          FindCommon(operands.group, operands.layout, operands.capacity,
                     operands.expert_alignment, operands.position, num_tokens, held, &move.common);
      !status.ok()) {
    return status;
  }
  const Shape& shape = move.common.shape;
  if (Status status = CheckTopk(shape, operands.topk_idx); !status.ok()) return status;
  move.topk_idx = operands.topk_idx.typed_data();
  const size_t num_operands = operands.payload.size() - operands.num_after;
  if (operands.has_weights && num_operands == 0) return Status::Error("there are no weights");
  const size_t num_leaves = num_operands - (operands.has_weights ? 1 : 0);
  if (num_leaves > cuda::kMaxLeaves) {
    return Status::Error("it moves at most " + std::to_string(cuda::kMaxLeaves) +
                         " leaves, got " + std::to_string(num_leaves));
  }
  for (size_t i = 0; i < num_leaves; ++i) {
    const ffi::AnyBuffer tokens = *operands.payload.get<ffi::AnyBuffer>(i);
    if (Status status =
            CheckElements("a leaf of tokens", tokens, num_tokens * RowElements(tokens));
        !status.ok()) {
      return status;
    }
    AddTokens(&move, tokens, CastOf(tokens, operands.quantize));
  }
  if (!operands.has_weights) return Status();
  const ffi::AnyBuffer weights = *operands.payload.get<ffi::AnyBuffer>(num_leaves);
  SetValues(&move, Data(weights), nullptr, ElementBytes(weights));
  return CheckElements("the values per pair", weights, num_tokens * shape.num_topk);
}

// The results of the whole and of done; the operands are set.
struct Results {
  ffi::Result<I32> slots;
  ffi::Result<I32> row_source;
  ffi::Result<I32> recv_slots;
  ffi::Result<I32> group_sizes;
  ffi::Result<I32> expert_counts;
  ffi::Result<I32> num_rows;
  ffi::Result<I32> num_dropped;
  ffi::RemainingRets payload;
};

Status SetResults(const Operands& operands, Results results, cuda::LowLatencyDispatchArgs* args) {
  cuda::MoveArgs& move = args->move;
  const Shape& shape = move.common.shape;
  const auto payload = DecodePayload(operands.payload, results.payload,
                                     operands.has_weights ? Values::kMoved : Values::kNone,
                                     operands.quantize, operands.num_after);
  if (!payload) return Status::Error("operands and results do not match");
  if (Status status = FirstError(
          {CheckSlots(shape, operands.topk_idx, *results.slots, *results.row_source,
                      *results.recv_slots),
           CheckElements("group_sizes", *results.group_sizes, shape.num_local_experts()),
           CheckElements("expert_counts", *results.expert_counts, shape.num_local_experts()),
           CheckPayload(shape, move.common.num_tokens, *payload, true)});
      !status.ok()) {
    return status;
  }
  args->routing = {results.slots->typed_data(),
                   results.row_source->typed_data(),
                   nullptr,
                   results.recv_slots->typed_data(),
                   results.group_sizes->typed_data(),
                   results.expert_counts->typed_data(),
                   results.num_rows->typed_data(),
                   results.num_dropped->typed_data()};
  for (size_t i = 0; i < payload->leaves.size(); ++i) {
    move.leaves[i].rows = Data(payload->leaves[i].to);
    if (payload->leaves[i].scales) move.leaves[i].scales = Data(*payload->leaves[i].scales);
  }
  if (payload->moved_values) move.values.rows = Data(*payload->moved_values);
  return Status();
}

// Launches the whole, the start, which has no results, or the done.
ffi::Error Run(const char* name, cudaStream_t stream, const Operands& operands, const U32* ticket,
               const Results* results) {
  std::shared_ptr<const cuda::Group> held;
  cuda::LowLatencyDispatchArgs args;
  Status status = SetOperands(operands, &held, &args);
  if (status.ok() && results != nullptr) status = SetResults(operands, *results, &args);
  if (status.ok() && ticket != nullptr) {
    status = SetTicket(*ticket, results == nullptr, &args.split);
  }
  if (status.ok()) status = cuda::LowLatencyDispatch(stream, args);
  return ToError(name, status);
}

ffi::Error LowLatencyDispatch(cudaStream_t stream, int64_t group, int32_t layout, int64_t capacity,
                              int64_t expert_alignment, I32 position, I32 topk_idx,
                              bool has_weights, int32_t quantize, ffi::RemainingArgs payload,
                              ffi::Result<I32> slots, ffi::Result<I32> row_source,
                              ffi::Result<I32> recv_slots, ffi::Result<I32> group_sizes,
                              ffi::Result<I32> expert_counts, ffi::Result<I32> num_rows,
                              ffi::Result<I32> num_dropped, ffi::RemainingRets rows) {
  const Results results{slots,    row_source,  recv_slots, group_sizes, expert_counts,
                        num_rows, num_dropped, rows};
  return Run("prepare_and_dispatch", stream,
             {group, layout, capacity, expert_alignment, position, topk_idx, has_weights,
              static_cast<Quantize>(quantize), payload},
             nullptr, &results);
}

ffi::Error LowLatencyDispatchStart(cudaStream_t stream, int64_t group, int32_t layout,
                                   int64_t capacity, int64_t expert_alignment, I32 position,
                                   I32 topk_idx, bool has_weights, int32_t quantize,
                                   ffi::RemainingArgs payload, ffi::Result<U32> ticket) {
  return Run("dispatch_start", stream,
             {group, layout, capacity, expert_alignment, position, topk_idx, has_weights,
              static_cast<Quantize>(quantize), payload},
             &*ticket, nullptr);
}

ffi::Error LowLatencyDispatchDone(cudaStream_t stream, int64_t group, int32_t layout,
                                  int64_t capacity, int64_t expert_alignment, I32 position,
                                  U32 ticket, int32_t num_after, I32 topk_idx, bool has_weights,
                                  int32_t quantize, ffi::RemainingArgs payload,
                                  ffi::Result<I32> slots, ffi::Result<I32> row_source,
                                  ffi::Result<I32> recv_slots, ffi::Result<I32> group_sizes,
                                  ffi::Result<I32> expert_counts, ffi::Result<I32> num_rows,
                                  ffi::Result<I32> num_dropped, ffi::RemainingRets rows) {
  const Results results{slots,    row_source,  recv_slots, group_sizes, expert_counts,
                        num_rows, num_dropped, rows};
  return Run("dispatch_done", stream,
             {group, layout, capacity, expert_alignment, position, topk_idx, has_weights,
              static_cast<Quantize>(quantize), payload, num_after},
             &ticket, &results);
}

auto BindWhole() { return BindLowLatencyDispatchResults(BindLowLatencyDispatch(BindCall())); }
auto BindStart() { return BindLowLatencyDispatch(BindCall()).Ret<U32>(); }
auto BindDone() {
  return BindLowLatencyDispatchResults(BindLowLatencyDispatch(BindTicket(BindCall())));
}

}  // namespace
}  // namespace jax_ep::ffi_cuda

JAX_EP_DEFINE_CUDA_HANDLER(JaxEpCudaLowLatencyDispatch, &jax_ep::ffi_cuda::LowLatencyDispatch,
                           jax_ep::ffi_cuda::BindWhole());
JAX_EP_DEFINE_CUDA_HANDLER(JaxEpCudaLowLatencyDispatchStart,
                           &jax_ep::ffi_cuda::LowLatencyDispatchStart,
                           jax_ep::ffi_cuda::BindStart());
JAX_EP_DEFINE_CUDA_HANDLER(JaxEpCudaLowLatencyDispatchDone,
                           &jax_ep::ffi_cuda::LowLatencyDispatchDone,
                           jax_ep::ffi_cuda::BindDone());
