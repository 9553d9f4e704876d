#ifndef JAX_EP_XLA_FFI_CPU_HANDLERS_H_
#define JAX_EP_XLA_FFI_CPU_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

// One handler per operation, and the one that makes a custom call's Instance.
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxEpCpuInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxEpCpuPrepare);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxEpCpuDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxEpCpuCombine);

#endif  // JAX_EP_XLA_FFI_CPU_HANDLERS_H_
