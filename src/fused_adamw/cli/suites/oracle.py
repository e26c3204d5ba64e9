"""The float64 formula beside torch.optim.AdamW in float64."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fused_adamw.cli.suites.check import Check, Suite, require
from fused_adamw.cli.suites.formula import Formula, clip_coefficient
from fused_adamw.cli.suites.training import OPTIONS, make_gradients, make_params

STEPS = 100
SHAPES = ((64, 9), (1,), (777,))

# Both round in float64, a hundred times over, in another order.
TOLERANCE = 1e-12


def compare(options: dict[str, Any], max_norm: float | None = None) -> str:
    """Trains both on the same gradients and compares parameters and moments."""
    params = [nn.Parameter(param.detach().double()) for param in make_params(SHAPES)]
    formulas = [Formula(param.detach().numpy(), **options) for param in params]
    optimizer = torch.optim.AdamW(params, foreach=False, **options)
    for grads in make_gradients(params, STEPS, torch.float64):
        coefficient = 1.0
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
            coefficient = clip_coefficient([grad.numpy() for grad in grads], max_norm)
        optimizer.step()
        for formula, grad in zip(formulas, grads, strict=True):
            formula.update(grad.numpy() * coefficient)
    worst = 0.0
    for i, (param, formula) in enumerate(zip(params, formulas, strict=True)):
        state = optimizer.state[param]
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options.get("amsgrad") else [])]
        pairs = {"param": param.detach(), **{name: state[name] for name in names}}
        for name, tensor in pairs.items():
            expected = getattr(formula, name)
            distance = float((np.abs(tensor.numpy() - expected) / (1.0 + np.abs(expected))).max())
            worst = max(worst, distance)
            require(
                distance <= TOLERANCE,
                f"{name} of parameter {i} is {distance:.3g} from the formula; {TOLERANCE:.0e} is allowed",
            )
    return f"at most {worst:.1e} apart after {STEPS} steps"


def checks(compilers: Sequence[str]) -> list[Check]:
    """One for each set of options."""
    del compilers
    plain = [Check(name, functools.partial(compare, options)) for name, options in OPTIONS.items()]
    return [*plain, Check("clipped", functools.partial(compare, {}, 0.5))]


SUITE = Suite(
    "oracle",
    proves="The float64 NumPy formula that errors are measured by is what torch.optim.AdamW computes.",
    leaves_open="Nothing of fused_adamw itself runs.",
    checks=checks,
)
