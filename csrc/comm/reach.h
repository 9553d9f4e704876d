#ifndef JAX_EP_CSRC_COMM_REACH_H_
#define JAX_EP_CSRC_COMM_REACH_H_

#include <string>

#include "csrc/core/status.h"

namespace jax_ep::comm {

// What decides by which memory the ranks of a group can reach each other, of one device.
struct Reach {
  std::string host;             // as in MemoryHandle
  std::string device;           // its name in error texts
  Status fabric;                // whether its memory can be exported by a fabric handle
  std::string nvlink_domain;    // that spans hosts; empty where there is none,
  std::string domain_obstacle;  // and then why
};

Status GetReach(int device, Reach* reach);

}  // namespace jax_ep::comm

#endif  // JAX_EP_CSRC_COMM_REACH_H_
