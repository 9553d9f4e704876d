#include "csrc/cpu/prepare.h"

#include "xla_ffi/cpu/handlers.h"
#include "xla_ffi/cpu/meet.h"

namespace jax_ep::ffi_cpu {

ffi::Future Prepare(Instance* instance, ffi::RunId run_id, ffi::ThreadPool threads,
                    int64_t group, int32_t layout, int64_t capacity, int64_t expert_alignment,
                    I32 position, I32 topk_idx, ffi::Result<I32> slots,
                    ffi::Result<I32> row_source, ffi::Result<I32> row_topk_idx,
                    ffi::Result<I32> recv_slots, ffi::Result<I32> group_sizes,
                    ffi::Result<I32> expert_counts, ffi::Result<I32> num_rows,
                    ffi::Result<I32> num_dropped) {
  const Call call{"prepare", group, layout,   capacity, expert_alignment,
                  position,  run_id, instance, &threads};
  cpu::PrepareArgs args;
  args.num_tokens = topk_idx.dimensions()[0];
  args.topk_idx = topk_idx.typed_data();
  args.slots = slots->typed_data();
  args.row_source = row_source->typed_data();
  args.row_topk_idx = row_topk_idx->typed_data();
  args.recv_slots = recv_slots->typed_data();
  args.group_sizes = group_sizes->typed_data();
  args.expert_counts = expert_counts->typed_data();
  args.num_rows = num_rows->typed_data();
  args.num_dropped = num_dropped->typed_data();

  // Integers only, and every slot depends on the pairs before it: one range.
  Work<cpu::PrepareArgs> work;
  work.check = [&](const Shape& shape) {
    Status status = CheckRouting(shape, topk_idx, *slots, *row_source, *row_topk_idx, *recv_slots);
    return status.ok() ? CheckElements("group_sizes", *group_sizes, shape.num_local_experts())
                       : status;
  };
  work.items = [](const Shape&, const cpu::PrepareArgs&) { return 1; };
  work.run = [](const Shape& shape, const std::vector<cpu::PrepareArgs>& ranks, int32_t rank,
                int64_t, int64_t) { return rank == 0 ? cpu::Prepare(shape, ranks) : Status(); };
  return Meet(call, std::move(args), std::move(work));
}

}  // namespace jax_ep::ffi_cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpCpuPrepare, &jax_ep::ffi_cpu::Prepare,
                              jax_ep::BindPrepare(jax_ep::ffi_cpu::BindCall()));
