#ifndef JAX_EP_CSRC_COMM_FABRIC_H_
#define JAX_EP_CSRC_COMM_FABRIC_H_

#include <cstddef>
#include <cstdint>

#include "csrc/core/status.h"

// Device memory of CUDA's virtual memory management that other processes can map by a fabric
// handle: those of this host, and of all hosts of its NVLink domain. See way.h for the Way.
namespace jax_ep::comm {

// Success where memory of `device` can be exported by a fabric handle, else why not. Tries it on
// the least allocation that there is: the device attribute is set, too, where the process has no
// IMEX channel, without which the driver gives no such memory.
Status TryFabric(int device);

// Memory on the current `device`, of `*bytes` rounded up to the device's granularity.
Status AllocateFabric(int device, int64_t* bytes, std::byte** memory);

// Lets kernels on another `device` of this process use memory from AllocateFabric.
Status GrantAccess(int device, std::byte* memory, int64_t bytes);

// Ends a mapping, of this process's memory (which ends with the last one) or of a peer's.
Status UnmapFabric(std::byte* memory, int64_t bytes);

}  // namespace jax_ep::comm

#endif  // JAX_EP_CSRC_COMM_FABRIC_H_
