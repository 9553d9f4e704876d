#include "csrc/comm/symmetric_memory.h"

#include <set>

#include "csrc/comm/device_memory.h"
#include "csrc/comm/on_device.h"

namespace jax_ep::comm {
namespace {

std::vector<const Way*> Ways() { return {&PeerAccess(), &CudaIpc(), &Fabric()}; }

}  // namespace

Status SymmetricMemory::Allocate(MemoryKind kind, int device, int64_t bytes,
                                 std::unique_ptr<SymmetricMemory>* memory) {
  bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  return OnDevice(device, [&] {
    std::byte* allocated = nullptr;
    int64_t allocated_bytes = bytes;
    Status status = AllocateZeros(kind, device, &allocated_bytes, &allocated);
    if (!status.ok()) return status;
    MemoryHandle handle;
    status = DescribeMemory(kind, device, allocated, bytes, allocated_bytes, &handle);
    if (status.ok()) {
      for (const Way* way : Ways()) way->Export(allocated, &handle);
      memory->reset(new SymmetricMemory(device, allocated, handle));
    } else {
      Free(kind, allocated, allocated_bytes);
    }
    return status;
  });
}

SymmetricMemory::~SymmetricMemory() {
  Disconnect();
  OnDevice(device_, [&] { return Free(handle_.kind, memory_, handle_.allocated_bytes); });
}

Status SymmetricMemory::Connect(int32_t rank, const std::vector<std::string>& handles) {
  Status status = OnDevice(device_, [&] {
    for (const std::string& text : handles) {
      const auto at = static_cast<int32_t>(peers_.size());
      MemoryHandle peer;
      Status status = Decode(text, &peer);
      if (status.ok()) {
        if (at == rank) {
          peers_.push_back({nullptr, memory_, 0});
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
  if (peer.kind != handle_.kind) return Status::Error("it has another kind of memory");
  for (const Way* way : Ways()) {
    if (!way->Serves(handle_, peer)) continue;
    std::byte* memory = nullptr;
    Status status = way->Open(handle_, peer, &memory);
    if (status.ok()) peers_.push_back({way, memory, peer.allocated_bytes});
    return status;
  }
  return Status::Error("device " + std::string(peer.device.data()) +
                       " is in another host than device " + handle_.device.data() +
                       ", which CUDA IPC does not reach");
}

void SymmetricMemory::Disconnect() {
  if (peers_.empty()) return;
  OnDevice(device_, [&] {
    for (const Peer& peer : peers_) {
      if (peer.way != nullptr) peer.way->Close(peer.memory, peer.bytes);
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
