#ifndef JAX_EP_CSRC_COMM_ON_DEVICE_H_
#define JAX_EP_CSRC_COMM_ON_DEVICE_H_

#include <cuda_runtime.h>

#include <functional>
#include <string>

#include "csrc/core/status.h"

namespace jax_ep::comm {

// Success, or an error "<what>: <CUDA's text>".
Status CheckCuda(cudaError_t error, const std::string& what);

// "0 (NVIDIA H200, 0000:1B:00.0)": how error texts name a device of this process.
std::string DeviceName(int device);

// Runs `body` where the current CUDA device is `device`: on a thread of its own, so that the
// caller's thread keeps the context that it has, or has not. (Setting the old device again would
// create a context on device 0 where there was none.)
Status OnDevice(int device, const std::function<Status()>& body);

}  // namespace jax_ep::comm

#endif  // JAX_EP_CSRC_COMM_ON_DEVICE_H_
