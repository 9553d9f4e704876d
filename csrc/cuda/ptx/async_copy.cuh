#ifndef JAX_EP_CSRC_CUDA_PTX_ASYNC_COPY_CUH_
#define JAX_EP_CSRC_CUDA_PTX_ASYNC_COPY_CUH_

#include <cstdint>

// Copies from global to shared memory that a thread does not wait for (sm_80).
namespace jax_ep::cuda::ptx {

// 16 bytes, past L1.
__device__ __forceinline__ void AsyncCopy16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}

// Closes this thread's group of copies.
__device__ __forceinline__ void AsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the latest `kPending` of this thread's groups have arrived.
template <int kPending>
__device__ __forceinline__ void AsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jax_ep::cuda::ptx

#endif  // JAX_EP_CSRC_CUDA_PTX_ASYNC_COPY_CUH_
