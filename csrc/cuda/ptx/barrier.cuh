#ifndef JAX_EP_CSRC_CUDA_PTX_BARRIER_CUH_
#define JAX_EP_CSRC_CUDA_PTX_BARRIER_CUH_

#include <cstdint>

// Barriers of some of a block's warps.
namespace jax_ep::cuda::ptx {

__device__ __forceinline__ void BarrierSync(int32_t barrier, int32_t threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Whether `mine` holds on all threads.
__device__ __forceinline__ bool BarrierSyncAnd(int32_t barrier, int32_t threads, bool mine) {
  uint32_t all;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "barrier.cta.red.and.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(all)
      : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(mine))
      : "memory");
  return all != 0;
}

}  // namespace jax_ep::cuda::ptx

#endif  // JAX_EP_CSRC_CUDA_PTX_BARRIER_CUH_
