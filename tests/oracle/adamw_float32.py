"""The update in float32, operation by operation, as the bits that every backend promises.

Written from the formula in the design, not from the kernels: torch's own float32 operations, each of which
rounds once, in the promised order (the root by way of float64). ``adamw.py`` says whether the numbers are
right; this says whether they are the promised ones among all that would be right.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rounded(value: float) -> Tensor:
    """A double as float32, rounded once."""
    return torch.tensor(value, dtype=torch.float64).to(torch.float32)


def power(beta: float, exponent: int) -> float:
    """beta^exponent in double by repeated squaring, lowest bit first."""
    result = 1.0
    while exponent > 0:
        if exponent % 2:
            result *= beta
        beta *= beta
        exponent //= 2
    return result


def square_root(x: Tensor) -> Tensor:
    """The correctly rounded root, which torch's own float32 root is not on the CPU.

    A float64 root rounds to it: no root of a float32 lies so near to the middle between two float32 numbers.
    """
    return x.to(torch.float64).sqrt().to(torch.float32)


def canonical(x: Tensor) -> Tensor:
    """Every NaN as 0x7fc00000."""
    return torch.where(x.isnan(), torch.tensor(0x7FC00000, dtype=torch.int32).view(torch.float32), x)


def adamw_float32(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor | None,
    exp_avg_sq: Tensor | None,
    max_exp_avg_sq: Tensor | None,
    step: int,
    *,
    amsgrad: bool,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 1e-2,
    eps: float = 1e-8,
    maximize: bool = False,
    grad_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The new param, exp_avg, exp_avg_sq and (zeros without AMSGrad) max_exp_avg_sq; moments None mean 0."""
    param, grad = param.cpu(), grad.cpu()
    old_avg, old_sq, old_max = (
        torch.zeros_like(param) if moment is None else moment.cpu()
        for moment in (exp_avg, exp_avg_sq, max_exp_avg_sq)
    )
    t = step + 1
    step_size = rounded(lr / (1.0 - power(beta1, t)))
    rsqrt_bias2 = rounded(1.0 / math.sqrt(1.0 - power(beta2, t)))
    inverse_scale = torch.tensor(1.0) / rounded(grad_scale)

    g = grad.to(torch.float32) * inverse_scale
    if maximize:
        g = -g
    p = param * rounded(1.0 - lr * weight_decay)
    m = old_avg + rounded(1.0 - beta1) * (g - old_avg)
    v = rounded(beta2) * old_sq + rounded(1.0 - beta2) * (g * g)
    if amsgrad:
        v_max = torch.where(old_max.isnan() | (old_max > v), old_max, v)
        u = v_max
    else:
        v_max = torch.zeros_like(param)
        u = v
    p = p - (step_size * m) / (square_root(u) * rsqrt_bias2 + rounded(eps))
    return canonical(p), canonical(m), canonical(v), canonical(v_max)
