#include "xla_ffi/cuda/call.h"
#include "xla_ffi/cuda/handlers.h"

namespace jax_ep::ffi_cuda {

ffi::Error Prepare(cudaStream_t stream, int64_t group, int32_t layout, int64_t capacity,
                   int64_t expert_alignment, I32 position, I32 topk_idx, ffi::Result<I32> slots,
                   ffi::Result<I32> row_source, ffi::Result<I32> row_topk_idx,
                   ffi::Result<I32> recv_slots, ffi::Result<I32> group_sizes,
                   ffi::Result<I32> expert_counts, ffi::Result<I32> num_rows,
                   ffi::Result<I32> num_dropped) {
  std::shared_ptr<const cuda::Group> held;
  cuda::PrepareArgs args;
  if (Status status = FindCommon(group, layout, capacity, expert_alignment, position,
                                 topk_idx.dimensions()[0], &held, &args.common);
      !status.ok()) {
    return ToError("prepare", status);
  }
  const Shape& shape = args.common.shape;
  Status status = CheckRouting(shape, topk_idx, *slots, *row_source, *row_topk_idx, *recv_slots);
  if (status.ok()) status = CheckElements("group_sizes", *group_sizes, shape.num_local_experts());
  if (!status.ok()) return ToError("prepare", status);
  args.topk_idx = topk_idx.typed_data();
  args.routing = {slots->typed_data(),        row_source->typed_data(),
                  row_topk_idx->typed_data(), recv_slots->typed_data(),
                  group_sizes->typed_data(),  expert_counts->typed_data(),
                  num_rows->typed_data(),     num_dropped->typed_data()};
  return ToError("prepare", cuda::Prepare(stream, args));
}

}  // namespace jax_ep::ffi_cuda

JAX_EP_DEFINE_CUDA_HANDLER(JaxEpCudaPrepare, &jax_ep::ffi_cuda::Prepare,
                           jax_ep::BindPrepare(jax_ep::ffi_cuda::BindCall()));
