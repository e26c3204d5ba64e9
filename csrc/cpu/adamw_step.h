// The AdamW / AMSGrad step on the CPU: many tensors, one parallel region.
#pragma once

#include <cstdint>
#include <vector>

#include "../low_precision.h"
#include "../update_scalars.h"

namespace fused_adamw::cpu {

// The arrays of one tensor's update. The new values may go to the old arrays (in place) or to others. A
// read array may be exactly a written one (or the gradient); arrays never overlap in part.
struct TensorUpdate {
  std::int64_t size;  // elements
  const void* grad;
  ElementType grad_type;
  WeightForm weights;
  ElementType param_type;  // of 16 bits, unless the weights are kFloat32Weights
  const void* param;
  const void* master;       // FP32, or the 16 bits of kSplitWeights; null with kFloat32Weights
  const float* exp_avg;     // null before the first update: exp_avg, exp_avg_sq and max_exp_avg_sq are
  const float* exp_avg_sq;  // then taken as 0, the master as the parameter, and nothing is read
  const float* max_exp_avg_sq;
  void* new_param;
  void* new_master;
  float* new_exp_avg;
  float* new_exp_avg_sq;
  float* new_max_exp_avg_sq;  // null without AMSGrad
  UpdateScalars scalars;
  std::uint64_t update_number;  // what kStochasticWeights are rounded by: see philox.h
  std::uint64_t rounding_seed;
};

// Updates all tensors with at most `threads` threads. Holds no lock and needs none: the caller must not
// touch the arrays meanwhile.
void adamw_step(const std::vector<TensorUpdate>& updates, int threads);

// The loop over elements [begin, end) of one tensor, compiled once per instruction set.
using UpdateRange = void (*)(const TensorUpdate& update, std::int64_t begin, std::int64_t end);

namespace baseline {
void update_range(const TensorUpdate& update, std::int64_t begin, std::int64_t end);
}
namespace avx2 {
void update_range(const TensorUpdate& update, std::int64_t begin, std::int64_t end);
}
namespace avx512 {
void update_range(const TensorUpdate& update, std::int64_t begin, std::int64_t end);
}

}  // namespace fused_adamw::cpu
