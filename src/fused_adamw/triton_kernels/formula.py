"""The update formula and its scalars: mirrors ``csrc/adamw_update.h`` and ``csrc/update_scalars.h``.

Triton cannot include those headers; the tests hold the bits of both equal. Compile it without contraction
(``enable_fp_fusion=False``), as them.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The power of two that is taken out of a clip below the normal numbers of float32.
TINY = tl.constexpr(2.0**-126)
TINY_INVERSE = tl.constexpr(2.0**126)
NAN_BITS = tl.constexpr(0x7FC00000)
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def inverse_grad_scale(grad_scale):
    """The reciprocal of a float64 scale in float32."""
    return tl.div_rn(1.0, grad_scale.to(tl.float32))


@triton.jit
def complement(beta):
    """``1 - beta`` in float32."""
    return (1.0 - beta).to(tl.float32)


@triton.jit
def decay_factor(lr, weight_decay):
    """``1 - lr * weight_decay`` in float32."""
    return (1.0 - lr * weight_decay).to(tl.float32)


@triton.jit
def pick(values, lane: tl.constexpr):
    """One of 32 float32 values, as a scalar."""
    chosen = tl.where(tl.arange(0, 32) == lane, values.to(tl.int32, bitcast=True), 0)
    return tl.sum(chosen, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def lane_values(first, second, third):
    """What the lanes of ``quotients`` work on."""
    lane = tl.arange(0, 32)
    return tl.where(lane == 0, first, tl.where(lane == 1, second, third))


@triton.jit
def quotients(dividend, beta, t, max_abs, scaled_squares, max_norm, epsilon, clip):
    """The float32 scalars that take divisions: ``step_size``, ``rsqrt_bias2``, ``clip``, ``clip_scale``.

    All threads of a program form them, and float64 is slow on many cards. So the lanes of a warp share the
    work: lane 0 forms the step size, lane 1 the bias correction of the second moment, lane 2 the clip (the
    rest what lane 2 forms), each as one quotient.

    Args:
        dividend: ``lane_values(lr, 1, max_norm)`` in float64.
        beta: ``lane_values(beta1, beta2, any)`` in float64.
        t: The number of the update, int64.
        max_abs: Of the report, float32.
        scaled_squares: Of the report, float32.
        max_norm: float64; negative where ``clip`` is taken, not that of ``csrc/gradient_stats.h``.
        epsilon: Of the norm, float64.
        clip: float64.
    """
    lane = tl.arange(0, 32)
    # beta^t by repeated squaring.
    power = tl.full((32,), 1.0, tl.float64)
    while t > 0:
        power = tl.where((t & 1) != 0, power * beta, power)
        beta *= beta
        t >>= 1
    correction = 1.0 - power
    root = tl.sqrt(tl.where(lane < 2, correction, scaled_squares.to(tl.float64)))
    divisor = lane_values(correction, root, max_abs.to(tl.float64) * root + epsilon)
    quotient = dividend / divisor
    coefficient = tl.where(max_norm >= 0.0, tl.where(quotient < 1.0, quotient, 1.0), clip)
    # A clip below the normal numbers would lose its bits in float32.
    tiny = coefficient < TINY
    coefficient = tl.where(tiny, coefficient * TINY_INVERSE, coefficient)
    values = tl.where(lane < 2, quotient, coefficient).to(tl.float32)
    clip_scales = tl.where(tiny, TINY, 1.0).to(tl.float32)
    return pick(values, 0), pick(values, 1), pick(values, 2), pick(clip_scales, 2)


@triton.jit
def canonical_nan(x):
    """``x``, with one NaN for all."""
    return tl.where(x == x, x, tl.full((), NAN_BITS, tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def adamw_update(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, scalars, AMSGRAD: tl.constexpr):
    """One update of float32 elements: parameter, moments, maximum (unchanged without AMSGrad)."""
    inverse_scale, decay, beta1_complement, beta2, beta2_complement, eps, corrections = scalars
    step_size, rsqrt_bias2, clip, clip_scale = corrections
    g = grad * inverse_scale
    g = g * clip
    g = g * clip_scale
    decayed = param * decay
    exp_avg = exp_avg + beta1_complement * (g - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + beta2_complement * (g * g)
    second_moment = exp_avg_sq
    if AMSGRAD:
        # A NaN on either side stays: the comparison is false for a NaN in exp_avg_sq.
        keep = (max_exp_avg_sq > exp_avg_sq) | (max_exp_avg_sq != max_exp_avg_sq)
        second_moment = tl.where(keep, max_exp_avg_sq, exp_avg_sq)
        max_exp_avg_sq = canonical_nan(second_moment)
    denominator = tl.sqrt_rn(second_moment) * rsqrt_bias2 + eps
    param = decayed - tl.div_rn(step_size * exp_avg, denominator)
    return canonical_nan(param), canonical_nan(exp_avg), canonical_nan(exp_avg_sq), max_exp_avg_sq
