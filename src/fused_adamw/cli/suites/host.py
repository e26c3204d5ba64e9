"""The CPU kernels beside torch: errors, bits over instruction sets and threads, clipping, skips, states."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fused_adamw
from fused_adamw.cli.suites.check import Check, FailedError, Suite, require, same_bits
from fused_adamw.cli.suites.formula import Formula
from fused_adamw.cli.suites.training import (
    GUARDS,
    OPTIONS,
    make_gradients,
    make_params,
    moved,
    params_of,
    same_training,
    train,
    wide_values,
)

STEPS = 300
SHAPE = (2048,)

# How much larger than torch's own error ours may be: both round, in another order, so neither is always the
# better one. torch's exp_avg is rounded once less (an FMA), which the parameter does not notice.
SLACK_AT_WORST = {"param": 1.5, "exp_avg": 2.5, "exp_avg_sq": 2.5, "max_exp_avg_sq": 2.5}
SLACK_IN_MEAN = {"param": 1.05, "exp_avg": 1.7, "exp_avg_sq": 1.1, "max_exp_avg_sq": 1.3}


def accuracy(options: dict[str, Any], dtype: torch.dtype) -> str:
    """The error against float64 after many steps, beside that of torch.optim.AdamW."""
    gradients = make_gradients(make_params([SHAPE]), STEPS, dtype)
    formula = Formula(make_params([SHAPE])[0].detach().numpy(), **options)
    for grads in gradients:
        formula.update(grads[0].double().numpy())
    ours = fused_adamw.AdamW(make_params([SHAPE]), **options)
    theirs = torch.optim.AdamW(make_params([SHAPE]), foreach=False, **options)
    train(ours, gradients)
    train(theirs, [[grad.float() for grad in grads] for grads in gradients])
    names = ["param", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options.get("amsgrad") else [])]
    ratio = 0.0
    for name in names:
        expected = getattr(formula, name)
        mine, torchs = (np.abs(_value(optimizer, name) - expected) for optimizer in (ours, theirs))
        measures = ((np.max, SLACK_AT_WORST[name]), (_root_mean_square, SLACK_IN_MEAN[name]))
        for measure, slack in measures:
            found, allowed = float(measure(mine)), slack * float(measure(torchs))
            require(found <= allowed, f"the error of {name} is {found:.3g}; {allowed:.3g} is allowed")
        if name == "param":
            ratio = float(_root_mean_square(mine)) / float(_root_mean_square(torchs))
    return f"the error of the parameter is {ratio:.2f} times torch's after {STEPS} steps"


def _value(optimizer: torch.optim.Optimizer, name: str) -> Any:
    [param] = params_of(optimizer)
    tensor: Tensor = param.detach() if name == "param" else optimizer.state[param][name]
    return tensor.double().numpy()


def _root_mean_square(values: Any) -> Any:
    return np.sqrt(np.mean(values**2))


def same_bits_everywhere() -> str:
    """Every instruction set, one thread and several, values of every kind."""
    sizes = (1, 31, 33, 257, 4097, 70_001)
    threads, capability = torch.get_num_threads(), fused_adamw.cpu_capability()
    first: fused_adamw.AdamW | None = None
    count = 0
    try:
        for options in ({}, {"amsgrad": True}, *GUARDS.values()):
            first = None
            for name in fused_adamw.cpu_capabilities():
                for number in (1, 2, 3):
                    fused_adamw.set_cpu_capability(name)
                    torch.set_num_threads(number)
                    params = [torch.nn.Parameter(wide_values(size, i)) for i, size in enumerate(sizes)]
                    gradients = [[wide_values(size, 100 + i) for i, size in enumerate(sizes)]]
                    gradients.append([grad.nan_to_num(0.0, 1e3, -1e3) for grad in gradients[0]])
                    optimizer = fused_adamw.AdamW(params, **options)
                    train(optimizer, gradients)
                    first = first or optimizer
                    same_training(optimizer, first)
                    count += 1
    finally:
        torch.set_num_threads(threads)
        fused_adamw.set_cpu_capability(capability)
    return f"{count} trainings: {', '.join(fused_adamw.cpu_capabilities())}; 1, 2 and 3 threads"


def in_and_out_of_place() -> str:
    """``adamw_step`` has the bits of the optimizer."""
    for amsgrad in (False, True):
        optimizer = fused_adamw.AdamW(make_params(), amsgrad=amsgrad)
        params: list[Tensor] = [param.detach().clone() for param in params_of(optimizer)]
        states: list[fused_adamw.AdamWState | None] = [None] * len(params)
        options = fused_adamw.AdamWOptions(amsgrad=amsgrad)
        for grads in make_gradients(params, 5):
            train(optimizer, [grads])
            for i, grad in enumerate(grads):
                params[i], states[i], _ = fused_adamw.adamw_step(params[i], grad, states[i], options)
        for i, (mine, other) in enumerate(zip(params, params_of(optimizer), strict=True)):
            same_bits(mine, other, f"parameter {i}")
    return "5 steps, AdamW and AMSGrad"


def clipping() -> str:
    """Norm and clipping as clip_grad_norm_ has them."""
    worst = 0.0
    params = make_params()
    gradients = make_gradients(params, 20)
    ours = fused_adamw.AdamW(moved(params, "cpu"), max_grad_norm=0.5)
    theirs = torch.optim.AdamW(moved(params, "cpu"), foreach=False)
    for grads in gradients:
        train(ours, [grads])
        train(theirs, [grads], lambda: _clipped_step(theirs))
        exact = math.sqrt(math.fsum(x * x for grad in grads for x in grad.double().flatten().tolist()))
        stats = ours.last_stats
        require(stats is not None, "the step left no statistics")
        if stats is not None:
            worst = max(worst, abs(stats.norm / exact - 1.0))
    require(worst < 1e-6, f"the norm is {worst:.3g} off the exact one, relatively; 1e-6 is allowed")
    for i, (mine, other) in enumerate(zip(params_of(ours), params_of(theirs), strict=True)):
        try:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        except AssertionError as error:
            raise FailedError(f"parameter {i} is not near torch's: {str(error).splitlines()[0]}") from None
    return f"norms at most {worst:.1e} off the exact ones"


def _clipped_step(optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(params_of(optimizer), 0.5)
    optimizer.step()


def skips() -> str:
    """A NaN or an infinity skips a step: nothing is written."""
    params = make_params()
    gradients = make_gradients(params, 4)
    twin = fused_adamw.AdamW(moved(params, "cpu"), nonfinite="skip")
    optimizer = fused_adamw.AdamW(moved(params, "cpu"), nonfinite="skip")
    train(twin, [gradients[0], gradients[3]])
    for step, value in ((1, math.nan), (2, math.inf)):
        gradients[step][4][-1] = value
    train(optimizer, gradients)
    same_training(optimizer, twin)
    return "4 steps of which 2 are skipped have the bits of the other 2"


def exchange_of_states() -> str:
    """A training goes on with torch's optimizer, and with ours again."""
    options: dict[str, Any] = {"amsgrad": True}
    gradients = make_gradients(make_params(), 6)
    alone = torch.optim.AdamW(make_params(), foreach=False, **options)
    train(alone, gradients)
    one: Any = fused_adamw.AdamW(make_params(), **options)
    for i in range(3):
        train(one, gradients[2 * i : 2 * i + 2])
        other_type: Any = torch.optim.AdamW if i % 2 == 0 else fused_adamw.AdamW
        other = other_type(moved(params_of(one), "cpu"), **options)
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        one = other
    for i, (mine, expected) in enumerate(zip(params_of(one), params_of(alone), strict=True)):
        distance = float((mine - expected).detach().abs().max()) if mine.numel() > 0 else 0.0
        require(distance < 1e-5, f"parameter {i} is {distance:.3g} from torch's own; 1e-5 is allowed")
    return "ours, torch's, ours"


def checks(compilers: Sequence[str]) -> list[Check]:
    """The CPU has one compiler."""
    del compilers
    found = [
        Check(f"error: {name}", functools.partial(accuracy, options, torch.float32))
        for name, options in OPTIONS.items()
    ]
    for dtype in (torch.float16, torch.bfloat16):
        name = f"error: gradients of {str(dtype).removeprefix('torch.')}"
        found.append(Check(name, functools.partial(accuracy, {}, dtype)))
    return [
        *found,
        Check("bits: instruction sets and threads", same_bits_everywhere),
        Check("bits: in place and out of place", in_and_out_of_place),
        Check("clipping", clipping),
        Check("skipped steps", skips),
        Check("state_dict to torch and back", exchange_of_states),
    ]


SUITE = Suite(
    "host",
    proves="The CPU kernels err no more than torch's own against float64, with the same bits on every "
    "instruction set of this processor.",
    leaves_open="Instruction sets that this processor lacks, and CUDA.",
    checks=checks,
)
