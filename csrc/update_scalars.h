// From the options of a step to the FP32 scalars of adamw_update.h: double arithmetic, rounded once.
#pragma once

#include "adamw_update.h"

#if defined(__CUDACC__)
#define FUSED_ADAMW_SQRT_DOUBLE(x) __dsqrt_rn(x)
#else
#define FUSED_ADAMW_SQRT_DOUBLE(x) __builtin_sqrt(x)
#endif

namespace fused_adamw {

// The options of one parameter group, as a user gives them.
struct StepOptions {
  double lr;
  double beta1;
  double beta2;
  double weight_decay;
  double eps;
  double grad_scale;  // the gradients were multiplied by it; 1 where there is none
  bool maximize;
};

// beta^t by repeated squaring. Multiplications only, each rounded once: the last bit of pow() differs
// between math libraries, and host and device must agree.
FUSED_ADAMW_FUNCTION double beta_power(double beta, long long t) {
  double power = 1.0;
  for (; t > 0; t >>= 1) {
    if (t & 1) power *= beta;
    beta *= beta;
  }
  return power;
}

// The scalars of update number `t` (1 for the first).
FUSED_ADAMW_FUNCTION UpdateScalars update_scalars(const StepOptions& options, long long t) {
  const float inverse_scale = 1.0f / static_cast<float>(options.grad_scale);
  UpdateScalars scalars;
  scalars.inverse_scale = options.maximize ? -inverse_scale : inverse_scale;
  scalars.clip = 1.0f;
  scalars.decay = static_cast<float>(1.0 - options.lr * options.weight_decay);
  scalars.beta1_complement = static_cast<float>(1.0 - options.beta1);
  scalars.beta2 = static_cast<float>(options.beta2);
  scalars.beta2_complement = static_cast<float>(1.0 - options.beta2);
  scalars.step_size = static_cast<float>(options.lr / (1.0 - beta_power(options.beta1, t)));
  scalars.rsqrt_bias2 = static_cast<float>(1.0 / FUSED_ADAMW_SQRT_DOUBLE(1.0 - beta_power(options.beta2, t)));
  scalars.eps = static_cast<float>(options.eps);
  return scalars;
}

}  // namespace fused_adamw
