#include "csrc/comm/driver.h"

#include <cuda_runtime.h>

#include "csrc/comm/on_device.h"

namespace jax_ep::comm {
namespace {

constexpr unsigned int kCudaVersion = 12030;  // the first with fabric handles

template <typename Function>
Status Find(const char* symbol, Function* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  Status status = CheckCuda(cudaGetDriverEntryPointByVersion(symbol, &found, kCudaVersion,
                                                             cudaEnableDefault, &result),
                            "looking for the driver's " + std::string(symbol));
  if (!status.ok()) return status;
  if (result != cudaDriverEntryPointSuccess || found == nullptr) {
    return Status::Error("the NVIDIA driver is too old: it has no " + std::string(symbol));
  }
  *function = reinterpret_cast<Function>(found);
  return status;
}

Status Load(Driver* driver) {
  Status status;
  const auto find = [&](const char* symbol, auto* function) {
    if (status.ok()) status = Find(symbol, function);
  };
  find("cuDeviceGetAttribute", &driver->device_get_attribute);
  find("cuMemGetAllocationGranularity", &driver->get_allocation_granularity);
  find("cuMemCreate", &driver->create);
  find("cuMemRelease", &driver->release);
  find("cuMemRetainAllocationHandle", &driver->retain_allocation_handle);
  find("cuMemAddressReserve", &driver->address_reserve);
  find("cuMemAddressFree", &driver->address_free);
  find("cuMemMap", &driver->map);
  find("cuMemUnmap", &driver->unmap);
  find("cuMemSetAccess", &driver->set_access);
  find("cuMemExportToShareableHandle", &driver->export_to_shareable_handle);
  find("cuMemImportFromShareableHandle", &driver->import_from_shareable_handle);
  return status;
}

// The runtime API numbers errors as the driver API does, and has the texts.
static_assert(int{CUDA_SUCCESS} == int{cudaSuccess});
static_assert(int{CUDA_ERROR_OUT_OF_MEMORY} == int{cudaErrorMemoryAllocation});
static_assert(int{CUDA_ERROR_NOT_PERMITTED} == int{cudaErrorNotPermitted});
static_assert(int{CUDA_ERROR_NOT_SUPPORTED} == int{cudaErrorNotSupported});

}  // namespace

Status GetDriver(const Driver** driver) {
  static Driver loaded = {};
  static const Status status = Load(&loaded);
  *driver = &loaded;
  return status;
}

Status CheckDriver(CUresult error, const std::string& what) {
  return CheckCuda(static_cast<cudaError_t>(error), what);
}

}  // namespace jax_ep::comm
