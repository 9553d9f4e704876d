#ifndef JAX_EP_CSRC_CUDA_LAUNCH_CUH_
#define JAX_EP_CSRC_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstdlib>
#include <string>

#include "csrc/cuda/kernels.h"

namespace jax_ep::cuda {

// Dynamic shared memory that a block of `kernel` can have on the current device.
template <typename Kernel>
int64_t MaxSharedBytes(Kernel kernel) {
  int device = 0;
  int limit = 0;
  cudaFuncAttributes attributes{};
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess ||
      cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    return 0;
  }
  return limit - static_cast<int64_t>(attributes.sharedSizeBytes);
}

// Whether the current device has the tensor memory accelerator. JAX_EP_NO_TMA=1 says no, so that the
// other path can be tested anywhere.
inline bool HasBulkCopies() {
  static const bool forbidden = [] {
    const char* value = std::getenv("JAX_EP_NO_TMA");
    return value != nullptr && value[0] != '\0' && value[0] != '0';
  }();
  int device = 0;
  int major = 0;
  return !forbidden && cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
             cudaSuccess &&
         major >= 9;
}

// Loads `kernel` on the current device and lets it use all shared memory.
template <typename Kernel>
Status Load(Kernel kernel) {
  const int64_t bytes = MaxSharedBytes(kernel);
  return CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(bytes)),
                   "loading a kernel");
}

template <typename Args>
Status Launch(void (*kernel)(Args), int blocks, int threads, int64_t shared_bytes,
              cudaStream_t stream, const Args& args) {
  kernel<<<blocks, threads, shared_bytes, stream>>>(args);
  return CheckCuda(cudaGetLastError(), "launching a kernel");
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_LAUNCH_CUH_
