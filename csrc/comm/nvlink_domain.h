#ifndef JAX_EP_CSRC_COMM_NVLINK_DOMAIN_H_
#define JAX_EP_CSRC_COMM_NVLINK_DOMAIN_H_

#include <array>
#include <string>

#include "csrc/core/status.h"

namespace jax_ep::comm {

// What NVML says of a GPU's place in an NVLink fabric: its nvmlGpuFabricInfo_t.
struct FabricInfo {
  std::array<unsigned char, 16> cluster_uuid;
  int status;  // of the registration; says something once it is completed
  unsigned int clique_id;
  unsigned char state;
};

// The name of the NVLink domain that spans hosts and that a GPU is in. GPUs of different hosts
// reach each other if, and only if, they are of one cluster and, within it, of one clique.
Status DomainOf(const FabricInfo& info, std::string* domain);

// The same for the GPU at a PCI bus id, by asking NVML. (Not at an index: NVML numbers the GPUs of
// the host, CUDA those that the process sees.)
Status GetNvlinkDomain(const std::string& pci_bus_id, std::string* domain);

}  // namespace jax_ep::comm

#endif  // JAX_EP_CSRC_COMM_NVLINK_DOMAIN_H_
