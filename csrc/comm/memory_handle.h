#ifndef JAX_EP_CSRC_COMM_MEMORY_HANDLE_H_
#define JAX_EP_CSRC_COMM_MEMORY_HANDLE_H_

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "csrc/core/status.h"

namespace jax_ep::comm {

// How a rank's memory is allocated, which decides the ways to reach it. All ranks of a group have
// the same.
enum class MemoryKind : int32_t {
  kIpc,     // cudaMalloc: peer access within a process, CUDA IPC within a host
  kFabric,  // for fabric handles: within an NVLink domain, also one that spans hosts
};

// What a rank tells the others about its memory. It travels as plain bytes between processes of
// one version of jax_ep.
struct MemoryHandle {
  std::array<char, 8> magic;
  std::array<uint64_t, 2> process;  // random, so that it tells apart processes of any hosts
  std::array<char, 40> host;        // see GetHost
  std::array<char, 128> device;     // its name in error texts
  int32_t device_ordinal;           // has a meaning in its own process only
  MemoryKind kind;
  int32_t ipc_error;                // a cudaError_t; `ipc` is valid where it is cudaSuccess
  int32_t fabric_error;             // a CUresult; the same for `fabric`
  uint64_t address;                 // in its own process
  int64_t bytes;                    // that the group uses, equal on all ranks
  int64_t allocated_bytes;
  cudaIpcMemHandle_t ipc;
  CUmemFabricHandle fabric;
};

// A name of this host that no other has, also where hostnames are equal: the kernel's boot id.
Status GetHost(std::string* host);

// The handle of memory on the current device, without what a Way adds.
Status DescribeMemory(MemoryKind kind, int device, std::byte* memory, int64_t bytes,
                      int64_t allocated_bytes, MemoryHandle* handle);

std::string Encode(const MemoryHandle& handle);
Status Decode(const std::string& text, MemoryHandle* handle);

}  // namespace jax_ep::comm

#endif  // JAX_EP_CSRC_COMM_MEMORY_HANDLE_H_
