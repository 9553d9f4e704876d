#include "csrc/cuda/kernels.h"

#include <string>

namespace jax_ep::cuda {

Status CheckCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status();
  return Status::Error(std::string(what) + ": " + cudaGetErrorString(error));
}

Status CheckStaging(const MoveArgs& args) {
  const int64_t room = args.common.workspace.layout.staging_row_bytes();
  if (args.staging_row_bytes <= room) return Status();
  return Status::Error("a token's data take " + std::to_string(args.staging_row_bytes) +
                       " bytes, and this Group's workspace has room for " + std::to_string(room));
}

Status CheckLowLatency(const MoveArgs& args) {
  if (!args.common.workspace.layout.low_latency) {
    return Status::Error("this Group has no low-latency buffers: the program was made for another");
  }
  if (args.common.shape.layout == Layout::kRank) {
    return Status::Error("the low-latency path has no layout rank");
  }
  return CheckStaging(args);
}

Status LoadKernels() {
  for (Status (*load)() : {LoadPrepare, LoadDispatch, LoadCombine, LoadLowLatencyDispatch,
                           LoadLowLatencyCombine}) {
    if (Status status = load(); !status.ok()) return status;
  }
  return Status();
}

}  // namespace jax_ep::cuda
