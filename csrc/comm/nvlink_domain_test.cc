#include "csrc/comm/nvlink_domain.h"

#include "csrc/testing/check.h"

namespace jax_ep::comm {
namespace {

FabricInfo MakeInfo() {
  FabricInfo info = {};
  info.cluster_uuid[0] = 0xab;
  info.cluster_uuid[15] = 1;
  info.clique_id = 7;
  info.state = 3;
  return info;
}

std::string Domain(const FabricInfo& info) {
  std::string domain;
  const Status status = DomainOf(info, &domain);
  return status.ok() ? domain : "none: " + status.message();
}

void ClusterAndCliqueAreTheDomain() {
  const FabricInfo info = MakeInfo();
  CHECK_EQ(Domain(info), "ab000000000000000000000000000001.7");
  FabricInfo other = info;
  other.clique_id = 8;
  CHECK(Domain(other) != Domain(info));
  other = info;
  other.cluster_uuid[3] = 1;
  CHECK(Domain(other) != Domain(info));
}

// Every HGX host says cluster 0, clique 0: as a name it would join hosts that nothing connects.
void AnEmptyUuidIsNoDomain() {
  FabricInfo info = MakeInfo();
  info.cluster_uuid = {};
  CHECK_EQ(Domain(info), "none: the GPU's NVLink fabric is within its host");
}

void OnlyCompletedRegistrationsCount() {
  FabricInfo info = MakeInfo();
  info.state = 0;
  CHECK_EQ(Domain(info), "none: the GPU is in no NVLink fabric");
  for (const unsigned char state : {1, 2}) {
    info.state = state;
    CHECK_EQ(Domain(info), "none: the fabric manager has not registered the GPU (yet): its state "
                           "is " + std::to_string(state));
  }
  info.state = 3;
  info.status = 999;
  CHECK_EQ(Domain(info), "none: registering the GPU in the fabric failed: NVML's error 999");
}

void AskingNvmlFailsCleanly() {
  std::string domain;
  CHECK(!GetNvlinkDomain("ffff:ff:1f.0", &domain).ok());
  CHECK_EQ(domain, "");
}

}  // namespace
}  // namespace jax_ep::comm

int main() {
  jax_ep::comm::ClusterAndCliqueAreTheDomain();
  jax_ep::comm::AnEmptyUuidIsNoDomain();
  jax_ep::comm::OnlyCompletedRegistrationsCount();
  jax_ep::comm::AskingNvmlFailsCleanly();
  return 0;
}
