#ifndef JAX_EP_CSRC_CUDA_DIVIDER_CUH_
#define JAX_EP_CSRC_CUDA_DIVIDER_CUH_

#include <cstdint>

namespace jax_ep::cuda {

// Division by a number that is known only when the kernel runs, by multiplication: a division has some
// 25 instructions, one after the other. For numbers that give less than 2^32 multiplied by the
// divisor.
class Divider {
 public:
  __device__ __forceinline__ explicit Divider(int32_t divisor)
      : divisor_(divisor), inverse_(divisor > 1 ? ~0u / static_cast<uint32_t>(divisor) + 1 : 0) {}

  __device__ __forceinline__ int32_t Quotient(int32_t number) const {
    const uint32_t high = __umulhi(static_cast<uint32_t>(number), inverse_);
    return inverse_ == 0 ? number : static_cast<int32_t>(high);
  }
  __device__ __forceinline__ int32_t Remainder(int32_t number) const {
    return number - Quotient(number) * divisor_;
  }

 private:
  const int32_t divisor_;
  const uint32_t inverse_;  // 2^32 / divisor, rounded up; 0 for 1
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_DIVIDER_CUH_
