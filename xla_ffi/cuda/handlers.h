#ifndef JAX_EP_XLA_FFI_CUDA_HANDLERS_H_
#define JAX_EP_XLA_FFI_CUDA_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

// One handler per operation.
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxEpCudaPrepare);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxEpCudaDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxEpCudaCombine);

// The same, but never in a command buffer, where XLA would not let them overlap with compute.
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxEpCudaPrepareUncaptured);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxEpCudaDispatchUncaptured);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxEpCudaCombineUncaptured);

#endif  // JAX_EP_XLA_FFI_CUDA_HANDLERS_H_
