#include <cuda_runtime.h>

#include "csrc/comm/on_device.h"
#include "csrc/comm/way.h"

namespace jax_ep::comm {
namespace {

class CudaIpcWay : public Way {
 public:
  const char* name() const override { return "CUDA IPC"; }

  void Export(std::byte* memory, MemoryHandle* handle) const override {
    if (handle->kind != MemoryKind::kIpc) return;
    handle->ipc_error = cudaIpcGetMemHandle(&handle->ipc, memory);
    if (handle->ipc_error != cudaSuccess) cudaGetLastError();
  }

  bool Serves(const MemoryHandle& mine, const MemoryHandle& peer) const override {
    return mine.process != peer.process && mine.host == peer.host &&
           peer.kind == MemoryKind::kIpc;
  }

  // The peer's device need not be visible to this process, so its ordinal says nothing here.
  Status Open(const MemoryHandle& mine, const MemoryHandle& peer,
              std::byte** memory) const override {
    if (peer.ipc_error != cudaSuccess) {
      return Status::Error("its process could not export the memory on device " +
                           std::string(peer.device.data()) + " by CUDA IPC: " +
                           cudaGetErrorString(static_cast<cudaError_t>(peer.ipc_error)));
    }
    void* opened = nullptr;
    Status status = CheckCuda(
        cudaIpcOpenMemHandle(&opened, peer.ipc, cudaIpcMemLazyEnablePeerAccess),
        "opening by CUDA IPC, on device " + std::string(mine.device.data()) +
            ", memory of another process on device " + peer.device.data());
    *memory = static_cast<std::byte*>(opened);
    return status;
  }

  void Close(std::byte* memory, int64_t) const override {
    if (cudaIpcCloseMemHandle(memory) != cudaSuccess) cudaGetLastError();
  }
};

}  // namespace

const Way& CudaIpc() {
  static const CudaIpcWay way;
  return way;
}

}  // namespace jax_ep::comm
