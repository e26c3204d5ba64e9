// The update formula of AdamW and AMSGrad: the only place where it is written for C++.
//
// The same text is compiled for the CPU (once per instruction set, see cpu/) and for CUDA, so it uses
// nothing but FP32 arithmetic in a fixed order. Compile it without contraction (-ffp-contract=off,
// --fmad=false): every operation below then rounds once, on every backend, and the results agree bit for
// bit.
//
// Sources: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2;
// Reddi, Kale and Kumar, "On the Convergence of Adam and Beyond" (2018), for the running maximum, taken as
// torch.optim.AdamW takes it: of the second moment before its bias correction.
#pragma once

// `static`, not `inline`: translation units built for different instruction sets must never share one
// compiled copy, or the linker could hand AVX-512 code to a processor without it.
#if defined(__CUDACC__)
#define FUSED_ADAMW_FUNCTION static __device__ __forceinline__
#define FUSED_ADAMW_SQRT(x) __fsqrt_rn(x)
#define FUSED_ADAMW_SQRT_DOUBLE(x) __dsqrt_rn(x)
#define FUSED_ADAMW_NAN __int_as_float(0x7fc00000)
#else
#define FUSED_ADAMW_FUNCTION static inline __attribute__((always_inline))
#define FUSED_ADAMW_SQRT(x) __builtin_sqrtf(x)
#define FUSED_ADAMW_SQRT_DOUBLE(x) __builtin_sqrt(x)
#define FUSED_ADAMW_NAN __builtin_nanf("")
#endif

namespace fused_adamw {

// What one tensor's update needs, rounded from double to FP32 once (see update_scalars.h).
struct UpdateScalars {
  float inverse_scale;     // 1 / grad_scale; negative for maximize: a product's sign is exact
  float clip;              // clip coefficient; 1 where clipping is off, and a product with 1 is exact
  float clip_scale;        // 1, or the power of two that was taken out of a clip too small for float32
  float decay;             // 1 - lr * weight_decay
  float beta1_complement;  // 1 - beta1
  float beta2;
  float beta2_complement;  // 1 - beta2
  float step_size;         // lr / (1 - beta1^t)
  float rsqrt_bias2;       // 1 / sqrt(1 - beta2^t)
  float eps;
};

// One element of a parameter and of its state.
struct Element {
  float param;
  float exp_avg;
  float exp_avg_sq;
  float max_exp_avg_sq;  // AMSGrad only
};

// Processors differ in the payload and sign of the NaN that they produce; one NaN keeps the bits equal.
FUSED_ADAMW_FUNCTION float canonical_nan(float x) { return x == x ? x : FUSED_ADAMW_NAN; }

template <bool kAmsgrad>
FUSED_ADAMW_FUNCTION Element adamw_update(Element old, float grad, const UpdateScalars& scalars) {
  float g = grad * scalars.inverse_scale;
  g = g * scalars.clip;
  g = g * scalars.clip_scale;
  const float decayed = old.param * scalars.decay;
  const float exp_avg = old.exp_avg + scalars.beta1_complement * (g - old.exp_avg);
  const float exp_avg_sq = scalars.beta2 * old.exp_avg_sq + scalars.beta2_complement * (g * g);
  float max_exp_avg_sq = 0.0f;
  float second_moment = exp_avg_sq;
  if (kAmsgrad) {
    // A NaN on either side stays: the comparison is false for a NaN in exp_avg_sq.
    const bool keep = old.max_exp_avg_sq > exp_avg_sq || old.max_exp_avg_sq != old.max_exp_avg_sq;
    max_exp_avg_sq = keep ? old.max_exp_avg_sq : exp_avg_sq;
    second_moment = max_exp_avg_sq;
  }
  const float denominator = FUSED_ADAMW_SQRT(second_moment) * scalars.rsqrt_bias2 + scalars.eps;
  const float param = decayed - (scalars.step_size * exp_avg) / denominator;
  return {canonical_nan(param), canonical_nan(exp_avg), canonical_nan(exp_avg_sq),
          canonical_nan(max_exp_avg_sq)};
}

}  // namespace fused_adamw
