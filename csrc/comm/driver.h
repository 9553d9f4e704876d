#ifndef JAX_EP_CSRC_COMM_DRIVER_H_
#define JAX_EP_CSRC_COMM_DRIVER_H_

#include <cuda.h>

#include <string>

#include "csrc/core/status.h"

namespace jax_ep::comm {

// What is used of CUDA's driver API. Found at run time: the module must load without a driver.
struct Driver {
  decltype(&cuDeviceGetAttribute) device_get_attribute;
  decltype(&cuMemGetAllocationGranularity) get_allocation_granularity;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemRetainAllocationHandle) retain_allocation_handle;
  decltype(&cuMemAddressReserve) address_reserve;
  decltype(&cuMemAddressFree) address_free;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemExportToShareableHandle) export_to_shareable_handle;
  decltype(&cuMemImportFromShareableHandle) import_from_shareable_handle;
};

// The driver of this process; an error where there is none, or one that is too old.
Status GetDriver(const Driver** driver);

// Success, or an error "<what>: <CUDA's text>".
Status CheckDriver(CUresult error, const std::string& what);

}  // namespace jax_ep::comm

#endif  // JAX_EP_CSRC_COMM_DRIVER_H_
