#include "csrc/cpu/group.h"

#include <map>
#include <mutex>
#include <utility>

namespace jax_ep::cpu {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<const Group>> groups;
};

// Never destroyed: XLA's threads may still run when the process exits.
Registry& GetRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

}  // namespace

void OpenGroup(Group group) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const int64_t id = group.id;
  registry.groups[id] = std::make_shared<const Group>(std::move(group));
}

void CloseGroup(int64_t id) {
  const std::shared_ptr<const Group> group = FindGroup(id);
  if (!group) return;
  {
    Registry& registry = GetRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    registry.groups.erase(id);
  }
  group->closing->Run();
}

std::shared_ptr<const Group> FindGroup(int64_t id) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const auto it = registry.groups.find(id);
  return it == registry.groups.end() ? nullptr : it->second;
}

}  // namespace jax_ep::cpu
