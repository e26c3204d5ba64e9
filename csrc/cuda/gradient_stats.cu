// Gradient statistics: one read of each gradient (4 or 2 bytes per element), 12 bytes written per 16,384.
//
// The lanes of gradient_stats.h are laid on a block so that no sum has to be reordered: thread t keeps lanes
// 4t to 4t+3 in float64 registers and adds the elements that one 16-byte access brings, then the tree over
// neighbours goes through registers, warp shuffles and eight values in shared memory.
#include "device_support.cuh"
#include "gradient_stats.h"
#include "update_scalars.h"

namespace fused_adamw::cuda {

constexpr int kWarps = kThreads / 32;
constexpr unsigned kInfinityBits = 0x7F800000u;

// Accesses that a thread has under way while it sums as many, and how many blocks are to fit on a
// multiprocessor: as many as have enough registers. Without a limit the compiler takes twice as many.
constexpr int kBatch = 4;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int kAnalysesPerProcessor = 5;
#else
constexpr int kAnalysesPerProcessor = 3;
#endif

static_assert(kElementsPerRound == kLanes, "a thread keeps four lanes");

struct LaneSums {
  double squares[4];
  unsigned max_bits;
  bool nonfinite;
};

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

// The row of a block; only thread 0 has it.
__device__ __forceinline__ StatsRow merge_lanes(const LaneSums& sums) {
  __shared__ double warp_squares[kWarps];
  __shared__ unsigned warp_max[kWarps];
  __shared__ bool warp_nonfinite[kWarps];
  double squares = (sums.squares[0] + sums.squares[1]) + (sums.squares[2] + sums.squares[3]);
  unsigned max_bits = sums.max_bits;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, distance);
    max_bits = max(max_bits, __shfl_xor_sync(0xffffffffu, max_bits, distance));
  }
  const bool nonfinite = __any_sync(0xffffffffu, sums.nonfinite);
  const int warp = threadIdx.x / 32;
  __syncthreads();  // the last use of the shared values, where a block merges more than once
  if (threadIdx.x % 32 == 0) {
    warp_squares[warp] = squares;
    warp_max[warp] = max_bits;
    warp_nonfinite[warp] = nonfinite;
  }
  __syncthreads();
  StatsRow row = {};
  if (threadIdx.x == 0) {
    double total[kWarps];
    unsigned most = 0;
    bool any = false;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      total[w] = warp_squares[w];
      most = max(most, warp_max[w]);
      any |= warp_nonfinite[w];
    }
#pragma unroll
    for (int width = kWarps / 2; width > 0; width /= 2) {
#pragma unroll
      for (int w = 0; w < width; ++w) total[w] = total[2 * w] + total[2 * w + 1];
    }
    row = make_row(__uint_as_float(most), total[0], any);
  }
  return row;
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

__device__ __forceinline__ void store_row(float* rows, long long index, const StatsRow& row) {
  rows[3 * index] = row.max_abs;
  rows[3 * index + 1] = row.scaled_sum_of_squares;
  rows[3 * index + 2] = row.nonfinite;
}

// Up to 1024 rows into one; thread t takes rows 4t to 4t+3.
__device__ __forceinline__ StatsRow merge_block(const float* rows, long long count) {
  LaneSums sums = {};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const long long i = threadIdx.x * 4 + k;
    if (i < count) {
      // Through the second-level cache: the rows may have been written by other blocks of this launch.
      const StatsRow row = {__ldcg(rows + 3 * i), __ldcg(rows + 3 * i + 1), __ldcg(rows + 3 * i + 2)};
      sums.squares[k] = sum_of_squares(row);
      sums.max_bits = max(sums.max_bits, __float_as_uint(row.max_abs));
      sums.nonfinite |= row.nonfinite != 0.0f;
    }
  }
  return merge_lanes(sums);
}

// Group `group` of up to 1024 rows into one; the block that comes last goes on with all later stages.
__device__ __forceinline__ void merge_group(const MergeParameters& merge, long long group) {
  const long long first = group * kRowsPerMerge;
  const long long groups = (merge.count + kRowsPerMerge - 1) / kRowsPerMerge;
  const StatsRow row = merge_block(merge.rows + 3 * first, min(merge.count - first, kRowsPerMerge));
  if (threadIdx.x == 0) store_row(groups == 1 ? merge.report : merge.scratch, group, row);
  if (groups == 1 || !all_finished(merge.slot, static_cast<unsigned>(groups))) return;
  const float* rows = merge.scratch;
  long long count = groups;
  while (true) {
    const long long merged = (count + kRowsPerMerge - 1) / kRowsPerMerge;
    float* target = merged == 1 ? merge.report : const_cast<float*>(rows) + 3 * count;
    for (long long i = 0; i < merged; ++i) {
      const StatsRow next =
          merge_block(rows + 3 * i * kRowsPerMerge, min(count - i * kRowsPerMerge, kRowsPerMerge));
      if (threadIdx.x == 0) store_row(target, i, next);
    }
    if (merged == 1) return;
    __threadfence();
    __syncthreads();
    rows = target;
    count = merged;
  }
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

// Grid: one block per 1024 rows. One stage.
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_rows(const __grid_constant__ MergeParameters parameters) {
  const MergeParameters& merge = parameters;
  const long long first = blockIdx.x * kRowsPerMerge;
  const StatsRow row = merge_block(merge.rows + 3 * first, min(merge.count - first, kRowsPerMerge));
  if (threadIdx.x == 0) store_row(merge.report, blockIdx.x, row);
}

// Grid: one block per 1024 rows. All stages.
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_all_rows(const __grid_constant__ MergeParameters parameters) {
  release_next();
  wait_for_previous();
  merge_group(parameters, blockIdx.x);
}

// Grid: one thread. All rows in a single sum, one after another.
extern "C" __global__ void merge_all_rows_serially(const __grid_constant__ MergeParameters parameters) {
  const MergeParameters& merge = parameters;
  wait_for_previous();
  double squares = 0.0;
  float max_abs = 0.0f;
  bool nonfinite = false;
  for (long long i = 0; i < merge.count; ++i) {
    const StatsRow row = {merge.rows[3 * i], merge.rows[3 * i + 1], merge.rows[3 * i + 2]};
    squares += sum_of_squares(row);
    max_abs = fmaxf(max_abs, row.max_abs);
    nonfinite |= row.nonfinite != 0.0f;
  }
  store_row(merge.report, 0, make_row(max_abs, squares, nonfinite));
}
