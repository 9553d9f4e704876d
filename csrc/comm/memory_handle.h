#ifndef JAX_EP_CSRC_COMM_MEMORY_HANDLE_H_
#define JAX_EP_CSRC_COMM_MEMORY_HANDLE_H_

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <string>

#include "csrc/core/status.h"

namespace jax_ep::comm {

// What a rank tells the others about its memory. It travels as plain bytes between processes of
// one version of jax_ep.
struct MemoryHandle {
  std::array<char, 8> magic;
  std::array<uint64_t, 2> process;  // random, so that it tells apart processes of any hosts
  std::array<char, 40> host;        // the kernel's boot id: hostnames are not unique
  std::array<char, 128> device;     // its name in error texts
  int32_t device_ordinal;           // has a meaning in its own process only
  int32_t ipc_error;                // a cudaError_t; `ipc` is valid where it is cudaSuccess
  uint64_t address;                 // in its own process
  int64_t bytes;
  cudaIpcMemHandle_t ipc;
};

// The handle of `bytes` at `memory` on the current device, without what a Way adds.
Status DescribeMemory(int device, void* memory, int64_t bytes, MemoryHandle* handle);

std::string Encode(const MemoryHandle& handle);
Status Decode(const std::string& text, MemoryHandle* handle);

}  // namespace jax_ep::comm

#endif  // JAX_EP_CSRC_COMM_MEMORY_HANDLE_H_
