#include "csrc/comm/symmetric_memory.h"

#include <cuda_runtime.h>

#include <set>

#include "csrc/comm/on_device.h"

namespace jax_ep::comm {
namespace {

std::vector<const Way*> Ways() { return {&PeerAccess(), &CudaIpc()}; }

std::string Mebibytes(size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

Status AllocateZeros(int device, int64_t bytes, void** memory) {
  const cudaError_t error = cudaMalloc(memory, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free = 0;
    size_t total = 0;
    Status status = CheckCuda(cudaMemGetInfo(&free, &total), "asking for the free memory");
    if (!status.ok()) return status;
    return Status::Error("no room for a workspace of " + Mebibytes(bytes) + " (" +
                         std::to_string(bytes) + " bytes) on device " + DeviceName(device) +
                         ": " + Mebibytes(free) + " of its " + Mebibytes(total) +
                         " are free (XLA_PYTHON_CLIENT_MEM_FRACTION sets what JAX takes for "
                         "itself)");
  }
  Status status = CheckCuda(error, "allocating a workspace on device " + DeviceName(device));
  if (!status.ok()) return status;

  // On a stream of its own: the default one would wait for the program's kernels.
  cudaStream_t stream;
  status = CheckCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  if (status.ok()) {
    status = CheckCuda(cudaMemsetAsync(*memory, 0, bytes, stream), "clearing a workspace");
    if (status.ok()) status = CheckCuda(cudaStreamSynchronize(stream), "clearing a workspace");
    cudaStreamDestroy(stream);
  }
  if (!status.ok()) cudaFree(*memory);
  return status;
}

}  // namespace

Status SymmetricMemory::Allocate(int device, int64_t bytes,
                                 std::unique_ptr<SymmetricMemory>* memory) {
  bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  return OnDevice(device, [&] {
    void* allocated = nullptr;
    Status status = AllocateZeros(device, bytes, &allocated);
    if (!status.ok()) return status;
    memory->reset(new SymmetricMemory(device, static_cast<std::byte*>(allocated)));
    MemoryHandle& handle = (*memory)->handle_;
    status = DescribeMemory(device, allocated, bytes, &handle);
    if (!status.ok()) return status;
    for (const Way* way : Ways()) way->Export(allocated, &handle);
    return status;
  });
}

SymmetricMemory::~SymmetricMemory() {
  Disconnect();
  OnDevice(device_, [&] { return CheckCuda(cudaFree(memory_), "freeing a workspace"); });
}

Status SymmetricMemory::Connect(int32_t rank, const std::vector<std::string>& handles) {
  Status status = OnDevice(device_, [&] {
    for (const std::string& text : handles) {
      const auto at = static_cast<int32_t>(peers_.size());
      MemoryHandle peer;
      Status status = Decode(text, &peer);
      if (status.ok()) {
        if (at == rank) {
          peers_.push_back({nullptr, memory_});
        } else {
          status = Open(peer);
        }
      }
      if (!status.ok()) {
        return Status::Error("rank " + std::to_string(rank) + " cannot reach the memory of rank " +
                             std::to_string(at) + ": " + status.message());
      }
    }
    return Status();
  });
  if (!status.ok()) Disconnect();
  return status;
}

Status SymmetricMemory::Open(const MemoryHandle& peer) {
  if (peer.bytes != handle_.bytes) {
    return Status::Error("it has " + std::to_string(peer.bytes) + " bytes where this rank has " +
                         std::to_string(handle_.bytes));
  }
  for (const Way* way : Ways()) {
    if (!way->Serves(handle_, peer)) continue;
    std::byte* memory = nullptr;
    Status status = way->Open(handle_, peer, &memory);
    if (status.ok()) peers_.push_back({way, memory});
    return status;
  }
  return Status::Error("device " + std::string(peer.device.data()) +
                       " is in another host than device " + handle_.device.data() +
                       "; an NVLink domain that spans hosts needs fabric handles, which this "
                       "version of jax_ep does not have");
}

void SymmetricMemory::Disconnect() {
  if (peers_.empty()) return;
  OnDevice(device_, [&] {
    for (const Peer& peer : peers_) {
      if (peer.way != nullptr) peer.way->Close(peer.memory);
    }
    return Status();
  });
  peers_.clear();
}

std::string SymmetricMemory::transport() const {
  std::set<std::string> names;
  for (const Peer& peer : peers_) {
    if (peer.way != nullptr) names.insert(peer.way->name());
  }
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " + ") + name;
  return text.empty() ? "one rank" : text;
}

}  // namespace jax_ep::comm
