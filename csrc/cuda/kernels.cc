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

Status LoadKernels() {
  for (Status (*load)() : {LoadPrepare, LoadDispatch, LoadCombine}) {
    if (Status status = load(); !status.ok()) return status;
  }
  return Status();
}

}  // namespace jax_ep::cuda
