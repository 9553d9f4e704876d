#ifndef JAX_EP_CSRC_CUDA_ROW_PIECES_CUH_
#define JAX_EP_CSRC_CUDA_ROW_PIECES_CUH_

#include <cstdint>

#include "csrc/cuda/divider.cuh"

namespace jax_ep::cuda {

// The pieces of rows of `vectors` vectors, row after row: a piece has 32 of them, one a lane, or
// what is left of its row.
class RowPieces {
 public:
  __device__ __forceinline__ RowPieces(int32_t rows, int32_t vectors)
      : of_row_((vectors + 31) / 32), number_(rows * ((vectors + 31) / 32)) {}

  __device__ __forceinline__ int32_t number() const { return number_; }
  __device__ __forceinline__ int32_t Row(int32_t piece) const { return of_row_.Quotient(piece); }
  // This lane's vector in the row; beyond its end in the last lanes of a row's last piece.
  __device__ __forceinline__ int32_t Vector(int32_t piece) const {
    return of_row_.Remainder(piece) * 32 + static_cast<int32_t>(threadIdx.x % 32);
  }

 private:
  const Divider of_row_;
  const int32_t number_;
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_CSRC_CUDA_ROW_PIECES_CUH_
