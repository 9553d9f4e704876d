#ifndef JAX_EP_CSRC_CPU_GROUP_H_
#define JAX_EP_CSRC_CPU_GROUP_H_

#include <cstdint>
#include <memory>
#include <string>

#include "csrc/cpu/closing.h"

namespace jax_ep::cpu {

// The settings of an open jax_ep.Group. A compiled program names its group by
// id alone, so that it holds no pointer and finds out when the group is closed.
struct Group {
  int64_t id = 0;
  std::string axis;  // for error texts
  int32_t num_ranks = 0;
  int32_t num_experts = 0;
  int32_t num_topk = 0;
  int32_t max_tokens_per_rank = 0;
  double timeout_s = 0;
  std::shared_ptr<Closing> closing = std::make_shared<Closing>();
};

void OpenGroup(Group group);
// Ranks that still wait for others get an error at once.
void CloseGroup(int64_t id);

// Null where no group of that id is open.
std::shared_ptr<const Group> FindGroup(int64_t id);

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CSRC_CPU_GROUP_H_
