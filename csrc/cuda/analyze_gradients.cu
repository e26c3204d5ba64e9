// Gradient statistics: one read of each gradient (4 or 2 bytes per element), 12 bytes written per 16,384.
//
// A thread adds the elements that one 16-byte access brings to its four lanes (block_row.cuh).
#include "block_row.cuh"
#include "device_support.cuh"
#include "gradient_stats.h"
#include "update_scalars.h"

namespace fused_adamw::cuda {

constexpr unsigned kInfinityBits = 0x7F800000u;

// Accesses that a thread has under way while it sums as many, and how many blocks are to fit on a
// multiprocessor: as many as have enough registers. Without a limit the compiler takes twice as many.
constexpr int kBatch = 4;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int kAnalysesPerProcessor = 5;
#else
constexpr int kAnalysesPerProcessor = 3;
#endif

// `kAllFinite`: the value is taken to be finite. If not, max_bits tells, and the sums are of no use.
template <bool kAllFinite>
__device__ __forceinline__ void add_value(LaneSums& sums, int lane, float value) {
  unsigned bits = __float_as_uint(value) & 0x7FFFFFFFu;
  if (!kAllFinite) {
    const bool finite = bits < kInfinityBits;
    sums.nonfinite |= !finite;
    bits = finite ? bits : 0u;
  }
  sums.max_bits = max(sums.max_bits, bits);
  const double magnitude = static_cast<double>(__uint_as_float(bits));
  // The product is exact in float64, so that this rounds as a product and a sum do.
  sums.squares[lane] = __fma_rn(magnitude, magnitude, sums.squares[lane]);
}

template <bool kAllFinite, typename Gradient>
__device__ __forceinline__ void add_values(LaneSums& sums, const Packed<Gradient>& packed,
                                           float inverse_scale) {
  float values[4];
  packed.unpack(values);
#pragma unroll
  for (int k = 0; k < 4; ++k) add_value<kAllFinite>(sums, k, values[k] * inverse_scale);
}

template <typename Gradient>
__device__ __forceinline__ LaneSums sum_chunk(const Gradient* elements, long long count, bool vectorised,
                                              float inverse_scale) {
  constexpr int kPasses = static_cast<int>(kElementsPerRow / kLanes);
  // Two batches of accesses are under way in turn: one is summed while the next is awaited.
  static_assert(kPasses % (2 * kBatch) == 0, "");
  LaneSums sums = {};
  const int lane = threadIdx.x * kElementsPerThread;
  if (vectorised && count == kElementsPerRow) {
    Packed<Gradient> batches[2][kBatch];
    const Gradient* next = elements + lane;
    const auto load = [&](Packed<Gradient>(&batch)[kBatch]) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) batch[i].load(next + i * kLanes);
      next += kBatch * kLanes;
    };
    const auto add = [&](const Packed<Gradient>(&batch)[kBatch]) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) add_values<true>(sums, batch[i], inverse_scale);
    };
    load(batches[0]);
#pragma unroll 1
    for (int pass = 2 * kBatch; pass < kPasses; pass += 2 * kBatch) {
      load(batches[1]);
      add(batches[0]);
      load(batches[0]);
      add(batches[1]);
    }
    load(batches[1]);
    add(batches[0]);
    add(batches[1]);
    if (sums.max_bits < kInfinityBits) return sums;
    sums = {};
  }
#pragma unroll 1
  for (long long base = lane; base < count; base += kBatch * kLanes) {
    Packed<Gradient> batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const long long first = base + i * kLanes;
      if (vectorised && first + kElementsPerThread <= count) {
        batch[i].load(elements + first);
      } else {
        batch[i].load_some(elements + first, count - first);  // where there is none, 0: no sum changes
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) add_values<false>(sums, batch[i], inverse_scale);
  }
  return sums;
}

}  // namespace fused_adamw::cuda

using namespace fused_adamw;
using namespace fused_adamw::cuda;

// Grid: one block per row.
extern "C" __global__ void __launch_bounds__(kThreads, kAnalysesPerProcessor)
    analyze_gradients(const __grid_constant__ AnalyzeParameters parameters) {
  release_next();
  // From the last block to the first: a step, which begins at the front, then finds what was read last in the
  // second-level cache.
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const int index = find_tensor(parameters.index, block);
  const GradientTensor& tensor = parameters.gradients[index];
  const long long first = (block - parameters.index.first[index]) * kElementsPerRow;
  const long long count = min(tensor.shape.size - first, kElementsPerRow);
  const float inverse_scale = inverse_grad_scale(read(parameters.grad_scale));
  LaneSums sums;
  switch (tensor.shape.grad) {
    case kFloat16:
      sums = sum_chunk(static_cast<const Half*>(tensor.grad) + first, count, tensor.shape.vectorised,
                       inverse_scale);
      break;
    case kBFloat16:
      sums = sum_chunk(static_cast<const BFloat16*>(tensor.grad) + first, count, tensor.shape.vectorised,
                       inverse_scale);
      break;
    default:
      sums = sum_chunk(static_cast<const float*>(tensor.grad) + first, count, tensor.shape.vectorised,
                       inverse_scale);
  }
  const StatsRow stats = merge_lanes(sums);
  if (threadIdx.x == 0) store_row(parameters.rows, block, stats);
}
