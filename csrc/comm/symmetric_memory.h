#ifndef JAX_EP_CSRC_COMM_SYMMETRIC_MEMORY_H_
#define JAX_EP_CSRC_COMM_SYMMETRIC_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/comm/memory_handle.h"
#include "csrc/comm/way.h"
#include "csrc/core/status.h"

namespace jax_ep::comm {

// Device memory of one rank that the kernels of all ranks can address: as many bytes on each.
//
// Every rank allocates, tells all others its handle, and connects. To end it, every rank
// disconnects and, once all have, destroys: freeing memory that another process still has open is
// undefined in CUDA IPC.
class SymmetricMemory {
 public:
  // Allocations are a multiple of this, the driver's page size: CUDA IPC shares whole pages.
  static constexpr int64_t kGranularity = int64_t{2} << 20;

  // At least `bytes` zero bytes on `device`.
  static Status Allocate(MemoryKind kind, int device, int64_t bytes,
                         std::unique_ptr<SymmetricMemory>* memory);
  ~SymmetricMemory();
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  // For the peers; valid in any process.
  std::string handle() const { return Encode(handle_); }

  // Opens the memory of all ranks by their handles, in rank order. After an error nothing is open.
  Status Connect(int32_t rank, const std::vector<std::string>& handles);
  void Disconnect();

  // A rank's memory as this rank's kernels address it. Connected only.
  std::byte* base(int32_t rank) const { return peers_[rank].memory; }

  // The ways that were taken, for people: "peer access", "CUDA IPC + peer access", ...
  std::string transport() const;

 private:
  struct Peer {
    const Way* way;  // null for this rank itself
    std::byte* memory;
    int64_t bytes;
  };

  SymmetricMemory(int device, std::byte* memory, const MemoryHandle& handle)
      : device_(device), memory_(memory), handle_(handle) {}
  Status Open(const MemoryHandle& peer);

  const int device_;
  std::byte* const memory_;
  const MemoryHandle handle_;
  std::vector<Peer> peers_;  // by rank
};

}  // namespace jax_ep::comm

#endif  // JAX_EP_CSRC_COMM_SYMMETRIC_MEMORY_H_
