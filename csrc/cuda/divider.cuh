#ifndef JAX_EP_CSRC_CUDA_DIVIDER_CUH_
#define JAX_EP_CSRC_CUDA_DIVIDER_CUH_

#include <cstdint>

namespace jax_ep::cuda {

// Division of a number that is not negative by one that is known only when the kernel runs, by
// multiplication: a division has some 25 instructions, one after the other.
class Divider {
 public:
  __device__ __forceinline__ explicit Divider(int32_t divisor)
      : divisor_(divisor), inverse_(divisor > 1 ? ~0u / static_cast<uint32_t>(divisor) + 1 : 0) {}

  __device__ __forceinline__ int32_t Quotient(int32_t number) const {
    if (inverse_ == 0) return number;
    // Too large by 1 at most, where number * divisor has more than 32 bits.
    const auto high = static_cast<int32_t>(__umulhi(static_cast<uint32_t>(number), inverse_));
    return high - (static_cast<uint32_t>(high) * static_cast<uint32_t>(divisor_) >
                   static_cast<uint32_t>(number));
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
