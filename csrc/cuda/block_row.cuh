// The row that a block makes of what its threads have summed: shared by the analysis and the merge.
//
// The lanes of gradient_stats.h are laid on a block so that no sum has to be reordered: thread t keeps lanes
// 4t to 4t+3 in float64 registers, then the tree over neighbours goes through registers, warp shuffles and
// eight values in shared memory.
#pragma once

#include "device_support.cuh"
#include "gradient_stats.h"

namespace fused_adamw::cuda {

constexpr int kWarps = kThreads / 32;

static_assert(kElementsPerRound == kLanes, "a thread keeps four lanes");

struct LaneSums {
  double squares[4];
  unsigned max_bits;
  bool nonfinite;
};

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

__device__ __forceinline__ void store_row(float* rows, long long index, const StatsRow& row) {
  rows[3 * index] = row.max_abs;
  rows[3 * index + 1] = row.scaled_sum_of_squares;
  rows[3 * index + 2] = row.nonfinite;
}

}  // namespace fused_adamw::cuda
