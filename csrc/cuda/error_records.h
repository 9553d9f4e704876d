#ifndef JAX_EP_CSRC_CUDA_ERROR_RECORDS_H_
#define JAX_EP_CSRC_CUDA_ERROR_RECORDS_H_

#include "csrc/core/status.h"
#include "csrc/cuda/workspace.h"

namespace jax_ep::cuda {

// Records in pinned host memory that every device of the process can address. They are used again
// but never freed: a program that XLA replays as a CUDA graph holds the record's address and finds
// out by it that the group is closed.

// A cleared record, owned by `group`. A CUDA device must be current.
Status AcquireErrorRecord(int64_t group, ErrorRecord** record);

// From now on kernels that hold the record find no group in it.
void RetireErrorRecord(ErrorRecord* record);

// Once no kernel runs that began before.
void ReleaseErrorRecord(ErrorRecord* record);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_ERROR_RECORDS_H_
