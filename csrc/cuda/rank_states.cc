#include "csrc/cuda/rank_states.h"

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <vector>

#include "csrc/comm/on_device.h"

namespace jax_ep::cuda {
namespace {

constexpr int kStatesPerBlock = 64;

struct Pool {
  std::mutex mutex;
  std::map<int, std::vector<RankState*>> unused;  // by device
};

Pool& GetPool() {
  static Pool* pool = new Pool;
  return *pool;
}

}  // namespace

Status AcquireRankState(int device, int64_t group, RankState** state) {
  Pool& pool = GetPool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  std::vector<RankState*>& unused = pool.unused[device];
  if (unused.empty()) {
    void* block = nullptr;
    Status status = comm::CheckCuda(cudaMalloc(&block, kStatesPerBlock * sizeof(RankState)),
                                    "allocating the states of ranks");
    if (!status.ok()) return status;
    for (int i = 0; i < kStatesPerBlock; ++i) {
      unused.push_back(static_cast<RankState*>(block) + i);
    }
  }
  RankState cleared{};
  cleared.group = group;
  cudaError_t error =
      cudaMemcpy(unused.back(), &cleared, sizeof(cleared), cudaMemcpyHostToDevice);
  // A copy from memory that is not pinned may return before it has arrived.
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (Status status = comm::CheckCuda(error, "writing a rank's state"); !status.ok()) return status;
  *state = unused.back();
  unused.pop_back();
  return Status();
}

Status RetireRankState(RankState* state) {
  return comm::CheckCuda(cudaMemset(&state->group, 0, sizeof(state->group)),
                         "writing a rank's state");
}

void ReleaseRankState(int device, RankState* state) {
  Pool& pool = GetPool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  pool.unused[device].push_back(state);
}

}  // namespace jax_ep::cuda
