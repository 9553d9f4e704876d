#include "csrc/comm/fabric.h"

#include <cuda.h>

#include <string>

#include "csrc/comm/device_memory.h"
#include "csrc/comm/driver.h"
#include "csrc/comm/on_device.h"
#include "csrc/comm/way.h"

namespace jax_ep::comm {
namespace {

using Allocation = CUmemGenericAllocationHandle;

CUdeviceptr Address(std::byte* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

CUmemAllocationProp Properties(int device) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC;
  return properties;
}

Status GetGranularity(const Driver& driver, const CUmemAllocationProp& properties,
                      size_t* granularity) {
  return CheckDriver(driver.get_allocation_granularity(granularity, &properties,
                                                       CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                     "asking for the granularity of memory for fabric handles");
}

CUresult ExportHandle(const Driver& driver, Allocation allocation, CUmemFabricHandle* handle) {
  return driver.export_to_shareable_handle(handle, allocation, CU_MEM_HANDLE_TYPE_FABRIC, 0);
}

Status SetAccess(const Driver& driver, int device, CUdeviceptr address, size_t bytes) {
  CUmemAccessDesc access = {};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return CheckDriver(driver.set_access(address, bytes, &access, 1),
                     "giving device " + DeviceName(device) + " access to mapped memory");
}

// Gives `allocation` an address at which `device` can use it.
Status Map(const Driver& driver, int device, Allocation allocation, size_t bytes,
           std::byte** memory) {
  CUdeviceptr address = 0;
  Status status = CheckDriver(driver.address_reserve(&address, bytes, 0, 0, 0),
                              "reserving addresses");
  if (!status.ok()) return status;
  status = CheckDriver(driver.map(address, bytes, 0, allocation, 0), "mapping memory");
  if (status.ok()) {
    status = SetAccess(driver, device, address, bytes);
    if (status.ok()) {
      *memory = reinterpret_cast<std::byte*>(address);
      return status;
    }
    driver.unmap(address, bytes);
  }
  driver.address_free(address, bytes);
  return status;
}

Status TryOnCurrentDevice(int device) {
  const Driver* driver = nullptr;
  Status status = GetDriver(&driver);
  if (!status.ok()) return status;
  int supported = 0;
  status = CheckDriver(
      driver->device_get_attribute(&supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
                                   device),
      "asking whether the device has fabric handles");
  if (!status.ok()) return status;
  if (!supported) return Status::Error("the device or its driver has no fabric handles");
  const CUmemAllocationProp properties = Properties(device);
  size_t granularity = 0;
  status = GetGranularity(*driver, properties, &granularity);
  if (!status.ok()) return status;
  Allocation allocation;
  status = CheckDriver(driver->create(&allocation, granularity, &properties, 0),
                       "allocating memory for fabric handles (is there an IMEX channel, "
                       "/dev/nvidia-caps-imex-channels/channel0?)");
  if (!status.ok()) return status;
  CUmemFabricHandle handle;
  status = CheckDriver(ExportHandle(*driver, allocation, &handle),
                       "exporting memory by a fabric handle");
  driver->release(allocation);
  return status;
}

class FabricWay : public Way {
 public:
  const char* name() const override { return "fabric handles"; }

  void Export(std::byte* memory, MemoryHandle* handle) const override {
    if (handle->kind != MemoryKind::kFabric) return;
    const Driver* driver = nullptr;
    if (!GetDriver(&driver).ok()) return;
    Allocation allocation;
    CUresult error = driver->retain_allocation_handle(&allocation, memory);
    if (error == CUDA_SUCCESS) {
      error = ExportHandle(*driver, allocation, &handle->fabric);
      driver->release(allocation);
    }
    handle->fabric_error = error;
  }

  bool Serves(const MemoryHandle& mine, const MemoryHandle& peer) const override {
    return mine.process != peer.process && peer.kind == MemoryKind::kFabric;
  }

  Status Open(const MemoryHandle& mine, const MemoryHandle& peer,
              std::byte** memory) const override {
    const std::string whose = "memory of another process on device " +
                              std::string(peer.device.data());
    Status status = CheckDriver(static_cast<CUresult>(peer.fabric_error),
                                "its process could not export by a fabric handle the " + whose);
    if (!status.ok()) return status;
    const Driver* driver = nullptr;
    status = GetDriver(&driver);
    if (!status.ok()) return status;
    CUmemFabricHandle handle = peer.fabric;
    Allocation allocation;
    status = CheckDriver(driver->import_from_shareable_handle(&allocation, &handle,
                                                              CU_MEM_HANDLE_TYPE_FABRIC),
                         "opening by a fabric handle, on device " +
                             std::string(mine.device.data()) + ", " + whose);
    if (!status.ok()) return status;
    status = Map(*driver, mine.device_ordinal, allocation, peer.allocated_bytes, memory);
    driver->release(allocation);  // the mapping keeps it
    return status;
  }

  void Close(std::byte* memory, int64_t bytes) const override { UnmapFabric(memory, bytes); }
};

}  // namespace

Status TryFabric(int device) {
  return OnDevice(device, [&] { return TryOnCurrentDevice(device); });
}

Status AllocateFabric(int device, int64_t* bytes, std::byte** memory) {
  const Driver* driver = nullptr;
  Status status = GetDriver(&driver);
  if (!status.ok()) return status;
  const CUmemAllocationProp properties = Properties(device);
  size_t granularity = 0;
  status = GetGranularity(*driver, properties, &granularity);
  if (!status.ok()) return status;
  const size_t rounded = (*bytes + granularity - 1) / granularity * granularity;
  Allocation allocation;
  status = CheckAllocation(
      static_cast<cudaError_t>(driver->create(&allocation, rounded, &properties, 0)), device,
      rounded);
  if (!status.ok()) return status;
  status = Map(*driver, device, allocation, rounded, memory);
  driver->release(allocation);  // the mapping keeps it
  *bytes = rounded;
  return status;
}

Status GrantAccess(int device, std::byte* memory, int64_t bytes) {
  const Driver* driver = nullptr;
  Status status = GetDriver(&driver);
  if (!status.ok()) return status;
  return SetAccess(*driver, device, Address(memory), bytes);
}

Status UnmapFabric(std::byte* memory, int64_t bytes) {
  const Driver* driver = nullptr;
  Status status = GetDriver(&driver);
  if (status.ok()) status = CheckDriver(driver->unmap(Address(memory), bytes), "unmapping memory");
  if (!status.ok()) return status;
  return CheckDriver(driver->address_free(Address(memory), bytes), "freeing addresses");
}

const Way& Fabric() {
  static const FabricWay way;
  return way;
}

}  // namespace jax_ep::comm
