#ifndef JAX_EP_CSRC_CUDA_TESTING_WORLD_H_
#define JAX_EP_CSRC_CUDA_TESTING_WORLD_H_

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "csrc/core/slots.h"
#include "csrc/cpu/combine.h"
#include "csrc/cpu/dispatch.h"
#include "csrc/cpu/prepare.h"
#include "csrc/cuda/kernels.h"
#include "csrc/testing/check.h"

// All ranks of a group in one process, each on a stream of its own, on as many GPUs as there are.
namespace jax_ep::cuda::testing {

inline void Must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}
inline void Must(cudaError_t error) { Must(CheckCuda(error, "CUDA")); }

// Memory of the device with a copy on the host.
template <typename T>
struct Array {
  std::vector<T> host;
  T* device = nullptr;

  explicit Array(int64_t size, T value = T()) : host(size, value) {
    Must(cudaMalloc(&device, size * sizeof(T) + 256));
    Must(cudaMemset(device, 0xa5, size * sizeof(T) + 256));  // what nobody writes shows
  }
  Array(const Array&) = delete;
  ~Array() { cudaFree(device); }
  void Upload() { Must(cudaMemcpy(device, host.data(), Bytes(), cudaMemcpyHostToDevice)); }
  std::vector<T> Download() const {
    std::vector<T> copy(host.size());
    Must(cudaMemcpy(copy.data(), device, Bytes(), cudaMemcpyDeviceToHost));
    return copy;
  }
  size_t Bytes() const { return host.size() * sizeof(T); }
};

using Bytes = Array<std::byte>;
using Ints = Array<int32_t>;

struct Case {
  const char* name = "";
  Layout layout = Layout::kExpert;
  int32_t num_ranks = 2;
  int32_t num_experts = 8;
  int32_t num_topk = 4;
  int32_t num_tokens = 100;
  int32_t max_tokens = 128;
  int64_t capacity = -1;  // worst case
  int64_t alignment = 1;
  std::vector<int64_t> row_elements = {64};
  DType dtype = DType::kBF16;
  Quantize quantize = Quantize::kNone;
  bool casts_all = true;  // or only leaves 0, 2, ...
  double unrouted = 0.1;
  bool weighted = true;
  bool uneven = false;  // the first rank has no tokens, the last num_tokens
  int32_t ranks_per_device = 0;  // as if it were so; 0 as it is
  int32_t num_sms = 8;
  int32_t low_latency_sms = 8;
  double timeout_s = 5;

  int32_t tokens_of(int32_t rank) const {
    return uneven && num_ranks > 1 ? num_tokens * rank / (num_ranks - 1) : num_tokens;
  }

  // Of a leaf.
  Quantize quantize_of(size_t leaf) const {
    return casts_all || leaf % 2 == 0 ? quantize : Quantize::kNone;
  }
  DType row_dtype(size_t leaf) const {
    return quantize_of(leaf) == Quantize::kNone ? dtype : DType::kF8E4M3FN;
  }
  int64_t row_bytes(size_t leaf) const {
    return row_elements[leaf] * StorageBytes(row_dtype(leaf));
  }
  int64_t scale_bytes(size_t leaf) const {
    return quantize_of(leaf) == Quantize::kNone
               ? 0
               : NumBlocks(static_cast<int32_t>(row_elements[leaf])) *
                     ScaleBytes(quantize_of(leaf));
  }
};

inline int NumDevices() {
  static const int count = [] {
    int devices = 0;
    Must(cudaGetDeviceCount(&devices));
    return devices;
  }();
  return count;
}

// Rank r lives on device r modulo their number.
inline void UseDeviceOf(int32_t rank) { Must(cudaSetDevice(rank % NumDevices())); }

// One rank's arrays.
struct Rank {
  cudaStream_t stream;
  std::unique_ptr<Array<RankState>> state;
  std::unique_ptr<Bytes> workspace;
  std::unique_ptr<Ints> position, topk_idx, slots, row_source, row_topk_idx, recv_slots,
      group_sizes, expert_counts, num_rows, num_dropped;
  std::vector<std::unique_ptr<Bytes>> tokens, rows, scales, sums;
  std::unique_ptr<Array<float>> weights, row_weights, returned;
  std::unique_ptr<Array<uint32_t>> ticket;
};

// Which half of a low-latency operation.
enum class Half { kBoth, kStart, kDone };

// One batch of all ranks, from their tokens to their sums, and the same on the CPU. Several batches
// may share one group's workspaces: those of `owner`, which has been made with the same case.
class World {
 public:
  World(const Case& c, uint32_t seed, const World* owner = nullptr)
      : case_(c), owner_(owner), random_(seed) {
    shape_.num_ranks = c.num_ranks;
    shape_.num_experts = c.num_experts;
    shape_.num_topk = c.num_topk;
    shape_.max_tokens_per_rank = c.max_tokens;
    shape_.layout = c.layout;
    shape_.expert_alignment = c.alignment;
    const int64_t tokens = int64_t{c.num_ranks} * c.num_tokens;
    shape_.capacity = c.capacity >= 0 ? c.capacity
                      : c.layout != Layout::kExpert
                          ? tokens
                          : tokens * c.num_topk +
                                shape_.num_local_experts() * (c.alignment - 1);
    layout_.num_ranks = c.num_ranks;
    layout_.num_experts = c.num_experts;
    layout_.num_topk = c.num_topk;
    layout_.max_tokens_per_rank = c.max_tokens;
    layout_.low_latency = c.layout != Layout::kRank;
    for (size_t i = 0; i < c.row_elements.size(); ++i) {
      layout_.max_row_bytes += c.row_bytes(i) + c.scale_bytes(i);
    }
    ranks_.resize(c.num_ranks);
    for (int32_t r = 0; r < c.num_ranks; ++r) Fill(r);
    if (owner != nullptr) {
      errors_ = owner->errors_;
      workspaces_ = owner->workspaces_;
      return;
    }
    Must(cudaHostAlloc(&errors_, sizeof(ErrorRecord) * c.num_ranks,
                       cudaHostAllocMapped | cudaHostAllocPortable));
    std::uninitialized_value_construct_n(errors_, c.num_ranks);
    for (int32_t r = 0; r < c.num_ranks; ++r) {
      Workspace workspace;
      workspace.layout = layout_;
      workspace.at = layout_.Offsets();
      workspace.state = ranks_[r].state->device;
      workspace.rank = r;
      workspace.ranks_per_device =
          c.ranks_per_device > 0 ? c.ranks_per_device
                                 : (c.num_ranks + NumDevices() - 1) / NumDevices();
      workspace.num_sms = c.num_sms;
      workspace.low_latency_sms = c.low_latency_sms;
      workspace.timeout_ns = static_cast<uint64_t>(c.timeout_s * 1e9);
      workspace.error = errors_ + r;
      for (int32_t p = 0; p < c.num_ranks; ++p) workspace.base[p] = ranks_[p].workspace->device;
      workspaces_.push_back(workspace);
    }
  }

  ~World() {
    if (owner_ != nullptr) return;
    for (Rank& rank : ranks_) cudaStreamDestroy(rank.stream);
    cudaFreeHost(errors_);
  }

  void Prepare() {
    ForEachRank([this](Rank& rank, int32_t r) {
      Must(cuda::Prepare(rank.stream, {GetCommon(r), rank.topk_idx->device, GetRouting(rank)}));
    });
  }

  void Dispatch() {
    ForEachRank([this](Rank& rank, int32_t r) {
      Must(cuda::Dispatch(rank.stream, GetDispatch(r)));
    });
  }

  void Combine() {
    if (!Combines()) return;
    ForEachRank([this](Rank& rank, int32_t r) {
      MoveArgs args = GetCombine(r);
      if (!Weighted()) SetValues(&args, rank.returned->device, rank.row_weights->device);
      Must(cuda::Combine(rank.stream, args));
    });
  }

  // prepare and dispatch.
  void LowLatencyDispatch(Half half = Half::kBoth) {
    ForEachRank([&](Rank& rank, int32_t r) {
      Must(cuda::LowLatencyDispatch(rank.stream,
                                    {GetDispatch(r), GetRouting(rank), GetSplit(rank, half)}));
    });
  }

  // A combine that returns no values.
  void LowLatencyCombine(Half half = Half::kBoth) {
    if (!Combines()) return;
    ForEachRank([&](Rank& rank, int32_t r) {
      Must(cuda::LowLatencyCombine(rank.stream, {GetCombine(r), GetSplit(rank, half)}));
    });
  }

  // Lets a rank think otherwise than the others of whether ranks have a device each.
  void Disagree(int32_t rank) {
    int32_t& ranks = workspaces_[rank].ranks_per_device;
    ranks = ranks == 1 ? case_.num_ranks : 1;
  }

  // Overwrites all results, so that what nobody writes shows.
  void Scramble(int byte = 0xa5) {
    ForEachRank([&](Rank& rank, int32_t) {
      auto set = [&](auto& array) { Must(cudaMemset(array->device, byte, array->Bytes())); };
      for (auto* array : {&rank.slots, &rank.row_source, &rank.row_topk_idx, &rank.recv_slots,
                          &rank.group_sizes, &rank.expert_counts, &rank.num_rows,
                          &rank.num_dropped}) {
        set(*array);
      }
      for (auto* arrays : {&rank.rows, &rank.scales, &rank.sums}) {
        for (auto& array : *arrays) set(array);
      }
      set(rank.row_weights);
      set(rank.returned);
      Must(cudaDeviceSynchronize());
    });
  }

  // Captures what `run` launches, `repeats` times, into a graph of each rank; the result launches
  // those.
  template <typename Run>
  auto Capture(int repeats, Run run) {
    ForEachRank([](Rank& rank, int32_t) {
      Must(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeRelaxed));
    });
    for (int i = 0; i < repeats; ++i) run();
    std::vector<cudaGraphExec_t> graphs(ranks_.size());
    ForEachRank([&](Rank& rank, int32_t r) {
      cudaGraph_t graph;
      Must(cudaStreamEndCapture(rank.stream, &graph));
      Must(cudaGraphInstantiate(&graphs[r], graph, 0));
      Must(cudaGraphDestroy(graph));
      Must(cudaGraphUpload(graphs[r], rank.stream));
      Must(cudaStreamSynchronize(rank.stream));
    });
    return [this, graphs] {
      ForEachRank([&](Rank& rank, int32_t r) { Must(cudaGraphLaunch(graphs[r], rank.stream)); });
    };
  }

  void Wait() {
    Synchronize();
    for (int32_t r = 0; r < case_.num_ranks; ++r) {
      const ErrorRecord& error = errors_[r];
      if (error.set == 0) continue;
      std::fprintf(stderr, "%s: rank %d op %d phase %d peer %d expected %llx seen %llx\n",
                   case_.name, r, error.op, error.phase, error.peer,
                   static_cast<unsigned long long>(error.expected),
                   static_cast<unsigned long long>(error.seen));
      std::exit(1);
    }
  }

  // Waits, and ends the test unless a rank has failed in `phase`, and all others because of it.
  void WaitForFailure(Phase phase) {
    Synchronize();
    bool found = false;
    for (int32_t r = 0; r < case_.num_ranks; ++r) {
      const auto its = static_cast<Phase>(errors_[r].phase);
      CHECK(errors_[r].set != 0 && (its == phase || its == Phase::kPeerFailed));
      found |= its == phase;
    }
    CHECK(found);
  }

  // All rows are poison.
  void CheckPoison() {
    for (const Rank& rank : ranks_) {
      for (const auto& rows : rank.rows) {
        for (const std::byte byte : rows->Download()) CHECK(byte == std::byte{0xff});
      }
    }
  }

  // Computes everything on the CPU and compares, with combine's returned values if they are there.
  void Check(bool with_returned) {
    std::vector<cpu::PrepareArgs> prepare;
    std::vector<cpu::DispatchArgs> dispatch;
    std::vector<cpu::CombineArgs> combine;
    const bool weighted = Weighted();
    for (int32_t r = 0; r < case_.num_ranks; ++r) {
      Rank& rank = ranks_[r];
      const int32_t num_tokens = case_.tokens_of(r);
      prepare.push_back({num_tokens, rank.topk_idx->host.data(), rank.slots->host.data(),
                         rank.row_source->host.data(), rank.row_topk_idx->host.data(),
                         rank.recv_slots->host.data(), rank.group_sizes->host.data(),
                         rank.expert_counts->host.data(), rank.num_rows->host.data(),
                         rank.num_dropped->host.data()});
      cpu::DispatchArgs d;
      d.num_tokens = num_tokens;
      d.row_source = rank.row_source->host.data();
      d.row_topk_idx = rank.row_topk_idx->host.data();
      d.pair_values = reinterpret_cast<std::byte*>(rank.weights->host.data());
      d.row_values = reinterpret_cast<std::byte*>(rank.row_weights->host.data());
      d.value_bytes = 4;
      cpu::CombineArgs b;
      b.num_tokens = num_tokens;
      b.topk_idx = rank.topk_idx->host.data();
      b.slots = rank.slots->host.data();
      if (weighted) {
        b.row_weights = d.row_values;
      } else {
        b.row_values = d.row_values;
        b.pair_values = reinterpret_cast<std::byte*>(rank.returned->host.data());
        b.value_bytes = 4;
      }
      for (size_t i = 0; i < rank.tokens.size(); ++i) {
        const int64_t elements = case_.row_elements[i];
        d.leaves.push_back({rank.tokens[i]->host.data(), rank.rows[i]->host.data(),
                            case_.row_bytes(i), case_.quantize_of(i), case_.dtype,
                            static_cast<int32_t>(elements), rank.scales[i]->host.data(),
                            case_.scale_bytes(i)});
        b.leaves.push_back({case_.row_dtype(i), rank.rows[i]->host.data(), rank.sums[i]->host.data(),
                            elements});
      }
      dispatch.push_back(d);
      combine.push_back(b);
    }
    Must(cpu::Prepare(shape_, prepare));
    for (int32_t r = 0; r < case_.num_ranks; ++r) {
      Must(cpu::Dispatch(shape_, dispatch, r, 0, shape_.num_rows()));
    }
    for (int32_t r = 0; r < case_.num_ranks; ++r) {
      Must(cpu::Combine(shape_, combine, r, 0, case_.tokens_of(r)));
    }
    for (int32_t r = 0; r < case_.num_ranks; ++r) {
      Rank& rank = ranks_[r];
      Same("slots", r, *rank.slots);
      Same("row_source", r, *rank.row_source);
      Same("row_topk_idx", r, *rank.row_topk_idx);
      Same("recv_slots", r, *rank.recv_slots);
      Same("group_sizes", r, *rank.group_sizes);
      Same("expert_counts", r, *rank.expert_counts);
      Same("num_rows", r, *rank.num_rows);
      Same("num_dropped", r, *rank.num_dropped);
      for (size_t i = 0; i < rank.rows.size(); ++i) Same("rows", r, *rank.rows[i]);
      for (size_t i = 0; i < rank.scales.size(); ++i) Same("scales", r, *rank.scales[i]);
      Same("row_weights", r, *rank.row_weights);
      if (!Combines()) continue;
      for (size_t i = 0; i < rank.sums.size(); ++i) Same("sums", r, *rank.sums[i]);
      if (with_returned && !weighted) Same("returned", r, *rank.returned);
    }
  }

  void NewRouting() {
    for (Rank& rank : ranks_) Route(rank);
    Must(cudaDeviceSynchronize());
  }

 private:
  template <typename Work>
  void ForEachRank(Work work) {
    for (int32_t r = 0; r < case_.num_ranks; ++r) {
      UseDeviceOf(r);
      work(ranks_[r], r);
    }
  }

  void Synchronize() {
    ForEachRank([](Rank& rank, int32_t) { Must(cudaStreamSynchronize(rank.stream)); });
  }

  // Sums of fp8 rows as large as a cast makes them overflow.
  bool Combines() const { return case_.quantize == Quantize::kNone; }
  bool Weighted() const { return case_.weighted && case_.layout != Layout::kRank; }

  void Route(Rank& rank) {
    std::uniform_real_distribution<double> uniform;
    for (int32_t& expert : rank.topk_idx->host) {
      expert = uniform(random_) < case_.unrouted
                   ? -1
                   : static_cast<int32_t>(random_() % shape_.num_experts);
    }
    rank.topk_idx->Upload();
  }

  void Fill(int32_t r) {
    Rank& rank = ranks_[r];
    UseDeviceOf(r);
    if (owner_ != nullptr) {
      rank.stream = owner_->ranks_[r].stream;
    } else {
      Must(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
      rank.workspace = std::make_unique<Bytes>(layout_.total_bytes());
      Must(cudaMemset(rank.workspace->device, 0, layout_.total_bytes()));
      rank.state = std::make_unique<Array<RankState>>(1);
      rank.state->Upload();
      Must(cudaDeviceSynchronize());
    }
    const int32_t num_tokens = case_.tokens_of(r);
    const int64_t pairs = int64_t{num_tokens} * case_.num_topk;
    const int64_t rows = shape_.num_rows();
    const bool by_rank = case_.layout == Layout::kRank;
    const int64_t values = rows * (by_rank ? case_.num_topk : 1);
    rank.position = std::make_unique<Ints>(2);
    rank.position->host = {0, r};
    rank.position->Upload();
    rank.topk_idx = std::make_unique<Ints>(pairs);
    Route(rank);
    rank.slots = std::make_unique<Ints>(pairs);
    rank.row_source = std::make_unique<Ints>(rows);
    rank.row_topk_idx = std::make_unique<Ints>(by_rank ? rows * case_.num_topk : 0);
    rank.recv_slots = std::make_unique<Ints>(
        int64_t{case_.num_ranks} * case_.max_tokens * case_.num_topk);
    rank.group_sizes = std::make_unique<Ints>(shape_.num_local_experts());
    rank.expert_counts = std::make_unique<Ints>(shape_.num_local_experts());
    rank.num_rows = std::make_unique<Ints>(1);
    rank.num_dropped = std::make_unique<Ints>(1);
    for (size_t leaf = 0; leaf < case_.row_elements.size(); ++leaf) {
      const int64_t elements = case_.row_elements[leaf];
      rank.tokens.push_back(
          std::make_unique<Bytes>(num_tokens * elements * StorageBytes(case_.dtype)));
      for (int64_t i = 0; i < num_tokens * elements; ++i) Random(rank.tokens.back()->host, i);
      rank.tokens.back()->Upload();
      rank.rows.push_back(std::make_unique<Bytes>(rows * case_.row_bytes(leaf)));
      rank.scales.push_back(std::make_unique<Bytes>(rows * case_.scale_bytes(leaf)));
      rank.sums.push_back(std::make_unique<Bytes>(num_tokens * case_.row_bytes(leaf)));
    }
    rank.weights = std::make_unique<Array<float>>(pairs);
    for (float& weight : rank.weights->host) weight = static_cast<float>(random_() % 1000) / 997.0f;
    rank.weights->Upload();
    rank.row_weights = std::make_unique<Array<float>>(values);
    rank.returned = std::make_unique<Array<float>>(pairs);
    rank.ticket = std::make_unique<Array<uint32_t>>(2);
    Must(cudaDeviceSynchronize());  // the rank's stream does not wait for what fills these
  }

  // A random finite number of the case's dtype, of moderate size.
  void Random(std::vector<std::byte>& bytes, int64_t index) {
    const float value = (static_cast<float>(random_() % 20001) - 10000.0f) / 3333.0f;
    auto put = [&](auto x) { std::memcpy(bytes.data() + index * sizeof(x), &x, sizeof(x)); };
    switch (case_.dtype) {
      case DType::kF32: return put(value);
      case DType::kF64: return put(static_cast<double>(value));
      case DType::kBF16: return put(BF16::Round(value));
      case DType::kF16: return put(F16::Round(value));
      case DType::kF8E4M3FN: return put(F8E4M3FN::Round(value));
      case DType::kF8E5M2: return put(F8E5M2::Round(value));
    }
  }

  Common GetCommon(int32_t r) {
    Common common;
    common.workspace = workspaces_[r];
    common.shape = shape_;
    common.num_tokens = case_.tokens_of(r);
    common.position = ranks_[r].position->device;
    return common;
  }

  static Routing GetRouting(const Rank& rank) {
    return {rank.slots->device,       rank.row_source->device,  rank.row_topk_idx->device,
            rank.recv_slots->device,  rank.group_sizes->device, rank.expert_counts->device,
            rank.num_rows->device,    rank.num_dropped->device};
  }

  static Split GetSplit(const Rank& rank, Half half) {
    return {half != Half::kDone, half != Half::kStart, rank.ticket->device};
  }

  MoveArgs GetDispatch(int32_t r) {
    const Rank& rank = ranks_[r];
    MoveArgs args = GetMove(r);
    for (size_t i = 0; i < rank.tokens.size(); ++i) AddDispatchLeaf(&args, rank, i);
    SetValues(&args, rank.weights->device, rank.row_weights->device);
    return args;
  }

  // Without values.
  MoveArgs GetCombine(int32_t r) {
    const Rank& rank = ranks_[r];
    MoveArgs args = GetMove(r);
    for (size_t i = 0; i < rank.tokens.size(); ++i) {
      AddLeaf(&args, rank.sums[i]->device, rank.rows[i]->device, i);
    }
    if (Weighted()) args.row_weights = reinterpret_cast<std::byte*>(rank.row_weights->device);
    return args;
  }

  MoveArgs GetMove(int32_t r) {
    Rank& rank = ranks_[r];
    MoveArgs args;
    args.common = GetCommon(r);
    args.topk_idx = rank.topk_idx->device;
    args.slots = rank.slots->device;
    args.row_source = rank.row_source->device;
    args.row_topk_idx = rank.row_topk_idx->device;
    args.recv_slots = rank.recv_slots->device;
    args.dtype = case_.dtype;
    return args;
  }

  void AddLeaf(MoveArgs* args, std::byte* tokens, std::byte* rows, size_t i) {
    Leaf& leaf = args->leaves[args->num_leaves++];
    leaf.tokens = tokens;
    leaf.rows = rows;
    leaf.row_bytes = case_.row_bytes(i);
    leaf.staging_offset = args->staging_row_bytes;
    args->staging_row_bytes += (leaf.row_bytes + 15) / 16 * 16;
  }

  // The same for dispatch, which may cast.
  void AddDispatchLeaf(MoveArgs* args, const Rank& rank, size_t i) {
    AddLeaf(args, rank.tokens[i]->device, rank.rows[i]->device, i);
    if (case_.quantize_of(i) == Quantize::kNone) return;
    Leaf& leaf = args->leaves[i];
    leaf.quantize = case_.quantize_of(i);
    leaf.dtype = case_.dtype;
    leaf.columns = static_cast<int32_t>(case_.row_elements[i]);
    leaf.scales = rank.scales[i]->device;
    leaf.scale_bytes = case_.scale_bytes(i);
    leaf.scales_offset = args->staging_row_bytes;
    args->staging_row_bytes += (leaf.scale_bytes + 15) / 16 * 16;
  }

  void SetValues(MoveArgs* args, float* tokens, float* rows) {
    args->values = {reinterpret_cast<std::byte*>(tokens), reinterpret_cast<std::byte*>(rows), 4,
                    args->staging_row_bytes};
    args->staging_row_bytes += (4 * case_.num_topk + 15) / 16 * 16;
  }

  template <typename T>
  void Same(const char* what, int32_t r, const Array<T>& array) {
    const std::vector<T> seen = array.Download();
    if (seen.empty() || std::memcmp(seen.data(), array.host.data(), array.Bytes()) == 0) return;
    size_t i = 0;
    while (std::memcmp(&seen[i], &array.host[i], sizeof(T)) == 0) ++i;
    std::fprintf(stderr, "%s: %s of rank %d differs first at %zu of %zu\n", case_.name, what, r, i,
                 seen.size());
    std::exit(1);
  }

  const Case case_;
  const World* const owner_;
  std::mt19937 random_;
  Shape shape_;
  WorkspaceLayout layout_;
  ErrorRecord* errors_ = nullptr;
  std::vector<Rank> ranks_;
  std::vector<Workspace> workspaces_;
};

}  // namespace jax_ep::cuda::testing

#endif  // JAX_EP_CSRC_CUDA_TESTING_WORLD_H_
