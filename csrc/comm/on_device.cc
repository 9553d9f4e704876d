#include "csrc/comm/on_device.h"

#include <thread>

namespace jax_ep::comm {

Status CheckCuda(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return Status();
  cudaGetLastError();  // or the next kernel launch would report it once more
  return Status::Error(what + ": " + cudaGetErrorString(error));
}

std::string DeviceName(int device) {
  std::string text = std::to_string(device);
  cudaDeviceProp properties;
  char bus_id[32];
  if (cudaGetDeviceProperties(&properties, device) == cudaSuccess &&
      cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device) == cudaSuccess) {
    text += " (" + std::string(properties.name) + ", " + bus_id + ")";
  }
  return text;
}

Status OnDevice(int device, const std::function<Status()>& body) {
  Status status;
  std::thread thread([&] {
    status = CheckCuda(cudaSetDevice(device), "cannot use CUDA device " + std::to_string(device));
    if (status.ok()) status = body();
  });
  thread.join();
  return status;
}

}  // namespace jax_ep::comm
