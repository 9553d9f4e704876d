#include "csrc/comm/nvlink_domain.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <type_traits>

namespace jax_ep::comm {
namespace {

constexpr unsigned char kNotSupported = 0;
constexpr unsigned char kCompleted = 3;

// Of nvml.h, which toolkits need not have.
struct NvmlDevice;
struct Nvml {
  int (*init)();
  int (*shutdown)();
  int (*get_handle)(const char* pci_bus_id, NvmlDevice** device);
  int (*get_fabric_info)(NvmlDevice* device, FabricInfo* info);
};
static_assert(sizeof(FabricInfo) == 28);

Status LoadNvml(Nvml* nvml) {
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return Status::Error("NVML (libnvidia-ml.so.1) was not found");
  Status status;
  const auto find = [&](const char* symbol, auto* function) {
    *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(library, symbol));
    if (*function == nullptr && status.ok()) {
      status = Status::Error("the NVIDIA driver is too old: its NVML has no " +
                             std::string(symbol));
    }
  };
  find("nvmlInit_v2", &nvml->init);
  find("nvmlShutdown", &nvml->shutdown);
  find("nvmlDeviceGetHandleByPciBusId_v2", &nvml->get_handle);
  find("nvmlDeviceGetGpuFabricInfo", &nvml->get_fabric_info);
  return status;
}

Status CheckNvml(int error, const char* what) {
  if (error == 0) return Status();
  return Status::Error(std::string(what) + ": NVML's error " + std::to_string(error));
}

}  // namespace

Status DomainOf(const FabricInfo& info, std::string* domain) {
  if (info.state == kNotSupported) return Status::Error("the GPU is in no NVLink fabric");
  if (info.state != kCompleted) {
    return Status::Error("the fabric manager has not registered the GPU (yet): its state is " +
                         std::to_string(info.state));
  }
  if (info.status != 0) return CheckNvml(info.status, "registering the GPU in the fabric failed");
  const auto& uuid = info.cluster_uuid;
  if (std::all_of(uuid.begin(), uuid.end(), [](unsigned char byte) { return byte == 0; })) {
    return Status::Error("the GPU's NVLink fabric is within its host");
  }
  char text[3];
  domain->clear();
  for (const unsigned char byte : uuid) {
    std::snprintf(text, sizeof(text), "%02x", byte);
    *domain += text;
  }
  *domain += "." + std::to_string(info.clique_id);
  return Status();
}

Status GetNvlinkDomain(const std::string& pci_bus_id, std::string* domain) {
  static Nvml nvml = {};
  static const Status loaded = LoadNvml(&nvml);
  if (!loaded.ok()) return loaded;
  Status status = CheckNvml(nvml.init(), "starting NVML");
  if (!status.ok()) return status;
  NvmlDevice* device = nullptr;
  FabricInfo info = {};
  status = CheckNvml(nvml.get_handle(pci_bus_id.c_str(), &device), "finding the GPU in NVML");
  if (status.ok()) {
    status = CheckNvml(nvml.get_fabric_info(device, &info), "asking NVML for the NVLink fabric");
  }
  nvml.shutdown();
  return status.ok() ? DomainOf(info, domain) : status;
}

}  // namespace jax_ep::comm
