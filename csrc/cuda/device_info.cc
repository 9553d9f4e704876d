#include "csrc/cuda/device_info.h"

#include <cuda_runtime.h>

#include "csrc/comm/on_device.h"

namespace jax_ep::cuda {
namespace {

std::string Hexadecimal(const cudaUUID_t& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : uuid.bytes) {
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

cudaError_t Describe(int device, int count, DeviceInfo* info) {
  cudaDeviceProp properties;
  cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return error;
  info->name = properties.name;
  info->uuid = Hexadecimal(properties.uuid);
  info->major = properties.major;
  info->minor = properties.minor;
  info->num_sms = properties.multiProcessorCount;
  info->total_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  char bus_id[32];
  error = cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device);
  if (error != cudaSuccess) return error;
  info->pci_bus_id = bus_id;
  for (int other = 0; other < count; ++other) {
    int possible = other == device;
    if (other != device) error = cudaDeviceCanAccessPeer(&possible, device, other);
    if (error != cudaSuccess) return error;
    info->peer_access.push_back(possible != 0);
  }
  return cudaSuccess;
}

}  // namespace

MachineInfo GetMachineInfo() {
  MachineInfo info;
  int count = 0;
  cudaError_t error = cudaRuntimeGetVersion(&info.runtime_version);
  if (error == cudaSuccess) error = cudaDriverGetVersion(&info.driver_version);
  if (error == cudaSuccess) error = cudaGetDeviceCount(&count);
  for (int device = 0; device < count && error == cudaSuccess; ++device) {
    info.devices.emplace_back();
    error = Describe(device, count, &info.devices.back());
  }
  if (error != cudaSuccess) {
    cudaGetLastError();
    info.devices.clear();
    info.obstacle = cudaGetErrorString(error);
  } else if (count == 0) {
    info.obstacle = "no CUDA device is visible";
  }
  return info;
}

Status GetFreeBytes(int device, int64_t* bytes) {
  return comm::OnDevice(device, [&] {
    size_t free = 0;
    size_t total = 0;
    Status status = comm::CheckCuda(cudaMemGetInfo(&free, &total), "asking for the free memory");
    *bytes = static_cast<int64_t>(free);
    return status;
  });
}

}  // namespace jax_ep::cuda
