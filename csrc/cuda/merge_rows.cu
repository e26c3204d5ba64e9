// Rows of gradient statistics into fewer rows, or into the report.
#include "block_row.cuh"
#include "device_support.cuh"
#include "gradient_stats.h"

namespace fused_adamw::cuda {

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
