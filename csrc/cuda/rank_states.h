#ifndef JAX_EP_CSRC_CUDA_RANK_STATES_H_
#define JAX_EP_CSRC_CUDA_RANK_STATES_H_

#include <cstdint>

#include "csrc/core/status.h"
#include "csrc/cuda/workspace.h"

// The RankStates of this process, in device memory that is used again but never freed: a program
// that XLA replays as a CUDA graph runs no handler, holds the state's address, and must find out by
// it that its group is closed. The device must be current (comm::OnDevice).
namespace jax_ep::cuda {

// A zero state on `device`, owned by `group`.
Status AcquireRankState(int device, int64_t group, RankState** state);

// From now on kernels find no group in it.
Status RetireRankState(RankState* state);

// Once no kernel runs that began before.
void ReleaseRankState(int device, RankState* state);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_RANK_STATES_H_
