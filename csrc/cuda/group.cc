#include "csrc/cuda/group.h"

#include <cuda_runtime.h>

#include <chrono>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "csrc/comm/on_device.h"
#include "csrc/cuda/error_text.h"
#include "csrc/cuda/kernels.h"
#include "csrc/cuda/rank_states.h"

namespace jax_ep::cuda {
namespace {

// Once per device; a device must be current.
Status LoadKernelsOnce(int device) {
  static std::mutex* mutex = new std::mutex;
  static auto* loaded = new std::set<int>;
  std::lock_guard<std::mutex> lock(*mutex);
  if (loaded->count(device)) return Status();
  Status status = LoadKernels();
  if (status.ok()) loaded->insert(device);
  return status;
}

}  // namespace

Status Group::Open(GroupSettings settings, int device, std::shared_ptr<Group>* group) {
  const WorkspaceLayout& layout = settings.layout;
  if (layout.num_ranks > kMaxRanks) {
    return Status::Error("the cuda backend has at most " + std::to_string(kMaxRanks) +
                         " ranks, got " + std::to_string(layout.num_ranks));
  }
  if (layout.num_topk > kMaxTopk) {
    return Status::Error("the cuda backend has at most " + std::to_string(kMaxTopk) +
                         " experts per token, got num_topk=" + std::to_string(layout.num_topk));
  }
  std::shared_ptr<Group> opened(new Group(std::move(settings), device));
  Status status = opened->Allocate();
  if (status.ok()) *group = std::move(opened);
  return status;
}

Status Group::Allocate() {
  Status status = comm::OnDevice(device_, [&] {
    if (Status status = LoadKernelsOnce(device_); !status.ok()) return status;
    void* record = nullptr;
    Status status = comm::CheckCuda(
        cudaHostAlloc(&record, sizeof(ErrorRecord), cudaHostAllocPortable | cudaHostAllocMapped),
        "allocating pinned host memory");
    if (!status.ok()) return status;
    error_ = new (record) ErrorRecord;
    return AcquireRankState(device_, settings_.id, &state_);
  });
  if (!status.ok()) return status;
  return comm::SymmetricMemory::Allocate(settings_.memory, device_,
                                         settings_.layout.total_bytes(), &memory_);
}

Group::~Group() {
  comm::OnDevice(device_, [&] {
    if (state_ != nullptr) ReleaseRankState(device_, state_);
    if (error_ != nullptr) cudaFreeHost(error_);
    return Status();
  });
}

Status Group::Connect(const std::vector<std::string>& handles, const LaunchSettings& launch) {
  const int32_t num_ranks = settings_.layout.num_ranks;
  if (static_cast<int32_t>(handles.size()) != num_ranks) {
    return Status::Error("got the memory handles of " + std::to_string(handles.size()) +
                         " ranks, expected " + std::to_string(num_ranks));
  }
  for (const int32_t sms : {launch.num_sms, launch.low_latency_sms}) {
    if (sms >= 1 && sms <= kMaxBlocks) continue;
    return Status::Error("num_sms must be in [1, " + std::to_string(kMaxBlocks) + "], got " +
                         std::to_string(sms));
  }
  Status status = memory_->Connect(settings_.rank, handles);
  if (!status.ok()) return status;
  workspace_.layout = settings_.layout;
  workspace_.at = settings_.layout.Offsets();
  workspace_.group = settings_.id;
  workspace_.state = state_;
  workspace_.subgroup = settings_.subgroup;
  workspace_.rank = settings_.rank;
  workspace_.ranks_per_device = launch.ranks_per_device;
  workspace_.num_sms = launch.num_sms;
  workspace_.low_latency_sms = launch.low_latency_sms;
  workspace_.timeout_ns = static_cast<uint64_t>(settings_.timeout_s * 1e9);
  workspace_.error = error_;  // portable pinned memory has one address everywhere
  for (int32_t rank = 0; rank < num_ranks; ++rank) workspace_.base[rank] = memory_->base(rank);
  return status;
}

void Group::Disconnect() {
  comm::OnDevice(device_, [&] {
    auto wait = [] { return comm::CheckCuda(cudaDeviceSynchronize(), "waiting for kernels"); };
    if (Status status = wait(); !status.ok()) return status;
    // A replayed program may begin at any time; from now on its kernels turn back.
    if (Status status = RetireRankState(state_); !status.ok()) return status;
    return wait();
  });
  memory_->Disconnect();
}

Status Group::CheckError() const {
  if (__atomic_load_n(&error_->set, __ATOMIC_ACQUIRE) == 0) return Status();
  return Status::Error(ErrorText(*error_, settings_.axis, settings_.timeout_s));
}

namespace {

struct Registry {
  struct Entry {
    std::shared_ptr<Group> group;
    bool connected = false;
  };
  using Key = std::pair<int64_t, int>;  // id, device

  // Those of one id on all devices.
  std::vector<std::shared_ptr<Group>> GroupsOf(int64_t id) {
    std::vector<std::shared_ptr<Group>> groups;
    for (const auto& [key, entry] : entries) {
      if (key.first == id) groups.push_back(entry.group);
    }
    return groups;
  }

  std::mutex mutex;
  std::map<Key, Entry> entries;
};

// Never destroyed: XLA's threads may still run when the process exits.
Registry& GetRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

}  // namespace

Status OpenGroup(GroupSettings settings, int device, std::string* handle) {
  const int64_t id = settings.id;
  std::shared_ptr<Group> group;
  Status status = Group::Open(std::move(settings), device, &group);
  if (!status.ok()) return status;
  *handle = group->memory().handle();
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  if (!registry.entries.insert({{id, device}, {group, false}}).second) {
    return Status::Error("group " + std::to_string(id) + " has a rank on device " +
                         std::to_string(device) + " already");
  }
  return status;
}

Status ConnectGroup(int64_t id, int device, const std::vector<std::string>& handles,
                    const LaunchSettings& launch, std::string* transport) {
  Registry& registry = GetRegistry();
  std::shared_ptr<Group> group;
  {
    std::lock_guard<std::mutex> lock(registry.mutex);
    const auto it = registry.entries.find({id, device});
    if (it != registry.entries.end()) group = it->second.group;
  }
  if (!group) return Status::Error("group " + std::to_string(id) + " is not open");
  Status status = group->Connect(handles, launch);
  if (!status.ok()) return status;
  *transport = group->memory().transport();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.entries[{id, device}].connected = true;
  return status;
}

std::shared_ptr<const Group> FindGroup(int64_t id, int device) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const auto it = registry.entries.find({id, device});
  if (it == registry.entries.end() || !it->second.connected) return nullptr;
  return it->second.group;
}

std::shared_ptr<const Group> FindGroup(int64_t id) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return FindGroup(id, device);
}

Status CheckGroup(int64_t id) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  for (const auto& group : registry.GroupsOf(id)) {
    if (Status status = group->CheckError(); !status.ok()) return status;
  }
  return Status();
}

void DisconnectGroup(int64_t id) {
  Registry& registry = GetRegistry();
  std::vector<std::shared_ptr<Group>> groups;
  {
    std::lock_guard<std::mutex> lock(registry.mutex);
    for (auto& [key, entry] : registry.entries) {
      if (key.first == id) entry.connected = false;
    }
    groups = registry.GroupsOf(id);
  }
  for (const auto& group : groups) {
    // Whoever found the group before may be about to launch a kernel. Two hold it for good: the
    // registry and this function.
    while (group.use_count() > 2) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  for (const auto& group : groups) group->Disconnect();
}

void CloseGroup(int64_t id) {
  Registry& registry = GetRegistry();
  std::vector<std::shared_ptr<Group>> groups;  // destroyed last, without the lock
  {
    std::lock_guard<std::mutex> lock(registry.mutex);
    groups = registry.GroupsOf(id);
    for (auto it = registry.entries.begin(); it != registry.entries.end();) {
      it = it->first.first == id ? registry.entries.erase(it) : std::next(it);
    }
  }
}

}  // namespace jax_ep::cuda
