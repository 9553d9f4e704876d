#ifndef JAX_EP_CSRC_CUDA_GROUP_H_
#define JAX_EP_CSRC_CUDA_GROUP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/comm/symmetric_memory.h"
#include "csrc/core/status.h"
#include "csrc/cuda/workspace.h"

namespace jax_ep::cuda {

struct GroupSettings {
  int64_t id = 0;
  std::string axis;  // for error texts
  int32_t subgroup = 0;
  int32_t rank = 0;
  WorkspaceLayout layout;
  double timeout_s = 0;
  comm::MemoryKind memory = comm::MemoryKind::kIpc;  // one for all ranks
};

// How a group's kernels are launched (see Workspace); equal on all ranks.
struct LaunchSettings {
  int32_t num_sms;
  int32_t low_latency_sms;
  int32_t ranks_per_device;
};

// A jax_ep.Group on one device of this process: that device's rank of it.
class Group {
 public:
  // Allocates the workspace on `device`, zero, and loads the kernels there.
  static Status Open(GroupSettings settings, int device, std::shared_ptr<Group>* group);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const std::string& axis() const { return settings_.axis; }
  const Workspace& workspace() const { return workspace_; }
  const comm::SymmetricMemory& memory() const { return *memory_; }

  // Success, or what the first kernel that failed says. The host does not wait for kernels here.
  Status CheckError() const;

  // The workspaces of all ranks by their handles, in rank order; from then on kernels may run.
  Status Connect(const std::vector<std::string>& handles, const LaunchSettings& launch);

  // Waits for this device's kernels and lets go of the peers' workspaces.
  void Disconnect();

 private:
  Group(GroupSettings settings, int device) : settings_(std::move(settings)), device_(device) {}
  Status Allocate();

  const GroupSettings settings_;
  const int device_;
  Workspace workspace_;
  RankState* state_ = nullptr;
  ErrorRecord* error_ = nullptr;  // pinned host memory
  std::unique_ptr<comm::SymmetricMemory> memory_;
};

// The registry: the open groups of this process by id and CUDA device ordinal. A compiled program
// names its group by id alone, so that it holds no pointer and finds out when the group is closed.

// Opens a group on `device` and gives the handle of its workspace for the other ranks.
Status OpenGroup(GroupSettings settings, int device, std::string* handle);

// Connects it; `transport` says by which ways. Until then nobody finds the group.
Status ConnectGroup(int64_t id, int device, const std::vector<std::string>& handles,
                    const LaunchSettings& launch, std::string* transport);

// An open and connected group; null where there is none. Keep it only while launching kernels.
std::shared_ptr<const Group> FindGroup(int64_t id, int device);
// The same for the current device.
std::shared_ptr<const Group> FindGroup(int64_t id);

// The first error of the group on any device of this process.
Status CheckGroup(int64_t id);

// The two steps of closing a group, on all devices of this process: after the first, nobody finds
// it, no kernel of it runs here, and no peer's workspace is open here; the second frees its
// workspaces, and is for when every process has taken the first, or will never.
void DisconnectGroup(int64_t id);
void CloseGroup(int64_t id);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_GROUP_H_
