#ifndef JAX_EP_XLA_FFI_CPU_MEET_H_
#define JAX_EP_XLA_FFI_CPU_MEET_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/core/shape.h"
#include "csrc/core/status.h"
#include "csrc/cpu/float_environment.h"
#include "csrc/cpu/group.h"
#include "csrc/cpu/parallel.h"
#include "csrc/cpu/rendezvous.h"
#include "csrc/cpu/threads.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/check.h"
#include "xla_ffi/decode.h"

// What the CPU handlers share: how the ranks of an operation come together.
namespace jax_ep::ffi_cpu {

namespace ffi = ::xla::ffi;

// The state that XLA keeps for one custom call of a compiled program. It tells
// apart calls that an inner jit made from one call site.
struct Instance {
  static ffi::TypeId id;
  cpu::Rendezvous rendezvous;
};

// The attributes of every operation (jax_ep/primitives/lowering.py names them).
struct Call {
  const char* op;
  int64_t group_id;
  int32_t layout;
  int64_t capacity;
  int64_t expert_alignment;
  I32 position;  // [2]: which of the mesh's EP groups, which rank of it
  ffi::RunId run_id;
  Instance* instance;
  ffi::ThreadPool* threads;
};

// Binds what a Call is made of, before the operation's own operands.
inline auto BindCall() {
  return BindCommon(ffi::Ffi::Bind()
                        .Ctx<ffi::State<Instance>>()
                        .Ctx<ffi::RunId>()
                        .Ctx<ffi::ThreadPool>());
}

inline ffi::Future Failed(std::string message) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error(ffi::ErrorCode::kInvalidArgument, std::move(message)));
  return future;
}

// How the last rank does the work of an operation: `items(shape, args)`
// rows or tokens a rank, in ranges that `run(shape, ranks, rank, begin, end)`
// does in parallel. `bytes` is about what one rank moves.
template <typename Args>
struct Work {
  std::function<Status(const Shape&)> check;  // of this rank's arrays
  std::function<int64_t(const Shape&, const Args&)> items;
  std::function<Status(const Shape&, const std::vector<Args>&, int32_t, int64_t, int64_t)> run;
  int64_t bytes = 0;
};

// Below this, handing work to another thread costs more than it saves.
inline constexpr int64_t kBytesPerBlock = 256 << 10;
inline constexpr int64_t kBlocksPerThread = 4;

template <typename Args>
void RunAll(const Call& call, const cpu::Group& group, const Shape& shape,
            std::vector<Args> ranks, Work<Args> work, cpu::Rendezvous::Done done) {
  std::vector<int64_t> ends;  // of each rank's items, in one sequence over all ranks
  int64_t total = 0;
  for (const Args& args : ranks) ends.push_back(total += work.items(shape, args));
  const int64_t threads = std::max<int64_t>(call.threads->num_threads(), 1);
  const int64_t num_blocks = std::min(
      total, std::clamp<int64_t>(work.bytes * shape.num_ranks / kBytesPerBlock, 1,
                                 threads * kBlocksPerThread));

  auto body = [shape, ends, total, num_blocks, ranks = std::move(ranks),
               run = std::move(work.run)](int64_t block) {
    int64_t item = total * block / num_blocks;
    const int64_t end = total * (block + 1) / num_blocks;
    const cpu::ScopedIeeeArithmetic ieee;
    for (int32_t rank = 0; item < end; ++rank) {
      if (item >= ends[rank]) continue;
      const int64_t first = rank == 0 ? 0 : ends[rank - 1];
      const int64_t stop = std::min(end, ends[rank]);
      Status status = run(shape, ranks, rank, item - first, stop - first);
      if (!status.ok()) return status;
      item = stop;
    }
    return Status();
  };
  auto finished = [done = std::move(done), op = std::string(call.op),
                   axis = group.axis](const Status& status) {
    done(status.ok() ? status
                     : Status::Error("jax_ep " + op + " on axis " + axis + ": " +
                                     status.message()));
  };
  cpu::ParallelFor(
      num_blocks, threads - 1,
      [&](std::function<void()> task) { call.threads->Schedule(std::move(task)); },
      std::move(body), std::move(finished));
}

// Adds this rank's `args` to the operation; the future is ready when the last
// rank has come and the work of all is done.
template <typename Args>
ffi::Future Meet(const Call& call, Args args, Work<Args> work) {
  const auto group = cpu::FindGroup(call.group_id);
  if (!group) {
    return Failed("jax_ep " + std::string(call.op) + ": Group " + std::to_string(call.group_id) +
                  " is closed, or was never opened in this process");
  }
  const int32_t* position = call.position.typed_data();
  const int32_t rank = position[1];
  if (rank < 0 || rank >= group->num_ranks) {
    return Failed("jax_ep " + std::string(call.op) + " on axis " + group->axis + ": rank " +
                  std::to_string(rank) + " of a program whose Group " +
                  std::to_string(call.group_id) + " has " + std::to_string(group->num_ranks) +
                  " ranks");
  }

  Shape shape;
  shape.num_ranks = group->num_ranks;
  shape.num_experts = group->num_experts;
  shape.num_topk = group->num_topk;
  shape.max_tokens_per_rank = group->max_tokens_per_rank;
  shape.layout = static_cast<Layout>(call.layout);
  shape.capacity = call.capacity;
  shape.expert_alignment = call.expert_alignment;
  if (Status status = work.check(shape); !status.ok()) {
    return Failed("jax_ep " + std::string(call.op) + " on axis " + group->axis + ": " +
                  status.message());
  }

  ffi::Promise promise;
  ffi::Future future(promise);
  cpu::Rendezvous::Done done = [promise, environment =
                                             cpu::FloatEnvironment()](const Status& status) {
    cpu::RunOnOwnThread([promise, environment, status]() mutable {
      environment.Apply();  // XLA's program goes on in this thread
      if (status.ok()) {
        promise.SetAvailable();
      } else {
        promise.SetError(ffi::Error(ffi::ErrorCode::kInternal, status.message()));
      }
    });
  };
  const auto all = call.instance->rendezvous.Arrive(
      {call.op, group, call.run_id.run_id, position[0], rank},
      std::make_shared<Args>(std::move(args)), &done);
  if (all.empty()) return future;

  std::vector<Args> ranks;
  for (const auto& each : all) ranks.push_back(std::move(*std::static_pointer_cast<Args>(each)));
  RunAll(call, *group, shape, std::move(ranks), std::move(work), std::move(done));
  return future;
}

}  // namespace jax_ep::ffi_cpu

#endif  // JAX_EP_XLA_FFI_CPU_MEET_H_
