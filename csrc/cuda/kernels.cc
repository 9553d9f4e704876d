#include "csrc/cuda/kernels.h"

#include <string>

namespace jax_ep::cuda {

Status CheckCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status();
  return Status::Error(std::string(what) + ": " + cudaGetErrorString(error));
}

Status LoadKernels() {
  for (Status (*load)() : {LoadPrepare, LoadDispatch, LoadCombine}) {
    if (Status status = load(); !status.ok()) return status;
  }
  return Status();
}

}  // namespace jax_ep::cuda
