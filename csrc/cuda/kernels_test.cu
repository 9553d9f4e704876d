// Runs the kernels for several ranks in one process, each on a stream of its own, on as many GPUs as
// there are, and compares every output bit for bit with the CPU backend's functions. Needs a GPU.
//
//   kernels_test                  all cases
//   kernels_test small TIMEOUT_S  a few small ones, whose kernels wait that long for another rank:
//                                 for compute-sanitizer (bazel/sanitize.sh)
//   kernels_test N                times the kernels over N repetitions
#include <cuda_runtime.h>

#include <chrono>
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

namespace jax_ep::cuda {
namespace {

void Must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}
void Must(cudaError_t error) { Must(CheckCuda(error, "CUDA")); }

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
  double unrouted = 0.1;
  bool weighted = true;
  int32_t num_sms = 8;
  double timeout_s = 5;

  DType row_dtype() const { return quantize == Quantize::kNone ? dtype : DType::kF8E4M3FN; }
  // Of one leaf's row.
  int64_t scale_bytes(int64_t elements) const {
    return quantize == Quantize::kNone
               ? 0
               : NumBlocks(static_cast<int32_t>(elements)) * ScaleBytes(quantize);
  }
};

int NumDevices() {
  static const int count = [] {
    int devices = 0;
    Must(cudaGetDeviceCount(&devices));
    return devices;
  }();
  return count;
}

// Rank r lives on device r modulo their number.
void UseDeviceOf(int32_t rank) { Must(cudaSetDevice(rank % NumDevices())); }

// One rank's arrays.
struct Rank {
  cudaStream_t stream;
  std::unique_ptr<Array<RankState>> state;
  std::unique_ptr<Bytes> workspace;
  std::unique_ptr<Ints> position, topk_idx, slots, row_source, row_topk_idx, recv_slots,
      group_sizes, expert_counts, num_rows, num_dropped;
  std::vector<std::unique_ptr<Bytes>> tokens, rows, scales, sums;
  std::unique_ptr<Array<float>> weights, row_weights, returned;
};

class World {
 public:
  World(const Case& c, uint32_t seed) : case_(c), random_(seed) {
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
    for (const int64_t elements : c.row_elements) {
      layout_.max_row_bytes += elements * StorageBytes(c.row_dtype()) + c.scale_bytes(elements);
    }
    Must(cudaHostAlloc(&errors_, sizeof(ErrorRecord) * c.num_ranks,
                       cudaHostAllocMapped | cudaHostAllocPortable));
    std::uninitialized_value_construct_n(errors_, c.num_ranks);
    ranks_.resize(c.num_ranks);
    for (int32_t r = 0; r < c.num_ranks; ++r) Fill(r);
    for (int32_t r = 0; r < c.num_ranks; ++r) {
      Workspace workspace;
      workspace.layout = layout_;
      workspace.state = ranks_[r].state->device;
      workspace.rank = r;
      workspace.num_sms = c.num_sms;
      workspace.timeout_ns = static_cast<uint64_t>(c.timeout_s * 1e9);
      workspace.error = errors_ + r;
      for (int32_t p = 0; p < c.num_ranks; ++p) workspace.base[p] = ranks_[p].workspace->device;
      workspaces_.push_back(workspace);
    }
  }

  ~World() {
    for (Rank& rank : ranks_) cudaStreamDestroy(rank.stream);
    cudaFreeHost(errors_);
  }

  void Prepare() {
    for (int32_t r = 0; r < case_.num_ranks; ++r) {
      Rank& rank = ranks_[r];
      UseDeviceOf(r);
      PrepareArgs args;
      args.common = GetCommon(r);
      args.topk_idx = rank.topk_idx->device;
      args.slots = rank.slots->device;
      args.row_source = rank.row_source->device;
      args.row_topk_idx = rank.row_topk_idx->device;
      args.recv_slots = rank.recv_slots->device;
      args.group_sizes = rank.group_sizes->device;
      args.expert_counts = rank.expert_counts->device;
      args.num_rows = rank.num_rows->device;
      args.num_dropped = rank.num_dropped->device;
      Must(cuda::Prepare(rank.stream, args));
    }
  }

  void Dispatch() {
    for (int32_t r = 0; r < case_.num_ranks; ++r) {
      Rank& rank = ranks_[r];
      UseDeviceOf(r);
      MoveArgs args = GetMove(r);
      for (size_t i = 0; i < rank.tokens.size(); ++i) {
        AddDispatchLeaf(&args, rank, i);
      }
      SetValues(&args, rank.weights->device, rank.row_weights->device);
      Must(cuda::Dispatch(rank.stream, args));
    }
  }

  void Combine() {
    if (case_.quantize != Quantize::kNone) return;  // sums of so large fp8 rows overflow
    const bool weighted = case_.weighted && case_.layout != Layout::kRank;
    for (int32_t r = 0; r < case_.num_ranks; ++r) {
      Rank& rank = ranks_[r];
      UseDeviceOf(r);
      MoveArgs args = GetMove(r);
      for (size_t i = 0; i < rank.tokens.size(); ++i) {
        AddLeaf(&args, rank.sums[i]->device, rank.rows[i]->device, i);
      }
      if (weighted) {
        args.row_weights = reinterpret_cast<std::byte*>(rank.row_weights->device);
      } else {
        SetValues(&args, rank.returned->device, rank.row_weights->device);
      }
      Must(cuda::Combine(rank.stream, args));
    }
  }

  void Wait() {
    for (int32_t r = 0; r < case_.num_ranks; ++r) {
      UseDeviceOf(r);
      Must(cudaStreamSynchronize(ranks_[r].stream));
    }
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

  // Computes everything on the CPU and compares.
  void Check() {
    std::vector<cpu::PrepareArgs> prepare;
    std::vector<cpu::DispatchArgs> dispatch;
    std::vector<cpu::CombineArgs> combine;
    const bool weighted = case_.weighted && case_.layout != Layout::kRank;
    for (Rank& rank : ranks_) {
      prepare.push_back({case_.num_tokens, rank.topk_idx->host.data(), rank.slots->host.data(),
                         rank.row_source->host.data(), rank.row_topk_idx->host.data(),
                         rank.recv_slots->host.data(), rank.group_sizes->host.data(),
                         rank.expert_counts->host.data(), rank.num_rows->host.data(),
                         rank.num_dropped->host.data()});
      cpu::DispatchArgs d;
      d.num_tokens = case_.num_tokens;
      d.row_source = rank.row_source->host.data();
      d.row_topk_idx = rank.row_topk_idx->host.data();
      d.pair_values = reinterpret_cast<std::byte*>(rank.weights->host.data());
      d.row_values = reinterpret_cast<std::byte*>(rank.row_weights->host.data());
      d.value_bytes = 4;
      cpu::CombineArgs b;
      b.num_tokens = case_.num_tokens;
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
                            elements * StorageBytes(case_.row_dtype()), case_.quantize,
                            case_.dtype, static_cast<int32_t>(elements),
                            rank.scales[i]->host.data(), case_.scale_bytes(elements)});
        b.leaves.push_back({case_.row_dtype(), rank.rows[i]->host.data(), rank.sums[i]->host.data(),
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
      Must(cpu::Combine(shape_, combine, r, 0, case_.num_tokens));
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
      if (case_.quantize != Quantize::kNone) continue;
      for (size_t i = 0; i < rank.sums.size(); ++i) Same("sums", r, *rank.sums[i]);
      if (!weighted) Same("returned", r, *rank.returned);
    }
  }

  void NewRouting() {
    for (Rank& rank : ranks_) Route(rank);
    Must(cudaDeviceSynchronize());
  }

 private:
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
    Must(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
    rank.workspace = std::make_unique<Bytes>(layout_.total_bytes());
    Must(cudaMemset(rank.workspace->device, 0, layout_.staging_offset()));
    rank.state = std::make_unique<Array<RankState>>(1);
    rank.state->Upload();
    Must(cudaDeviceSynchronize());
    const int64_t pairs = int64_t{case_.num_tokens} * case_.num_topk;
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
    for (const int64_t elements : case_.row_elements) {
      const int64_t bytes = elements * StorageBytes(case_.row_dtype());
      rank.tokens.push_back(
          std::make_unique<Bytes>(case_.num_tokens * elements * StorageBytes(case_.dtype)));
      for (int64_t i = 0; i < case_.num_tokens * elements; ++i) Random(rank.tokens.back()->host, i);
      rank.tokens.back()->Upload();
      rank.rows.push_back(std::make_unique<Bytes>(rows * bytes));
      rank.scales.push_back(std::make_unique<Bytes>(rows * case_.scale_bytes(elements)));
      rank.sums.push_back(std::make_unique<Bytes>(case_.num_tokens * bytes));
    }
    rank.weights = std::make_unique<Array<float>>(pairs);
    for (float& weight : rank.weights->host) weight = static_cast<float>(random_() % 1000) / 997.0f;
    rank.weights->Upload();
    rank.row_weights = std::make_unique<Array<float>>(values);
    rank.returned = std::make_unique<Array<float>>(pairs);
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
    common.num_tokens = case_.num_tokens;
    common.position = ranks_[r].position->device;
    return common;
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
    args.dtype = case_.row_dtype();
    return args;
  }

  void AddLeaf(MoveArgs* args, std::byte* tokens, std::byte* rows, size_t i) {
    Leaf& leaf = args->leaves[args->num_leaves++];
    leaf.tokens = tokens;
    leaf.rows = rows;
    leaf.row_bytes = case_.row_elements[i] * StorageBytes(case_.row_dtype());
    leaf.staging_offset = args->staging_row_bytes;
    args->staging_row_bytes += (leaf.row_bytes + 15) / 16 * 16;
  }

  // The same for dispatch, which may cast.
  void AddDispatchLeaf(MoveArgs* args, const Rank& rank, size_t i) {
    AddLeaf(args, rank.tokens[i]->device, rank.rows[i]->device, i);
    if (case_.quantize == Quantize::kNone) return;
    Leaf& leaf = args->leaves[i];
    leaf.quantize = case_.quantize;
    leaf.dtype = case_.dtype;
    leaf.columns = static_cast<int32_t>(case_.row_elements[i]);
    leaf.scales = rank.scales[i]->device;
    leaf.scale_bytes = case_.scale_bytes(case_.row_elements[i]);
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
  std::mt19937 random_;
  Shape shape_;
  WorkspaceLayout layout_;
  ErrorRecord* errors_ = nullptr;
  std::vector<Rank> ranks_;
  std::vector<Workspace> workspaces_;
};

// Appends a case that differs from `base` by `change`.
auto Adder(std::vector<Case>* cases, const Case& base) {
  return [cases, base](const char* name, auto change) {
    Case c = base;
    c.name = name;
    change(c);
    cases->push_back(c);
  };
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const Layout layout : {Layout::kExpert, Layout::kRank, Layout::kPadded}) {
    Case base;
    base.layout = layout;
    const auto add = Adder(&cases, base);
    add("plain", [](Case&) {});
    add("one rank", [](Case& c) { c.num_ranks = 1; });
    add("three ranks", [](Case& c) { c.num_ranks = 3; c.num_experts = 9; });
    add("eight ranks", [](Case& c) { c.num_ranks = 8; c.num_experts = 16; c.num_sms = 4; });
    add("tight, aligned", [](Case& c) { c.capacity = 37; c.alignment = 8; });
    add("capacity 0", [](Case& c) { c.capacity = 0; });
    add("aligned 128", [](Case& c) { c.alignment = 128; });
    add("no tokens", [](Case& c) { c.num_tokens = 0; });
    add("one token", [](Case& c) { c.num_tokens = 1; });
    add("nothing routed", [](Case& c) { c.unrouted = 1; });
    add("top-40", [](Case& c) { c.num_topk = 40; c.num_experts = 6; });
    add("top-64", [](Case& c) { c.num_topk = 64; c.num_experts = 128; });
    add("odd bytes", [](Case& c) { c.dtype = DType::kF8E4M3FN; c.row_elements = {7, 33}; });
    add("f16, 2880", [](Case& c) { c.dtype = DType::kF16; c.row_elements = {2880}; });
    add("f32 and more", [](Case& c) { c.dtype = DType::kF32; c.row_elements = {3, 64, 1, 5}; });
    add("f64", [](Case& c) { c.dtype = DType::kF64; c.row_elements = {9}; });
    add("e5m2", [](Case& c) { c.dtype = DType::kF8E5M2; c.row_elements = {48}; });
    add("plain sum", [](Case& c) { c.weighted = false; });
    add("cast from bf16", [](Case& c) { c.quantize = Quantize::kFp8; c.row_elements = {2880, 7}; });
    add("cast from f32", [](Case& c) {
      c.dtype = DType::kF32;
      c.quantize = Quantize::kFp8E8M0;
      c.row_elements = {7168};
    });
    add("cast from f16, one rank", [](Case& c) {
      c.num_ranks = 1;
      c.dtype = DType::kF16;
      c.quantize = Quantize::kFp8;
      c.row_elements = {130, 256};
    });
    add("1024 experts", [](Case& c) { c.num_experts = 1024; c.num_tokens = 128; });
    add("hidden 7168", [](Case& c) { c.row_elements = {7168}; c.num_sms = 16; });
  }
  return cases;
}

// Every layout, dtype class and way of moving rows, with few tokens.
std::vector<Case> SmallCases(double timeout_s) {
  std::vector<Case> cases;
  for (const Layout layout : {Layout::kExpert, Layout::kRank, Layout::kPadded}) {
    Case base;
    base.layout = layout;
    base.num_tokens = 40;
    base.num_sms = 2;
    base.timeout_s = timeout_s;
    const auto add = Adder(&cases, base);
    add("one rank", [](Case& c) { c.num_ranks = 1; });
    add("two ranks", [](Case&) {});
    add("three ranks, tight, aligned", [](Case& c) {
      c.num_ranks = 3;
      c.num_experts = 9;
      c.capacity = 37;
      c.alignment = 8;
    });
    add("odd bytes", [](Case& c) { c.dtype = DType::kF8E4M3FN; c.row_elements = {7, 33}; });
    add("f32, plain sum", [](Case& c) { c.dtype = DType::kF32; c.weighted = false; });
    add("cast", [](Case& c) { c.quantize = Quantize::kFp8; c.row_elements = {260}; });
  }
  return cases;
}

// Times the operations of a case back to back, as the host sees them.
void Time(const Case& c, int repeats) {
  World world(c, 1);
  std::printf("%s%s, %d ranks on %d GPUs, %2d SMs, us:", c.name,
              c.quantize == Quantize::kNone ? "" : " fp8", c.num_ranks, NumDevices(), c.num_sms);
  auto time = [&](const char* name, auto run) {
    for (int i = 0; i < 3; ++i) run();
    world.Wait();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) run();
    world.Wait();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    std::printf("  %s %.1f", name, took.count() / repeats);
  };
  time("prepare", [&] { world.Prepare(); });
  time("dispatch", [&] { world.Dispatch(); });
  if (c.quantize == Quantize::kNone) time("combine", [&] { world.Combine(); });
  std::printf("\n");
  std::fflush(stdout);
}

// The benchmark's setting, of `only` ranks, or of 1, 2 and 8.
void TimeAll(int repeats, int only) {
  Case c;
  c.num_experts = 256;
  c.num_topk = 8;
  c.num_tokens = c.max_tokens = 4096;
  c.row_elements = {7168};
  c.unrouted = 0;
  for (const Layout layout : {Layout::kExpert, Layout::kRank}) {
    c.layout = layout;
    c.name = layout == Layout::kRank ? "rank" : "expert";
    c.weighted = layout != Layout::kRank;
    for (const int32_t num_ranks : {1, 2, 8}) {
      if (only != 0 && num_ranks != only) continue;
      c.num_ranks = num_ranks;
      c.capacity = layout == Layout::kRank ? num_ranks * c.num_tokens : 33536;
      for (const int32_t num_sms : {16, 24, 32, 64}) {
        if ((num_ranks + NumDevices() - 1) / NumDevices() * num_sms > 132) continue;
        c.num_sms = num_sms;
        for (const Quantize quantize : {Quantize::kNone, Quantize::kFp8}) {
          c.quantize = quantize;
          Time(c, repeats);
        }
      }
    }
  }
}

void ConnectDevices() {
  for (int device = NumDevices() - 1; device >= 0; --device) {
    Must(cudaSetDevice(device));
    for (int peer = 0; peer < NumDevices(); ++peer) {
      if (peer != device) Must(cudaDeviceEnablePeerAccess(peer, 0));
    }
    Must(LoadKernels());
  }
}

}  // namespace
}  // namespace jax_ep::cuda

int main(int argc, char** argv) {
  using namespace jax_ep::cuda;  // NOLINT
  ConnectDevices();
  if (argc > 1 && std::atoi(argv[1]) > 0) {
    TimeAll(std::atoi(argv[1]), argc > 2 ? std::atoi(argv[2]) : 0);
    return 0;
  }
  const bool small = argc > 2 && std::string(argv[1]) == "small";
  const auto cases = small ? SmallCases(std::atof(argv[2])) : Cases();
  for (const Case& c : cases) {
    std::printf("layout %d: %s\n", static_cast<int>(c.layout), c.name);
    std::fflush(stdout);
    World world(c, 0);
    for (int round = 0; round < 3; ++round) {
      world.NewRouting();
      world.Prepare();
      world.Dispatch();
      world.Combine();
      world.Wait();
      world.Check();
    }
  }
  std::printf("%zu cases passed\n", cases.size());
  return 0;
}
