#ifndef JAX_EP_CSRC_COMM_DEVICE_MEMORY_H_
#define JAX_EP_CSRC_COMM_DEVICE_MEMORY_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "csrc/comm/memory_handle.h"
#include "csrc/core/status.h"

namespace jax_ep::comm {

// Zero bytes on the current `device`; `*bytes` grows to what the allocation has.
Status AllocateZeros(MemoryKind kind, int device, int64_t* bytes, std::byte** memory);
Status Free(MemoryKind kind, std::byte* memory, int64_t bytes);

// Success, or an error that says how much memory `device`, the current one, has left for `bytes`.
Status CheckAllocation(cudaError_t error, int device, int64_t bytes);

}  // namespace jax_ep::comm

#endif  // JAX_EP_CSRC_COMM_DEVICE_MEMORY_H_
