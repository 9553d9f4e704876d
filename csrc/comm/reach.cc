#include "csrc/comm/reach.h"

#include <cuda_runtime.h>

#include "csrc/comm/fabric.h"
#include "csrc/comm/memory_handle.h"
#include "csrc/comm/nvlink_domain.h"
#include "csrc/comm/on_device.h"

namespace jax_ep::comm {

Status GetReach(int device, Reach* reach) {
  Status status = GetHost(&reach->host);
  if (!status.ok()) return status;
  char bus_id[32];
  status = CheckCuda(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device),
                     "looking for CUDA device " + std::to_string(device));
  if (!status.ok()) return status;
  reach->device = DeviceName(device);
  reach->fabric = TryFabric(device);
  reach->domain_obstacle = GetNvlinkDomain(bus_id, &reach->nvlink_domain).message();
  return status;
}

}  // namespace jax_ep::comm
