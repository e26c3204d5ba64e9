"""The CPU kernels beside torch: errors, bits over instruction sets and threads, clipping, skips, states."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fused_adamw
from fused_adamw.cli.suites import roundings
from fused_adamw.cli.suites.check import Check, FailedError, Suite, require, same_bits
from fused_adamw.cli.suites.formula import Formula
from fused_adamw.cli.suites.training import (
    DTYPES,
    FORMS,
    GUARDS,
    MASTER_FORMS,
    OPTIONS,
    Form,
    make_gradients,
    make_params,
    moved,
    params_of,
    same_training,
    tensors_of,
    train,
    wide_values,
)
from fused_adamw.torch_library.checks import ROUNDED_DTYPES

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


def same_bits_everywhere(form: Form) -> str:
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
                    params = [
                        nn.Parameter(wide_values(size, i).to(form.dtype)) for i, size in enumerate(sizes)
                    ]
                    gradients = [[wide_values(size, 100 + i) for i, size in enumerate(sizes)]]
                    gradients.append([grad.nan_to_num(0.0, 1e3, -1e3) for grad in gradients[0]])
                    optimizer = fused_adamw.AdamW(params, **options, **form.options)
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
    for amsgrad, dtype in itertools.product((False, True), DTYPES):
        optimizer = fused_adamw.AdamW(make_params(dtype=dtype), amsgrad=amsgrad, split_masters=False)
        params: list[Tensor] = [param.detach().clone() for param in params_of(optimizer)]
        states: list[fused_adamw.AdamWState | None] = [None] * len(params)
        options = fused_adamw.AdamWOptions(amsgrad=amsgrad)
        for grads in make_gradients(params, 5):
            train(optimizer, [grads])
            for i, grad in enumerate(grads):
                params[i], states[i], _ = fused_adamw.adamw_step(params[i], grad, states[i], options)
        for i, (mine, other) in enumerate(zip(params, params_of(optimizer), strict=True)):
            same_bits(mine, other, f"parameter {i}")
            state = states[i]
            if state is not None and state.master is not None:
                same_bits(state.master, optimizer.master_param(other), f"the master weight of parameter {i}")
    return "5 steps, AdamW and AMSGrad, parameters of all dtypes"


def master_weights(form: Form) -> str:
    """Master weights and moments have the bits of a float32 training, and parameters are their roundings."""
    steps = 20
    all_options = {**OPTIONS, **GUARDS}
    for name, options in all_options.items():
        params = make_params(dtype=form.dtype)
        gradients = make_gradients(params, steps, form.dtype)
        optimizer = fused_adamw.AdamW(params, **options, **form.options)
        twin = fused_adamw.AdamW([nn.Parameter(param.detach().float()) for param in params], **options)
        for grads in gradients:
            train(optimizer, [grads])
            train(twin, [grads])
            _same_weights(optimizer, twin, form, f", {name}")
    return f"{len(all_options)} sets of options, {steps} steps each"


def _same_weights(found: fused_adamw.AdamW, expected: fused_adamw.AdamW, form: Form, where: str) -> None:
    for i, (param, other) in enumerate(zip(params_of(found), params_of(expected), strict=True)):
        weights = found.master_param(param)
        same_bits(weights, other, f"the master weight of parameter {i}{where}")
        for key, tensor in expected.state[other].items():
            same_bits(found.state[param][key], tensor, f"{key} of parameter {i}{where}")
        roundings.check_param(param, weights, form, f"parameter {i}{where}")


def kept_weights(form: Form) -> str:
    """A step of size 0 keeps every master weight, and rounds it."""
    weights = roundings.weights()
    if form.options.get("stochastic_rounding"):  # whose place between neighbours is known
        weights = weights[weights.isfinite()]
    [param] = make_params([tuple(weights.shape)], dtype=form.dtype)
    optimizer = fused_adamw.AdamW([param], lr=0.0, **form.options)
    optimizer.set_master_param(param, weights)
    param.grad = torch.ones_like(param)
    optimizer.step()
    same_bits(optimizer.master_param(param), weights, "the master weight")
    roundings.check_param(param, weights, form, "the parameter")
    return f"{weights.numel():,} weights, all bfloat16 numbers and ties among them"


def by_chance(form: Form) -> str:
    """A weight becomes one of its neighbours, and is itself on average; every tensor by bits of its own."""
    draws, size = 400, 4000
    weights = make_gradients([torch.empty(size)], 1)[0][0] * 10.0 ** -torch.arange(8.0).repeat(size // 8)
    params = make_params([(size,)] * 2, dtype=form.dtype)
    optimizer = fused_adamw.AdamW(params, lr=0.0, **form.options)
    optimizer.param_groups[0]["rounding_seed"] = 0
    lower, _, place = roundings.position(weights, form.dtype)
    for param in params:
        optimizer.set_master_param(param, weights)
        param.grad = torch.ones_like(param)
    ups = np.zeros((2, size))
    for _ in range(draws):
        optimizer.step()
        for i, param in enumerate(params):
            roundings.check_param(param, weights, form, f"parameter {i}")
            ups[i] += np.abs(param.detach().double().numpy()) > lower
        require(not torch.equal(*params), "two tensors are rounded by the same bits")
    deviation = np.sqrt(draws * place * (1.0 - place))
    likely = deviation > 5.0
    off = np.abs(ups - draws * place)
    alone = float((off[:, likely] / deviation[likely]).max())
    together = float(np.abs((ups - draws * place).sum(1)).max() / np.sqrt((deviation**2).sum()))
    require(alone < 6.0, f"a mean is {alone:.1f} standard deviations off; 6 are allowed")
    require(together < 4.0, f"all means together are {together:.1f} standard deviations off; 4 are allowed")
    return f"means of {draws} roundings are at most {alone:.1f} standard deviations off, all {together:.1f}"


def written_to(form: Form) -> str:
    """What someone else wrote to a parameter counts, or is an error, whichever is asked for."""
    params = make_params(dtype=form.dtype)
    gradients = make_gradients(params, 3, form.dtype)
    optimizer = fused_adamw.AdamW(params, **form.options)
    train(optimizer, gradients[:1])
    twin = fused_adamw.AdamW([nn.Parameter(optimizer.master_param(param).clone()) for param in params])
    for param, other in zip(params, params_of(twin), strict=True):
        twin.state[other] = {
            key: optimizer.state[param][key].clone() for key in ("step", "exp_avg", "exp_avg_sq")
        }
        written = torch.arange(param.numel()).view(param.shape) % 2 == 0
        new = -param.detach()  # a rounding of the master weight would change nothing
        weights = new.float()
        remainders = optimizer.state[param].get("master_remainder")
        if remainders is not None:
            weights = (weights.view(torch.int32) + remainders).view(torch.float32)
        with torch.no_grad():
            param[written] = new[written]
            other[written] = weights[written]
    train(optimizer, gradients[1:2])
    train(twin, gradients[1:2])
    _same_weights(optimizer, twin, form, ", half of which was written to")

    optimizer.resync_masters()
    for i, param in enumerate(params):
        same_bits(optimizer.master_param(param), param.float(), f"parameter {i}, whose value was to count,")
    optimizer.stale_master = "error"
    train(optimizer, gradients[2:])
    with torch.no_grad():
        params[2].mul_(2.0)
    before = {key: tensor.clone() for key, tensor in tensors_of(optimizer).items()}
    try:
        optimizer.step()
    except fused_adamw.StaleMasterError:
        pass
    else:
        raise FailedError("a parameter that was written to was not refused")
    for key, tensor in tensors_of(optimizer).items():
        same_bits(tensor, before[key], f"{key}, after the step was refused,")
    return "element by element"


def saved_masters(form: Form) -> str:
    """A training that goes on from a file has the bits of one that was not saved."""
    gradients = make_gradients(make_params(), 6, form.dtype)
    whole = fused_adamw.AdamW(make_params(dtype=form.dtype), **form.options)
    train(whole, gradients[:3])
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    optimizer = fused_adamw.AdamW(moved(params_of(whole), "cpu"), **form.options)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    for each in (whole, optimizer):
        train(each, gradients[3:])
    same_training(optimizer, whole)
    return "3 steps of 6 after a file"


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
    for dtype in ROUNDED_DTYPES:
        name = f"error: gradients of {str(dtype).removeprefix('torch.')}"
        found.append(Check(name, functools.partial(accuracy, {}, dtype)))
    for name, form in FORMS.items():
        check = functools.partial(same_bits_everywhere, form)
        found.append(Check(f"bits: instruction sets and threads, {name}", check))
    for name, form in MASTER_FORMS.items():
        runs: dict[str, Callable[[Form], str]] = {
            "the bits of float32": master_weights,
            "rounded": kept_weights,
            "written to": written_to,
            "saved": saved_masters,
        }
        if form.options.get("stochastic_rounding"):
            runs["right on average"] = by_chance
        found += [
            Check(f"master weights: {name}, {what}", functools.partial(run, form))
            for what, run in runs.items()
        ]
    return [
        *found,
        Check("bits: in place and out of place", in_and_out_of_place),
        Check("clipping", clipping),
        Check("skipped steps", skips),
        Check("state_dict to torch and back", exchange_of_states),
    ]


SUITE = Suite(
    "host",
    proves="The CPU kernels err no more than torch's own against float64, with the same bits on every "
    "instruction set of this processor; master weights of 16-bit parameters are those of a float32 training.",
    leaves_open="Instruction sets that this processor lacks, and CUDA.",
    checks=checks,
)
