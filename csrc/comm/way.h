#ifndef JAX_EP_CSRC_COMM_WAY_H_
#define JAX_EP_CSRC_COMM_WAY_H_

#include <cstddef>
#include <cstdint>

#include "csrc/comm/memory_handle.h"
#include "csrc/core/status.h"

namespace jax_ep::comm {

// A way to reach the memory of another rank. Each has a file of its own, and its place in the list
// of symmetric_memory.cc, from which the first that serves a peer is taken. All run with the
// rank's own device current.
class Way {
 public:
  virtual ~Way() = default;

  virtual const char* name() const = 0;

  // Adds to the handle of this rank's `memory` what peers need to take this way. A failure is
  // noted in the handle: most peers do not need every way.
  virtual void Export(std::byte* memory, MemoryHandle* handle) const = 0;

  virtual bool Serves(const MemoryHandle& mine, const MemoryHandle& peer) const = 0;

  // The peer's memory as this rank's kernels address it.
  virtual Status Open(const MemoryHandle& mine, const MemoryHandle& peer,
                      std::byte** memory) const = 0;
  // `bytes` are the peer's allocated_bytes.
  virtual void Close(std::byte* memory, int64_t bytes) const = 0;
};

const Way& PeerAccess();  // between the devices of one process
const Way& CudaIpc();     // between processes of one host, also on one device
const Way& Fabric();      // between processes of one NVLink domain, which may span hosts

}  // namespace jax_ep::comm

#endif  // JAX_EP_CSRC_COMM_WAY_H_
