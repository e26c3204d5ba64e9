// From the options of a step to the FP32 scalars of adamw_update.h: double arithmetic, rounded once.
#pragma once

#include "adamw_update.h"

namespace fused_adamw {

// The options of one parameter group, as a user gives them.
struct StepOptions {
  double lr;
  double beta1;
  double beta2;
  double weight_decay;
  double eps;
  double grad_scale;  // the gradients were multiplied by it; 1 where there is none
  double clip;        // the gradients are to be multiplied by it, at most 1; 1 where clipping is off
  bool maximize;
};

// beta^t by repeated squaring. Multiplications only, each rounded once: the last bit of pow() differs
// between math libraries, and host and device must agree.
FUSED_ADAMW_FUNCTION double beta_power(double beta, long long t) {
  double power = 1.0;
  for (; t > 0; t >>= 1) {
    if ((t & 1) != 0) power *= beta;
    beta *= beta;
  }
  return power;
}

// What gradients that were multiplied by `grad_scale` are multiplied by: its reciprocal in FP32.
FUSED_ADAMW_FUNCTION float inverse_grad_scale(double grad_scale) {
  return 1.0f / static_cast<float>(grad_scale);
}

// What the gradients are to be multiplied by besides, at most 1.
FUSED_ADAMW_FUNCTION void set_clip(UpdateScalars& scalars, double clip) {
  // A clip below the normal numbers would lose its bits in float32; the product with a power of two that
  // follows does not. 2^126 keeps the first factor below 1, so that no gradient overflows in between.
  const bool tiny = clip < 0x1.0p-126;
  scalars.clip = static_cast<float>(tiny ? clip * 0x1.0p126 : clip);
  scalars.clip_scale = tiny ? 0x1.0p-126f : 1.0f;
}

FUSED_ADAMW_FUNCTION float step_size(double lr, double beta1, long long t) {
  return static_cast<float>(lr / (1.0 - beta_power(beta1, t)));
}

FUSED_ADAMW_FUNCTION float rsqrt_bias2(double beta2, long long t) {
  return static_cast<float>(1.0 / FUSED_ADAMW_SQRT_DOUBLE(1.0 - beta_power(beta2, t)));
}

// All scalars but these two, which depend on the number of the update.
FUSED_ADAMW_FUNCTION void set_constant_scalars(UpdateScalars& scalars, const StepOptions& options) {
  const float inverse_scale = inverse_grad_scale(options.grad_scale);
  scalars.inverse_scale = options.maximize ? -inverse_scale : inverse_scale;
  set_clip(scalars, options.clip);
  scalars.decay = static_cast<float>(1.0 - options.lr * options.weight_decay);
  scalars.beta1_complement = static_cast<float>(1.0 - options.beta1);
  scalars.beta2 = static_cast<float>(options.beta2);
  scalars.beta2_complement = static_cast<float>(1.0 - options.beta2);
  scalars.eps = static_cast<float>(options.eps);
}

// The scalars of update number `t` (1 for the first).
FUSED_ADAMW_FUNCTION UpdateScalars update_scalars(const StepOptions& options, long long t) {
  UpdateScalars scalars;
  set_constant_scalars(scalars, options);
  scalars.step_size = step_size(options.lr, options.beta1, t);
  scalars.rsqrt_bias2 = rsqrt_bias2(options.beta2, t);
  return scalars;
}

}  // namespace fused_adamw
