#include <cuda_runtime.h>

#include "csrc/comm/fabric.h"
#include "csrc/comm/on_device.h"
#include "csrc/comm/way.h"

namespace jax_ep::comm {
namespace {

std::string Between(const MemoryHandle& mine, const MemoryHandle& peer) {
  return "device " + std::string(mine.device.data()) + " to device " + peer.device.data();
}

class PeerAccessWay : public Way {
 public:
  const char* name() const override { return "peer access"; }

  void Export(std::byte*, MemoryHandle*) const override {}

  bool Serves(const MemoryHandle& mine, const MemoryHandle& peer) const override {
    return mine.process == peer.process;
  }

  Status Open(const MemoryHandle& mine, const MemoryHandle& peer,
              std::byte** memory) const override {
    *memory = reinterpret_cast<std::byte*>(peer.address);
    if (mine.device_ordinal == peer.device_ordinal) return Status();
    int possible = 0;
    Status status = CheckCuda(
        cudaDeviceCanAccessPeer(&possible, mine.device_ordinal, peer.device_ordinal),
        "looking for peer access from " + Between(mine, peer));
    if (!status.ok()) return status;
    if (!possible) return Status::Error("there is no peer access from " + Between(mine, peer));
    if (peer.kind == MemoryKind::kFabric) {
      return GrantAccess(mine.device_ordinal, *memory, peer.allocated_bytes);
    }
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer.device_ordinal, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
      return Status();
    }
    return CheckCuda(error, "enabling peer access from " + Between(mine, peer));
  }

  // Peer access stays: others in this process, XLA among them, may be using it.
  void Close(std::byte*, int64_t) const override {}
};

}  // namespace

const Way& PeerAccess() {
  static const PeerAccessWay way;
  return way;
}

}  // namespace jax_ep::comm
