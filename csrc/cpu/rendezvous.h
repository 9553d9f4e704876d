#ifndef JAX_EP_CSRC_CPU_RENDEZVOUS_H_
#define JAX_EP_CSRC_CPU_RENDEZVOUS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/core/status.h"
#include "csrc/cpu/group.h"

namespace jax_ep::cpu {

// Where the ranks of one operation of a program meet. No thread ever waits
// here: a rank leaves its arguments and a callback, and the rank that comes
// last does the work for all. So ranks may reach independent operations in any
// order, on any number of threads, without a circular wait.
//
// One object belongs to one custom call of a compiled program. It may be shared
// by several executions at once (told apart by run_id), by several independent
// EP groups of a mesh (subgroup), and by the rounds of a loop: a rank comes to
// the next round only after the work of the last one is done.
class Rendezvous {
 public:
  using Done = std::function<void(const Status&)>;
  using Args = std::shared_ptr<void>;

  struct Arrival {
    const char* op;
    std::shared_ptr<const Group> group;
    int64_t run_id;
    int32_t subgroup;
    int32_t rank;
  };

  Rendezvous();

  // Adds a rank. Where it is the last, returns all ranks' arguments in rank
  // order and stores in `done` what must be called once with the result;
  // otherwise returns an empty vector, and the rank's own `done` is called by
  // the rank that comes last, or with an error once the group's timeout has
  // passed since the first rank came, or the group is closed.
  std::vector<Args> Arrive(const Arrival& arrival, Args args, Done* done);

 private:
  struct Meeting;
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CSRC_CPU_RENDEZVOUS_H_
