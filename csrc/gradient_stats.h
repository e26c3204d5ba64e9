// The algebra of gradient statistics: the only place where it is written for C++, host and device.
//
// A row stands for any number of elements in 12 bytes: their greatest magnitude, the sum of the squares of
// their ratios to it, and whether any was not finite (such elements count in neither of the others). The
// representation is that of LAPACK's xLASSQ (Blue, "A Portable Fortran Program to Find the Euclidean Norm of
// a Vector", 1978): max_abs^2 * scaled_sum_of_squares is the sum of squares, and no float32 square that could
// overflow or vanish is ever formed. Inside a chunk the squares are summed in float64, which represents the
// square of any float32 exactly.
//
// The order of every sum is fixed, so that all backends form the same bits: element i of a chunk adds to lane
// i mod 1024 in the order of i, and lanes are summed by a binary tree over neighbours, ((0+1)+(2+3))+....
// Rows are merged 1024 at a time by the same tree.
#pragma once

#include "adamw_update.h"

namespace fused_adamw {

constexpr long long kElementsPerRow = 16384;
constexpr int kLanes = 1024;
constexpr long long kRowsPerMerge = kLanes;

struct StatsRow {
  float max_abs;
  float scaled_sum_of_squares;
  float nonfinite;  // 0 or 1
};

static_assert(sizeof(StatsRow) == 12, "rows are stored as three consecutive FP32 values");

constexpr long long kValuesPerRow = sizeof(StatsRow) / sizeof(float);

// The row of elements with this greatest magnitude and this sum of squares.
FUSED_ADAMW_FUNCTION StatsRow make_row(float max_abs, double sum_of_squares, bool nonfinite) {
  const double scale = static_cast<double>(max_abs) * static_cast<double>(max_abs);
  const float scaled = max_abs > 0.0f ? static_cast<float>(sum_of_squares / scale) : 0.0f;
  return {max_abs, scaled, nonfinite ? 1.0f : 0.0f};
}

FUSED_ADAMW_FUNCTION double sum_of_squares(const StatsRow& row) {
  return static_cast<double>(row.max_abs) * static_cast<double>(row.max_abs) *
         static_cast<double>(row.scaled_sum_of_squares);
}

// max_norm / (norm + epsilon), at most 1: as torch.nn.utils.clip_grad_norm_, in float64.
FUSED_ADAMW_FUNCTION double clip_coefficient(const StatsRow& report, double max_norm, double epsilon) {
  const double norm = static_cast<double>(report.max_abs) *
                      FUSED_ADAMW_SQRT_DOUBLE(static_cast<double>(report.scaled_sum_of_squares));
  const double coefficient = max_norm / (norm + epsilon);
  return coefficient < 1.0 ? coefficient : 1.0;
}

}  // namespace fused_adamw
