// Compiled, never run: what the kernels take from core must compile as device code.
#include "csrc/core/dtype.h"
#include "csrc/core/macros.h"
#include "csrc/core/quantize.h"
#include "csrc/core/shape.h"
#include "csrc/core/slots.h"
#include "csrc/core/status.h"

namespace jax_ep {

// Each thread places a pair, and encodes and decodes its source.
__global__ void DeviceCheck(Shape shape, int64_t count, const int32_t* topk_idx, int32_t* slots,
                            int32_t* row_source, int64_t* group_sizes) {
  const int32_t pair = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  const int32_t expert = topk_idx[pair];
  const int32_t rank = shape.rank_of_expert(expert);
  const int32_t local_expert = expert - rank * shape.num_local_experts();
  const int64_t rows = ExpertRows(shape, count);

  slots[pair] = PairSlot(shape, local_expert, local_expert * rows, pair);
  row_source[pair] = EncodeSource(shape, {rank, pair / shape.num_topk, pair % shape.num_topk});
  const Source source = DecodeSource(shape, row_source[pair]);
  if (source.rank == rank && slots[pair] != kNoSlot && slots[pair] < shape.num_rows()) {
    group_sizes[local_expert] = ClippedSize(local_expert * rows, rows, shape.capacity);
  }
}

// Each thread casts the first columns of its block.
__global__ void DeviceCheckQuantize(Quantize quantize, int32_t columns, const float* x,
                                    uint8_t* values, uint32_t* scales) {
  const int32_t block = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (block >= NumBlocks(columns)) return;
  const float first = x[block * kBlockColumns];
  const BlockScale scale = ScaleOf(quantize, Magnitude(first));
  values[block * StorageBytes(DType::kF8E4M3FN)] = QuantizeValue(first, scale.inverse);
  scales[block * ScaleBytes(quantize)] = scale.bits;
}

}  // namespace jax_ep
