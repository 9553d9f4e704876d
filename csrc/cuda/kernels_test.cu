// Runs the kernels for several ranks in one process, each on a stream of its own, on as many GPUs as
// there are, and compares every output bit for bit with the CPU backend's functions. Needs a GPU.
//
//   kernels_test                  all cases
//   kernels_test small TIMEOUT_S  a few small ones, whose kernels wait that long for another rank:
//                                 for compute-sanitizer (bazel/sanitize.sh)
//   kernels_test N [RANKS]        times the kernels over N repetitions
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "csrc/cuda/kernels.h"
#include "csrc/cuda/quantize.cuh"
#include "csrc/cuda/testing/world.h"

namespace jax_ep::cuda {
namespace {

using testing::Case;
using testing::Half;
using testing::Must;
using testing::NumDevices;
using testing::World;

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
    // More tokens than are staged ahead of those that are placed.
    const auto many_tokens = [](Case& c) {
      c.num_ranks = c.num_experts = c.ranks_per_device = 8;
      c.num_tokens = c.max_tokens = 500;
      c.row_elements = {256};
    };
    add("eight ranks on a GPU", many_tokens);
    add("eight ranks on a GPU, cast", [&](Case& c) {
      many_tokens(c);
      c.quantize = Quantize::kFp8;
      c.uneven = true;
    });
    // As many as can be connected, one SM each.
    const auto most_ranks = [](Case& c) {
      c.num_ranks = 72;
      c.num_experts = 144;
      c.num_tokens = c.max_tokens = 12;
      c.num_sms = c.low_latency_sms = 1;
    };
    add("72 ranks", [&](Case& c) { most_ranks(c); c.uneven = true; });
    // As between GPUs, also where there is one.
    const auto add_pushed = [&](const char* name, auto change) {
      add(name, [change](Case& c) {
        c.ranks_per_device = 1;
        c.num_ranks = 4;
        change(c);
      });
    };
    add_pushed("pushed", [](Case& c) { c.row_elements = {7168, 24, 2056}; });
    add_pushed("pushed, odd bytes, plain sum", [](Case& c) {
      c.dtype = DType::kF8E4M3FN;
      c.row_elements = {7, 33, 48};
      c.weighted = false;
    });
    add_pushed("pushed, one SM, top-64", [](Case& c) {
      c.num_sms = 1;
      c.num_topk = 64;
      c.num_experts = 128;
    });
    add_pushed("pushed, tight, uneven", [](Case& c) {
      c.capacity = 37;
      c.alignment = 8;
      c.uneven = true;
    });
    add_pushed("pushed, 72 ranks", most_ranks);
    add("tight, aligned", [](Case& c) { c.capacity = 37; c.alignment = 8; });
    add("capacity 0", [](Case& c) { c.capacity = 0; });
    add("aligned 128", [](Case& c) { c.alignment = 128; });
    add("no tokens", [](Case& c) { c.num_tokens = 0; });
    add("one token", [](Case& c) { c.num_tokens = 1; });
    add("nothing routed", [](Case& c) { c.unrouted = 1; });
    add("top-40", [](Case& c) { c.num_topk = 40; c.num_experts = 6; });
    add("top-64", [](Case& c) { c.num_topk = 64; c.num_experts = 128; });
    add("odd bytes", [](Case& c) { c.dtype = DType::kF8E4M3FN; c.row_elements = {7, 33}; });
    add("rows of no bytes", [](Case& c) { c.row_elements = {0, 24, 0}; });
    add("f16, 2880", [](Case& c) { c.dtype = DType::kF16; c.row_elements = {2880}; });
    add("f32 and more", [](Case& c) { c.dtype = DType::kF32; c.row_elements = {3, 64, 1, 5}; });
    add("f64", [](Case& c) { c.dtype = DType::kF64; c.row_elements = {9}; });
    add("e5m2", [](Case& c) { c.dtype = DType::kF8E5M2; c.row_elements = {48}; });
    add("plain sum", [](Case& c) { c.weighted = false; });
    add("cast from bf16", [](Case& c) { c.quantize = Quantize::kFp8; c.row_elements = {2880, 7}; });
    add("cast, whole blocks, beside others", [](Case& c) {
      c.quantize = Quantize::kFp8;
      c.casts_all = false;
      c.row_elements = {7168, 24, 256, 7, 1152, 4000};
    });
    add("cast from f32, whole blocks, beside others", [](Case& c) {
      c.dtype = DType::kF32;
      c.quantize = Quantize::kFp8;
      c.casts_all = false;
      c.row_elements = {128, 1028, 2560, 3, 384};
    });
    // The last block of a row is 1 to 3 vectors, and its lanes' vectors are in every place.
    add("cast, short last blocks", [](Case& c) {
      c.quantize = Quantize::kFp8;
      c.row_elements = {264, 392, 528, 784, 920, 1032};
    });
    add("cast from f32, short last blocks", [](Case& c) {
      c.dtype = DType::kF32;
      c.quantize = Quantize::kFp8RoundScale;
      c.row_elements = {132, 264, 396, 520};
    });
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
    add("uneven", [](Case& c) { c.num_ranks = 3; c.num_experts = 9; c.uneven = true; });
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
    add("cast", [](Case& c) { c.quantize = Quantize::kFp8; c.row_elements = {260, 264}; });
    add("cast beside others", [](Case& c) {
      c.quantize = Quantize::kFp8;
      c.casts_all = false;
      c.row_elements = {384, 24, 2304};
    });
    add("uneven", [](Case& c) { c.uneven = true; });
    // Much for racecheck, and no different in other layouts.
    if (layout == Layout::kRank) {
      add("eight ranks on a GPU", [](Case& c) {
        c.num_ranks = c.num_experts = c.ranks_per_device = 8;
        c.num_tokens = c.max_tokens = 128;
        c.quantize = Quantize::kFp8;
        c.row_elements = {256};
      });
    }
    add("four ranks, pushed", [](Case& c) {
      c.ranks_per_device = 1;
      c.num_ranks = 4;
      c.row_elements = {2304, 33};
    });
  }
  return cases;
}

// Counts the magnitudes of which InverseOf is not what a division gives.
__global__ void CountWrongInverses(uint32_t least, uint32_t* wrong) {
  for (uint64_t bits = least + blockIdx.x * blockDim.x + threadIdx.x; bits < 0x7f800000;
       bits += gridDim.x * blockDim.x) {
    const float amax = __uint_as_float(static_cast<uint32_t>(bits));
    if (InverseOf(amax) != 448.0f / amax) atomicAdd(wrong, 1u);
  }
}

void CheckInverses() {
  testing::Array<uint32_t> wrong(1);
  wrong.Upload();
  CountWrongInverses<<<1024, 256>>>((127 - 107) << 23, wrong.device);
  Must(cudaDeviceSynchronize());
  CHECK_EQ(wrong.Download()[0], 0u);
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

// Times the low-latency operations as the device runs them: in graphs, one after the other.
void TimeLowLatency(const Case& c, int repeats) {
  World world(c, 1);
  std::printf("low latency%s, %3d tokens, %d ranks on %d GPUs, %3d SMs, us:",
              c.quantize == Quantize::kNone ? "" : " fp8", c.num_tokens, c.num_ranks, NumDevices(),
              c.low_latency_sms);
  auto time = [&](const char* name, auto run) {
    const auto launch = world.Capture(5 * repeats, run);
    launch();
    world.Wait();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 5; ++i) launch();
    world.Wait();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    std::printf("  %s %.1f", name, took.count() / (25 * repeats));
  };
  time("dispatch", [&] { world.LowLatencyDispatch(); });
  time("start + done", [&] {
    world.LowLatencyDispatch(Half::kStart);
    world.LowLatencyDispatch(Half::kDone);
  });
  if (c.quantize == Quantize::kNone) {
    time("combine", [&] { world.LowLatencyCombine(); });
    time("start + done", [&] {
      world.LowLatencyCombine(Half::kStart);
      world.LowLatencyCombine(Half::kDone);
    });
  }
  std::printf("\n");
  std::fflush(stdout);
}

// Of `only` ranks, or of 2 and 8.
void TimeAllLowLatency(int repeats, int only) {
  Case c;
  c.num_experts = 256;
  c.num_topk = 8;
  c.row_elements = {7168};
  c.unrouted = 0;
  for (const int32_t num_ranks : {2, 8}) {
    if (only != 0 && num_ranks != only) continue;
    c.num_ranks = num_ranks;
    // As jax_ep/workspace.py chooses it on an H100.
    const int32_t sms = 132 / ((num_ranks + NumDevices() - 1) / NumDevices());
    c.low_latency_sms = std::max(sms - 32, sms / 2);
    for (const int32_t num_tokens : {1, 128}) {
      c.num_tokens = num_tokens;
      // 2 % more rows than there are on average, but all of a few.
      c.capacity = num_tokens == 1 ? num_ranks * c.num_topk : num_tokens * c.num_topk * 51 / 50;
      for (const Quantize quantize : {Quantize::kNone, Quantize::kFp8}) {
        c.quantize = quantize;
        TimeLowLatency(c, repeats);
      }
    }
  }
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

// One operation after the other, each as one kernel.
void CheckOperations(const Case& c, int rounds) {
  World world(c, 0);
  for (int round = 0; round < rounds; ++round) {
    world.NewRouting();
    world.Prepare();
    world.Dispatch();
    world.Combine();
    world.Wait();
    world.Check(true);
    if (c.layout == Layout::kRank) continue;
    world.Scramble();
    world.LowLatencyDispatch();
    world.LowLatencyCombine();
    world.Wait();
    world.Check(false);
  }
}

// Two batches in flight, between their halves the operations of a third, and low-latency ones
// back to back.
void CheckOverlap(const Case& c, int rounds) {
  World third(c, 0);
  World first(c, 1, &third);
  World second(c, 2, &third);
  for (int round = 0; round < rounds; ++round) {
    for (World* world : {&first, &second, &third}) {
      world->NewRouting();
      world->Scramble();
    }
    // In every other round the later start is done first.
    World& early = round % 2 == 0 ? first : second;
    World& late = round % 2 == 0 ? second : first;
    first.LowLatencyDispatch(Half::kStart);
    third.Prepare();
    second.LowLatencyDispatch(Half::kStart);
    third.Dispatch();
    early.LowLatencyDispatch(Half::kDone);
    early.LowLatencyCombine(Half::kStart);
    third.Combine();
    late.LowLatencyDispatch(Half::kDone);
    early.LowLatencyCombine(Half::kDone);
    late.LowLatencyCombine(Half::kStart);
    late.LowLatencyCombine(Half::kDone);
    third.Wait();
    first.Check(false);
    second.Check(false);
    third.Check(true);
    first.Scramble();
    second.Scramble();
    for (int i = 0; i < 5; ++i) {
      first.LowLatencyDispatch();
      second.LowLatencyDispatch(Half::kStart);
      first.LowLatencyCombine();
      second.LowLatencyDispatch(Half::kDone);
      second.LowLatencyCombine();
    }
    third.Wait();
    first.Check(false);
    second.Check(false);

    // More starts than may stay in flight: the third one's work is its done's.
    for (World* world : {&first, &second, &third}) {
      world->Scramble();
      world->LowLatencyDispatch(Half::kStart);
    }
    for (World* world : {&third, &late, &early}) world->LowLatencyDispatch(Half::kDone);
    for (World* world : {&early, &third, &late}) world->LowLatencyCombine(Half::kStart);
    for (World* world : {&late, &third, &early}) world->LowLatencyCombine(Half::kDone);
    third.Wait();
    for (World* world : {&first, &second, &third}) world->Check(false);
  }
}

// The same launches, replayed as graphs.
void CheckReplay(const Case& c) {
  World world(c, 0);
  const auto launch = world.Capture(3, [&] {
    world.LowLatencyDispatch(Half::kStart);
    world.LowLatencyDispatch(Half::kDone);
    world.LowLatencyCombine();
  });
  for (int round = 0; round < 3; ++round) {
    world.NewRouting();
    world.Scramble();
    for (int i = 0; i < 100; ++i) launch();
    world.Wait();
    world.Check(false);
  }
}

// Tickets that are not in flight, and a third one that would be.
void CheckTickets(const Case& c) {
  World world(c, 0);
  world.LowLatencyDispatch(Half::kStart);
  world.LowLatencyDispatch(Half::kDone);
  world.Wait();
  world.Scramble();
  world.LowLatencyDispatch(Half::kDone);
  world.WaitForFailure(Phase::kTicket);
  world.CheckPoison();
  // Nor does the failed group do anything else.
  world.Scramble();
  world.Dispatch();
  world.WaitForFailure(Phase::kTicket);
  world.CheckPoison();
}

// Ranks that disagree on where tokens are staged.
void CheckMismatch(Case c) {
  c.num_ranks = 4;
  World world(c, 0);
  world.Disagree(0);
  world.Prepare();
  world.Dispatch();
  world.WaitForFailure(Phase::kMismatch);
}

}  // namespace
}  // namespace jax_ep::cuda

int main(int argc, char** argv) {
  using namespace jax_ep::cuda;  // NOLINT
  ConnectDevices();
  if (argc > 1 && std::atoi(argv[1]) > 0) {
    const int only = argc > 2 ? std::atoi(argv[2]) : 0;
    TimeAllLowLatency(std::atoi(argv[1]), only);
    TimeAll(std::atoi(argv[1]), only);
    return 0;
  }
  const bool small = argc > 2 && std::string(argv[1]) == "small";
  const auto cases = small ? SmallCases(std::atof(argv[2])) : Cases();
  // What racecheck looks at is inside of one launch, and takes it seconds.
  const int rounds = small ? 1 : 4;
  for (const Case& c : cases) {
    std::printf("layout %d: %s\n", static_cast<int>(c.layout), c.name);
    std::fflush(stdout);
    CheckOperations(c, rounds);
    if (c.layout != jax_ep::Layout::kRank) CheckOverlap(c, rounds);
  }
  if (!small) {
    CheckReplay(cases[0]);
    CheckInverses();
  }
  CheckTickets(cases[0]);
  Case pushed = cases[0];
  pushed.num_ranks = 4;
  pushed.ranks_per_device = 1;
  CheckTickets(pushed);
  CheckMismatch(cases[0]);
  std::printf("%zu cases passed\n", cases.size());
  return 0;
}
