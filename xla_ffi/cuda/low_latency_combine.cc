#include "xla_ffi/cuda/call.h"
#include "xla_ffi/cuda/handlers.h"

// The low-latency combine as a whole, its start and its done. Operands: [the ticket,] the routing,
// the rows of each leaf and, if `values` is kWeights, the row weights; of a done, then `num_after`
// arrays that XLA computes before it and nobody reads. Results: the ticket, or the leaves [T, ...].
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
  I32 slots;
  I32 row_source;
  I32 row_topk_idx;
  I32 recv_slots;
  Values values;
  ffi::RemainingArgs payload;
  int32_t num_after = 0;
};

Status SetOperands(const Operands& operands, std::shared_ptr<const cuda::Group>* held,
                   cuda::LowLatencyCombineArgs* args) {
  cuda::MoveArgs& move = args->move;
  if (Status status = FindCommon(operands.group, operands.layout, operands.capacity,
                                 operands.expert_alignment, operands.position,
                                 operands.topk_idx.dimensions()[0], held, &move.common);
      !status.ok()) {
    return status;
  }
  const Shape& shape = move.common.shape;
  if (Status status = CheckRouting(shape, operands.topk_idx, operands.slots, operands.row_source,
                                   operands.row_topk_idx, operands.recv_slots);
      !status.ok()) {
    return status;
  }
  SetRouting(&move, operands.topk_idx, operands.slots, operands.row_source,
             operands.row_topk_idx, operands.recv_slots);
  if (operands.values == Values::kMoved) return Status::Error("it returns no values");
  const bool has_weights = operands.values == Values::kWeights;
  const size_t num_operands = operands.payload.size() - operands.num_after;
  if (has_weights && num_operands == 0) return Status::Error("there are no weights");
  const size_t num_leaves = num_operands - (has_weights ? 1 : 0);
  if (num_leaves > cuda::kMaxLeaves) {
    return Status::Error("it sums at most " + std::to_string(cuda::kMaxLeaves) + " leaves, got " +
                         std::to_string(num_leaves));
  }
  const size_t row_dimensions = shape.layout == Layout::kPadded ? 2 : 1;
  for (size_t i = 0; i < num_leaves; ++i) {
    const ffi::AnyBuffer rows = *operands.payload.get<ffi::AnyBuffer>(i);
    const auto dtype = ToDType(rows.element_type());
    if (!dtype) return Status::Error("rows of a dtype that it does not sum");
    if (i > 0 && *dtype != move.dtype) return Status::Error("it sums leaves of one dtype only");
    const int64_t elements = RowElements(rows, row_dimensions);
    if (Status status = CheckElements("a leaf of rows", rows, shape.num_rows() * elements);
        !status.ok()) {
      return status;
    }
    move.dtype = *dtype;
    AddLeaf(&move, nullptr, Data(rows), elements * ElementBytes(rows));
  }
  if (!has_weights) return Status();
  const ffi::AnyBuffer weights = *operands.payload.get<ffi::AnyBuffer>(num_leaves);
  return FirstError({CheckElements("the values per pair", weights, shape.num_rows()),
                     SetWeights(&move, weights)});
}

// The results of the whole and of done; the operands are set.
Status SetResults(ffi::RemainingRets leaves, cuda::LowLatencyCombineArgs* args) {
  cuda::MoveArgs& move = args->move;
  if (static_cast<int32_t>(leaves.size()) != move.num_leaves) {
    return Status::Error("operands and results do not match");
  }
  for (int32_t i = 0; i < move.num_leaves; ++i) {
    const ffi::AnyBuffer tokens = **leaves.get<ffi::AnyBuffer>(i);
    cuda::Leaf& leaf = move.leaves[i];
    if (ToDType(tokens.element_type()) != move.dtype) {
      return Status::Error("operands and results do not match");
    }
    if (Status status =
            CheckElements("a leaf of tokens", tokens,
                          move.common.num_tokens * (leaf.row_bytes / ElementBytes(tokens)));
        !status.ok()) {
      return status;
    }
    leaf.tokens = Data(tokens);
  }
  return Status();
}

// Launches the whole, the start, which has no results, or the done.
ffi::Error Run(const char* name, cudaStream_t stream, const Operands& operands, const U32* ticket,
               const ffi::RemainingRets* leaves) {
  std::shared_ptr<const cuda::Group> held;
  cuda::LowLatencyCombineArgs args;
  Status status = SetOperands(operands, &held, &args);
  if (status.ok() && leaves != nullptr) status = SetResults(*leaves, &args);
  if (status.ok() && ticket != nullptr) {
    status = SetTicket(*ticket, leaves == nullptr, &args.split);
  }
  if (status.ok()) status = cuda::LowLatencyCombine(stream, args);
  return ToError(name, status);
}

ffi::Error LowLatencyCombine(cudaStream_t stream, int64_t group, int32_t layout, int64_t capacity,
                             int64_t expert_alignment, I32 position, I32 topk_idx, I32 slots,
                             I32 row_source, I32 row_topk_idx, I32 recv_slots, int32_t values,
                             ffi::RemainingArgs payload, ffi::RemainingRets leaves) {
  return Run("low-latency combine", stream,
             {group, layout, capacity, expert_alignment, position, topk_idx, slots, row_source,
              row_topk_idx, recv_slots, static_cast<Values>(values), payload},
             nullptr, &leaves);
}

ffi::Error LowLatencyCombineStart(cudaStream_t stream, int64_t group, int32_t layout,
                                  int64_t capacity, int64_t expert_alignment, I32 position,
                                  I32 topk_idx, I32 slots, I32 row_source, I32 row_topk_idx,
                                  I32 recv_slots, int32_t values, ffi::RemainingArgs payload,
                                  ffi::Result<U32> ticket) {
  return Run("combine_start", stream,
             {group, layout, capacity, expert_alignment, position, topk_idx, slots, row_source,
              row_topk_idx, recv_slots, static_cast<Values>(values), payload},
             &*ticket, nullptr);
}

ffi::Error LowLatencyCombineDone(cudaStream_t stream, int64_t group, int32_t layout,
                                 int64_t capacity, int64_t expert_alignment, I32 position,
                                 U32 ticket, int32_t num_after, I32 topk_idx, I32 slots,
                                 I32 row_source, I32 row_topk_idx, I32 recv_slots, int32_t values,
                                 ffi::RemainingArgs payload, ffi::RemainingRets leaves) {
  return Run("combine_done", stream,
             {group, layout, capacity, expert_alignment, position, topk_idx, slots, row_source,
              row_topk_idx, recv_slots, static_cast<Values>(values), payload, num_after},
             &ticket, &leaves);
}

auto BindWhole() { return BindLowLatencyCombine(BindCall()).RemainingRets(); }
auto BindStart() { return BindLowLatencyCombine(BindCall()).Ret<U32>(); }
auto BindDone() { return BindLowLatencyCombine(BindTicket(BindCall())).RemainingRets(); }

}  // namespace
}  // namespace jax_ep::ffi_cuda

JAX_EP_DEFINE_CUDA_HANDLER(JaxEpCudaLowLatencyCombine, &jax_ep::ffi_cuda::LowLatencyCombine,
                           jax_ep::ffi_cuda::BindWhole());
JAX_EP_DEFINE_CUDA_HANDLER(JaxEpCudaLowLatencyCombineStart,
                           &jax_ep::ffi_cuda::LowLatencyCombineStart,
                           jax_ep::ffi_cuda::BindStart());
JAX_EP_DEFINE_CUDA_HANDLER(JaxEpCudaLowLatencyCombineDone,
                           &jax_ep::ffi_cuda::LowLatencyCombineDone,
                           jax_ep::ffi_cuda::BindDone());
