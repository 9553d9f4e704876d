#include "csrc/comm/device_memory.h"

#include <string>

#include "csrc/comm/fabric.h"
#include "csrc/comm/on_device.h"

namespace jax_ep::comm {
namespace {

std::string Mebibytes(size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

Status Allocate(MemoryKind kind, int device, int64_t* bytes, std::byte** memory) {
  if (kind == MemoryKind::kFabric) return AllocateFabric(device, bytes, memory);
  return CheckAllocation(cudaMalloc(reinterpret_cast<void**>(memory), *bytes), device, *bytes);
}

// On a stream of its own: the default one would wait for the program's kernels.
Status Clear(std::byte* memory, int64_t bytes) {
  cudaStream_t stream;
  Status status = CheckCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                            "making a stream");
  if (!status.ok()) return status;
  status = CheckCuda(cudaMemsetAsync(memory, 0, bytes, stream), "clearing a workspace");
  if (status.ok()) status = CheckCuda(cudaStreamSynchronize(stream), "clearing a workspace");
  cudaStreamDestroy(stream);
  return status;
}

}  // namespace

Status AllocateZeros(MemoryKind kind, int device, int64_t* bytes, std::byte** memory) {
  Status status = Allocate(kind, device, bytes, memory);
  if (!status.ok()) return status;
  status = Clear(*memory, *bytes);
  if (!status.ok()) Free(kind, *memory, *bytes);
  return status;
}

Status Free(MemoryKind kind, std::byte* memory, int64_t bytes) {
  if (kind == MemoryKind::kFabric) return UnmapFabric(memory, bytes);
  return CheckCuda(cudaFree(memory), "freeing a workspace");
}

Status CheckAllocation(cudaError_t error, int device, int64_t bytes) {
  if (error != cudaErrorMemoryAllocation) {
    return CheckCuda(error, "allocating a workspace on device " + DeviceName(device));
  }
  cudaGetLastError();
  size_t free = 0;
  size_t total = 0;
  Status status = CheckCuda(cudaMemGetInfo(&free, &total), "asking for the free memory");
  if (!status.ok()) return status;
  return Status::Error("no room for a workspace of " + Mebibytes(bytes) + " (" +
                       std::to_string(bytes) + " bytes) on device " + DeviceName(device) + ": " +
                       Mebibytes(free) + " of its " + Mebibytes(total) +
                       " are free (XLA_PYTHON_CLIENT_MEM_FRACTION sets what JAX takes for itself)");
}

}  // namespace jax_ep::comm
