"""The error after many steps, against the float64 oracle and beside torch's own.

torch.optim.AdamW gets the same gradients, in float32. Both round, in another order, so neither is always the
better one. Ours over torch's, measured on the cases below with two seeds each:

                       param         exp_avg      exp_avg_sq    max_exp_avg_sq
    at the worst   0.92 to 1.08   0.74 to 1.73   0.76 to 1.29    0.94 to 1.49
    root of mean   0.99 to 1.003  1.06 to 1.44   0.98 to 1.01    0.99 to 1.10

exp_avg pays for bits that are equal on all backends: torch's lerp is one FMA there, ours a rounded product
and a sum. The parameter does not notice.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fused_adamw
from oracle.adamw import Oracle
from training import advance, make_gradients, make_params, set_gradients

# The least that the measured ratios leave room for, in the order above.
SLACK_AT_WORST = (1.25, 2.0, 2.0, 2.0)
SLACK_IN_MEAN = (1.02, 1.6, 1.05, 1.2)

STEPS = 1000
SHAPE = (2048,)
OPTIONS = {
    "default": {},
    "no decay": {"weight_decay": 0.0, "lr": 1e-2},
    "strong decay": {"weight_decay": 0.5, "lr": 1e-2},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.0},
    "maximize": {"maximize": True, "weight_decay": 0.0},
    "amsgrad, maximize, other betas": {
        "amsgrad": True,
        "maximize": True,
        "betas": (0.5, 0.95),
        "eps": 1e-5,
        "weight_decay": 0.0,
    },
}


def train(cls: type[torch.optim.Optimizer], gradients: list[list[Tensor]], options: dict) -> list[Tensor]:
    """The parameter and its moments in the end."""
    [param] = params = make_params([SHAPE])
    optimizer = cls(params, **options)
    for grads in gradients:
        set_gradients(params, grads)
        optimizer.step()
    state = optimizer.state[param]
    return [param.detach(), *(state[name] for name in sorted(state) if name != "step")]


def errors(found: list[Tensor], oracle: Oracle) -> list[Tensor]:
    expected = [oracle.param, oracle.exp_avg, oracle.exp_avg_sq, oracle.max_exp_avg_sq]
    return [(f.double() - e).abs() for f, e in zip(found, expected, strict=False)]


def root_mean_square(error: Tensor) -> float:
    return error.square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_less_accurate_than_torch_after_a_thousand_steps(name: str, dtype: torch.dtype) -> None:
    options = OPTIONS[name]
    gradients = make_gradients(make_params([SHAPE]), STEPS, dtype)
    oracle = Oracle(*make_params([SHAPE]), **options)
    advance([oracle], gradients)

    ours = errors(train(fused_adamw.AdamW, gradients, options), oracle)
    as_float32 = [[grad.float() for grad in grads] for grads in gradients]
    torchs = errors(train(torch.optim.AdamW, as_float32, options), oracle)

    assert len(ours) == len(torchs) == (4 if options.get("amsgrad") else 3)
    for i, (mine, theirs) in enumerate(zip(ours, torchs, strict=True)):
        assert mine.max() <= SLACK_AT_WORST[i] * theirs.max()
        assert root_mean_square(mine) <= SLACK_IN_MEAN[i] * root_mean_square(theirs)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_oracle_is_torch_in_float64(name: str) -> None:
    options = OPTIONS[name]
    [start] = make_params([SHAPE])
    param = torch.nn.Parameter(start.detach().double())
    gradients = [[grad.double() for grad in grads] for grads in make_gradients([param], 100)]
    oracle = Oracle(param, **options)
    optimizer = torch.optim.AdamW([param], **options)
    for grads in gradients:
        oracle.update(*grads)
        set_gradients([param], grads)
        optimizer.step()
    torch.testing.assert_close(param.detach(), oracle.param, rtol=1e-12, atol=1e-12)
