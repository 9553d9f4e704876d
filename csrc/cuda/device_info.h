#ifndef JAX_EP_CSRC_CUDA_DEVICE_INFO_H_
#define JAX_EP_CSRC_CUDA_DEVICE_INFO_H_

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/core/status.h"

namespace jax_ep::cuda {

struct DeviceInfo {
  std::string name;
  std::string uuid;  // hexadecimal; equal for one device seen by several processes
  std::string pci_bus_id;
  int32_t major = 0;  // compute capability
  int32_t minor = 0;
  int32_t num_sms = 0;
  int64_t total_bytes = 0;
  // By the other's ordinal: whether this device reaches that one's memory. True for itself.
  std::vector<bool> peer_access;
};

struct MachineInfo {
  int32_t runtime_version = 0;  // as CUDA counts: 13000 for 13.0; linked into this module
  int32_t driver_version = 0;   // the newest CUDA that the driver knows; 0 without a driver
  std::string obstacle;         // why there are no devices; empty where there are
  std::vector<DeviceInfo> devices;
};

// What this process can see. Creates no context.
MachineInfo GetMachineInfo();

// Device memory that nobody has, in all processes.
Status GetFreeBytes(int device, int64_t* bytes);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_DEVICE_INFO_H_
