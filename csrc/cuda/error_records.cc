#include "csrc/cuda/error_records.h"

#include <cuda_runtime.h>

#include <mutex>
#include <vector>

#include "csrc/comm/on_device.h"

namespace jax_ep::cuda {
namespace {

constexpr int kRecordsPerBlock = 64;

struct Pool {
  std::mutex mutex;
  std::vector<ErrorRecord*> unused;
};

Pool& GetPool() {
  static Pool* pool = new Pool;
  return *pool;
}

// Adds a block of records to the pool.
Status Grow(Pool& pool) {
  void* block = nullptr;
  Status status = comm::CheckCuda(
      cudaHostAlloc(&block, kRecordsPerBlock * sizeof(ErrorRecord),
                    cudaHostAllocPortable | cudaHostAllocMapped),
      "allocating pinned host memory");
  if (!status.ok()) return status;
  for (int i = 0; i < kRecordsPerBlock; ++i) {
    pool.unused.push_back(new (static_cast<ErrorRecord*>(block) + i) ErrorRecord);
  }
  return status;
}

void SetGroup(ErrorRecord* record, int64_t group) {
  __atomic_store_n(&record->group, group, __ATOMIC_RELEASE);
}

}  // namespace

Status AcquireErrorRecord(int64_t group, ErrorRecord** record) {
  Pool& pool = GetPool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  if (pool.unused.empty()) {
    if (Status status = Grow(pool); !status.ok()) return status;
  }
  *record = pool.unused.back();
  pool.unused.pop_back();
  **record = ErrorRecord();
  SetGroup(*record, group);
  return Status();
}

void RetireErrorRecord(ErrorRecord* record) { SetGroup(record, 0); }

void ReleaseErrorRecord(ErrorRecord* record) {
  RetireErrorRecord(record);
  Pool& pool = GetPool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  pool.unused.push_back(record);
}

}  // namespace jax_ep::cuda
