#include "csrc/comm/memory_handle.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>
#include <type_traits>

#include "csrc/comm/on_device.h"

namespace jax_ep::comm {
namespace {

static_assert(std::is_trivially_copyable_v<MemoryHandle>);

constexpr std::array<char, 8> kMagic = {'j', 'a', 'x', '_', 'e', 'p', '0', '2'};

template <size_t N>
void Store(const std::string& text, std::array<char, N>* field) {
  field->fill(0);
  std::copy_n(text.begin(), std::min(text.size(), N - 1), field->begin());
}

std::array<uint64_t, 2> NewProcessTag() {
  std::random_device random;
  const auto word = [&] { return static_cast<uint64_t>(random()) << 32 | random(); };
  return {word(), word()};
}

}  // namespace

Status GetHost(std::string* host) {
  host->clear();
  std::ifstream("/proc/sys/kernel/random/boot_id") >> *host;
  if (!host->empty()) return Status();
  return Status::Error("this system has no /proc/sys/kernel/random/boot_id");
}

Status DescribeMemory(MemoryKind kind, int device, std::byte* memory, int64_t bytes,
                      int64_t allocated_bytes, MemoryHandle* handle) {
  static const std::array<uint64_t, 2> process = NewProcessTag();
  std::string host;
  Status status = GetHost(&host);
  if (!status.ok()) return status;
  *handle = {};
  handle->magic = kMagic;
  handle->process = process;
  Store(host, &handle->host);
  Store(DeviceName(device), &handle->device);
  handle->device_ordinal = device;
  handle->kind = kind;
  handle->ipc_error = cudaErrorNotSupported;
  handle->fabric_error = CUDA_ERROR_NOT_SUPPORTED;
  handle->address = reinterpret_cast<uint64_t>(memory);
  handle->bytes = bytes;
  handle->allocated_bytes = allocated_bytes;
  return status;
}

std::string Encode(const MemoryHandle& handle) {
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

Status Decode(const std::string& text, MemoryHandle* handle) {
  if (text.size() == sizeof(*handle)) {
    std::memcpy(handle, text.data(), sizeof(*handle));
    if (handle->magic == kMagic) return Status();
  }
  return Status::Error("a peer's memory handle is not one of this version of jax_ep");
}

}  // namespace jax_ep::comm
