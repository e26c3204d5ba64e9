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

struct BetaPowers {
  double beta1;
  double beta2;
};

// beta1^t and beta2^t by repeated squaring, side by side: on CUDA a block waits for them. Multiplications
// only, each rounded once: the last bit of pow() differs between math libraries, and host and device must
// agree.
FUSED_ADAMW_FUNCTION BetaPowers beta_powers(double beta1, double beta2, long long t) {
  BetaPowers powers = {1.0, 1.0};
  for (; t > 0; t >>= 1) {
    const bool odd = (t & 1) != 0;
    powers.beta1 *= odd ? beta1 : 1.0;
    powers.beta2 *= odd ? beta2 : 1.0;
    beta1 *= beta1;
    beta2 *= beta2;
  }
  return powers;
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

// The scalars of update number `t` (1 for the first).
FUSED_ADAMW_FUNCTION UpdateScalars update_scalars(const StepOptions& options, long long t) {
  const float inverse_scale = inverse_grad_scale(options.grad_scale);
  const BetaPowers powers = beta_powers(options.beta1, options.beta2, t);
  UpdateScalars scalars;
  scalars.inverse_scale = options.maximize ? -inverse_scale : inverse_scale;
  set_clip(scalars, options.clip);
  scalars.decay = static_cast<float>(1.0 - options.lr * options.weight_decay);
  scalars.beta1_complement = static_cast<float>(1.0 - options.beta1);
  scalars.beta2 = static_cast<float>(options.beta2);
  scalars.beta2_complement = static_cast<float>(1.0 - options.beta2);
  scalars.step_size = static_cast<float>(options.lr / (1.0 - powers.beta1));
  scalars.rsqrt_bias2 = static_cast<float>(1.0 / FUSED_ADAMW_SQRT_DOUBLE(1.0 - powers.beta2));
  scalars.eps = static_cast<float>(options.eps);
  return scalars;
}

}  // namespace fused_adamw
