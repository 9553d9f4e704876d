#ifndef JAX_EP_CSRC_CUDA_ERROR_TEXT_H_
#define JAX_EP_CSRC_CUDA_ERROR_TEXT_H_

#include <string>

#include "csrc/cuda/workspace.h"

namespace jax_ep::cuda {

// What a set record says, for people: "jax_ep dispatch on axis expert: rank 0 waited ...".
std::string ErrorText(const ErrorRecord& record, const std::string& axis, double timeout_s);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_ERROR_TEXT_H_
