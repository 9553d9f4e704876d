#ifndef JAX_EP_CSRC_CUDA_PTX_MBARRIER_CUH_
#define JAX_EP_CSRC_CUDA_PTX_MBARRIER_CUH_

#include <cstdint>

// Barriers in shared memory (sm_80).
namespace jax_ep::cuda::ptx {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void BarrierInit(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}

// Publishes to the block what the thread has done before.
__device__ __forceinline__ void BarrierArrive(uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared::cta.b64 state, [%0];\n"
      "}\n" ::"r"(SharedAddress(barrier))
      : "memory");
}

// Whether the phase of this parity has completed.
__device__ __forceinline__ bool BarrierTest(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace jax_ep::cuda::ptx

#endif  // JAX_EP_CSRC_CUDA_PTX_MBARRIER_CUH_
