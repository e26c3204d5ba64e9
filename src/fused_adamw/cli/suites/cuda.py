"""The CUDA kernels of both compilers beside the CPU kernels: the same bits."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fused_adamw
from fused_adamw import _C, AdamW
from fused_adamw.cli.suites import build, roundings
from fused_adamw.cli.suites.check import Check, FailedError, Suite, require, same_bits
from fused_adamw.cli.suites.training import (
    DTYPES,
    FORMS,
    GUARDS,
    MASTER_FORMS,
    OPTIONS,
    Form,
    Gradients,
    make_gradients,
    make_params,
    moved,
    params_of,
    same_training,
    tensors_of,
    train,
    using,
    wide_values,
)

# Around what a thread, a warp, a pass, a block and a row of statistics cover.
TAILS = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 127, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049),
    *(4095, 4097, 16_383, 16_384, 16_385, 32_769, 65_535, 65_536, 65_537),
)

# What is compared with the CPU.
DEVICE = "cuda"


def missing_card() -> str | None:
    """Why nothing can run on CUDA."""
    if torch.cuda.is_available():
        return None
    try:
        _C.cuda_driver_version()
    except _C.CudaDriverError as error:
        return f"no CUDA device: {error}"
    return f"no CUDA device: torch {torch.__version__} sees none"


def missing(compiler: str) -> str | None:
    """Why this compiler's kernels cannot run."""
    return missing_card() or build.missing(compiler)


def compare(options: dict[str, Any], gradients: Gradients, params: Sequence[Tensor]) -> tuple[AdamW, AdamW]:
    """Trains on the CPU and on CUDA, and compares everything; returns both."""
    here, there = (AdamW(moved(params, device), **options) for device in ("cpu", DEVICE))
    for optimizer in (here, there):
        train(optimizer, gradients)
    same_training(there, here)
    return here, there


def trainings(form: Form, dtype: torch.dtype) -> str:
    """Every option, for one dtype of gradients."""
    steps = 10
    gradients = make_gradients(make_params(), steps, dtype)
    all_options = {**OPTIONS, **GUARDS}
    for name, options in all_options.items():
        try:
            here, there = compare({**options, **form.options}, gradients, make_params(dtype=form.dtype))
            mine, other = there.last_stats, here.last_stats
            if mine is not None and other is not None:
                same_bits(mine.gradients.report, other.gradients.report, "the report")
        except FailedError as error:
            raise FailedError(f"{name}: {error}") from None
    return f"{len(all_options)} sets of options, {steps} steps each"


def tails(form: Form) -> str:
    """All sizes together, and each alone."""
    for options in ({}, {"max_grad_norm": 0.5}):
        for shapes in ([(size,) for size in TAILS], *([(size,)] for size in TAILS)):
            params = make_params(shapes, dtype=form.dtype)
            compare({**options, **form.options}, make_gradients(params, 2, form.dtype), params)
    return f"{len(TAILS)} sizes from 1 to {TAILS[-1]:,}"


def odd_addresses(form: Form) -> str:
    """Gradients that no wide access can read, and parameters."""
    params = make_params([(4099,), (65_537,)], dtype=form.dtype)
    gradients = make_gradients(params, 2, form.dtype)
    options = {"max_grad_norm": 0.5, **form.options}
    here = AdamW(moved(params, "cpu"), **options)
    train(here, gradients)
    for place in (lambda tensor: tensor.detach().to(DEVICE, copy=True), _off_alignment):
        there = AdamW([nn.Parameter(place(param)) for param in params], **options)
        for grads in gradients:
            for param, grad in zip(params_of(there), grads, strict=True):
                param.grad = _off_alignment(grad)
            there.step()
        same_training(there, here)
    return "one element off the alignment"


def _off_alignment(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=DEVICE)[1:].copy_(tensor.detach())


def special_values(form: Form) -> str:
    """NaN, infinities, subnormals, zeros of both signs, random bits."""
    size = 70_001
    for dtype in DTYPES:
        wide = wide_values(size, 1).to(dtype)
        for options in ({}, {"amsgrad": True}, {"max_grad_norm": 0.5}):
            params = [nn.Parameter(wide_values(size, 0).to(form.dtype))]
            compare({**options, **form.options}, [[wide], [wide.nan_to_num()]], params)
    return f"{size:,} values, all dtypes of gradients"


def rounded_weights(form: Form) -> str:
    """Every bfloat16 number, the ties between them and more, kept by a step of size 0."""
    weights = roundings.weights()
    optimizers = []
    for device in ("cpu", DEVICE):
        params = moved(make_params([tuple(weights.shape)], dtype=form.dtype), device)
        optimizer = AdamW(params, lr=0.0, **form.options)
        optimizer.set_master_param(params[0], weights.to(device))
        train(optimizer, [[torch.ones(weights.shape, dtype=form.dtype)]])
        same_bits(optimizer.master_param(params[0]), weights, f"the master weight on {device}")
        optimizers.append(optimizer)
    same_training(optimizers[1], optimizers[0])
    return f"{weights.numel():,} weights"


def written_to(form: Form) -> str:
    """A parameter that someone else wrote to, in part; then all of them, whose values are to count."""
    gradients = make_gradients(make_params(), 6, form.dtype)
    here, there = (
        AdamW(moved(make_params(dtype=form.dtype), device), **form.options) for device in ("cpu", DEVICE)
    )
    for optimizer in (here, there):
        train(optimizer, gradients[:2])
        for param in params_of(optimizer):
            param.detach().view(-1)[::2].neg_()
        train(optimizer, gradients[2:4])
    same_training(there, here)
    for optimizer in (here, there):
        for param in params_of(optimizer):
            param.detach().mul_(2.0)
        optimizer.resync_masters()
        train(optimizer, gradients[4:])
    same_training(there, here)
    return "every second element, then all"


def skips(form: Form) -> str:
    """A NaN or an infinity skips a step, and the report says where it was."""
    for value in (math.nan, math.inf, -math.inf):
        gradients = make_gradients(make_params(), 8, form.dtype)
        for i in (0, 3, 7):
            gradients[i][4][-1] = value
        options = {"nonfinite": "skip", **form.options}
        here, there = compare(options, gradients, make_params(dtype=form.dtype))
        mine, other = there.last_stats, here.last_stats
        require(
            mine is not None and other is not None and mine.skipped and other.skipped,
            "the last step was not skipped",
        )
        if mine is not None and other is not None:
            require(
                mine.nonfinite_parameters == other.nonfinite_parameters != [],
                f"{mine.nonfinite_parameters} are named instead of {other.nonfinite_parameters}",
            )
    return "3 of 8 steps, for NaN and both infinities"


def restore(form: Form) -> str:
    """Saved on CUDA; goes on there, on the CPU and after torch's optimizer, with the same bits.

    torch's keeps the state of 16-bit parameters in 16 bits, so these are left out there.
    """
    gradients = make_gradients(make_params(), 6, form.dtype)
    options = {"amsgrad": True, **form.options}
    source = AdamW(moved(make_params(dtype=form.dtype), DEVICE), **options)
    train(source, gradients[:3])
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    results = []
    for device in ("cpu", DEVICE):
        file.seek(0)
        optimizer = AdamW(moved(params_of(source), device), **options)
        optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        results.append(optimizer)
    if form.dtype is torch.float32:
        theirs = torch.optim.AdamW(moved(params_of(source), DEVICE), amsgrad=True, fused=True)
        theirs.load_state_dict(copy.deepcopy(source.state_dict()))
        again = AdamW(moved(params_of(theirs), DEVICE), **options)
        again.load_state_dict(copy.deepcopy(theirs.state_dict()))
        results.append(again)
    for optimizer in (source, *results):
        train(optimizer, gradients[3:])
    for optimizer in (source, *results[1:]):
        same_training(optimizer, results[0])
    through = ", and through torch's state_dict" if form.dtype is torch.float32 else ""
    return f"through a file, to the CPU{through}"


def refusals() -> str:
    """What is refused is refused before anything is written."""
    bad: dict[str, Callable[[Tensor], Tensor]] = {
        "a float64 gradient": lambda param: torch.ones_like(param, dtype=torch.float64),
        "a sparse gradient": lambda param: torch.ones_like(param).to_sparse(),
        "a gradient of other strides": lambda param: torch.ones(7, 50, device=param.device).t(),
        "a gradient that is the first moment of another parameter": lambda param: param,
    }
    for name, make in bad.items():
        optimizer = AdamW(moved(make_params(), DEVICE))
        train(optimizer, make_gradients(make_params(), 1))
        before = {key: tensor.clone() for key, tensor in tensors_of(optimizer).items()}
        params = params_of(optimizer)
        params[0].grad_dtype = None
        if name.endswith("another parameter"):
            params[2].grad = optimizer.state[params[4]]["exp_avg"][:300]
        else:
            params[0].grad = make(params[0])
        try:
            optimizer.step()
        except (TypeError, ValueError, RuntimeError):
            pass
        else:
            raise FailedError(f"{name} was not refused")
        for key, tensor in tensors_of(optimizer).items():
            same_bits(tensor, before[key], f"{key}, after {name} was refused,")
    return ", ".join(bad)


def statistics() -> str:
    """Rows and report of ``gradient_stats``, merged both ways."""
    sizes = (1, 1023, 16_384, 16_385, 65_537, 16_384 * 1030 + 5)
    for dtype in DTYPES:
        grads = [wide_values(size, i).to(dtype) for i, size in enumerate(sizes)]
        on_cuda = [grad.to(DEVICE) for grad in grads]
        for hierarchical in (True, False):
            expected = fused_adamw.gradient_stats(grads, grad_scale=3000.0, hierarchical=hierarchical)
            found = fused_adamw.gradient_stats(on_cuda, grad_scale=3000.0, hierarchical=hierarchical)
            same_bits(found.rows, expected.rows, "rows")
            same_bits(found.report, expected.report, "the report")
    return f"{len(sizes)} gradients, all dtypes"


def out_of_place(dtype: torch.dtype) -> str:
    """``adamw_step``, which returns new tensors; 16-bit parameters are rounded by chance, too."""
    seeds = (None,) if dtype is torch.float32 else (None, 0)
    for amsgrad, seed in itertools.product((False, True), seeds):
        options = fused_adamw.AdamWOptions(amsgrad=amsgrad)
        control = fused_adamw.StepControl(rounding_seed=seed)
        params = make_params([(size,) for size in (1, 1025, 65_537)], dtype=dtype)
        for i, grads in enumerate(zip(*make_gradients(params, 3), strict=True)):
            results = []
            for device in ("cpu", DEVICE):
                param: Tensor = params[i].detach().to(device)
                state: fused_adamw.AdamWState | None = None
                for grad in grads:
                    param, state, _ = fused_adamw.adamw_step(param, grad.to(device), state, options, control)
                if state is None:
                    raise FailedError("there is no state after an update")
                results.append(
                    [param, *(part for part in state.to_parts().values() if isinstance(part, Tensor))]
                )
            for mine, other in zip(results[1], results[0], strict=True):
                same_bits(mine, other, f"a result of tensor {i}")
    return "3 updates of 3 tensors, AdamW and AMSGrad"


def options_as_tensors() -> str:
    """Learning rate and betas as float64 tensors on the device have the bits of the numbers."""
    here = AdamW(make_params())
    lr, beta1, beta2 = (torch.zeros((), dtype=torch.float64, device=DEVICE) for _ in range(3))
    there = AdamW(moved(make_params(), DEVICE), lr=lr, betas=(beta1, beta2))
    for i, grads in enumerate(make_gradients(make_params(), 8)):
        numbers = (1e-3 * (i + 1), 0.8 + 0.01 * i, 0.99 + 0.0005 * i)
        for tensor, number in zip((lr, beta1, beta2), numbers, strict=True):
            tensor.fill_(number)
        here.param_groups[0].update(lr=numbers[0], betas=numbers[1:])
        for optimizer in (here, there):
            train(optimizer, [grads])
    same_training(there, here)
    return "8 steps, each with others"


def many_tensors() -> str:
    """More tensors and groups than one launch takes; parameters of all dtypes in one group."""
    shapes: list[tuple[int, ...]] = [((0,) if i % 64 == 0 else (1 + i % 5,)) for i in range(1153)]
    params = make_params(shapes)
    gradients = make_gradients(params, 2)
    compare({"max_grad_norm": 0.5}, gradients, params)
    mixed = [nn.Parameter(param.detach().to(DTYPES[i % len(DTYPES)])) for i, param in enumerate(params)]
    for form in MASTER_FORMS.values():
        compare({"max_grad_norm": 0.5, **form.options}, gradients, mixed)
    optimizers = []
    for device in ("cpu", DEVICE):
        groups = [
            {"params": [p], "lr": 1e-3 * (1 + i % 37)} for i, p in enumerate(moved(params[:50], device))
        ]
        optimizer = AdamW(groups)
        train(optimizer, [grads[:50] for grads in gradients])
        optimizers.append(optimizer)
    same_training(optimizers[1], optimizers[0])
    return f"{len(shapes)} tensors; 50 groups"


def checks(compilers: Sequence[str]) -> list[Check]:
    """All of them for each compiler."""
    runs: dict[str, Callable[[], str]] = {}
    of_forms: dict[str, Callable[[Form], str]] = {
        "tails": tails,
        "odd addresses": odd_addresses,
        "NaN, infinities, subnormals": special_values,
        "skipped steps": skips,
        "restored from state_dict": restore,
    }
    of_masters = {"rounded weights": rounded_weights, "written to": written_to}
    for name, form in FORMS.items():
        for dtype in DTYPES:
            own_name = f"{name}: trainings, {str(dtype).removeprefix('torch.')} gradients"
            runs[own_name] = functools.partial(trainings, form, dtype)
        for what, check in (of_forms | (of_masters if name in MASTER_FORMS else {})).items():
            runs[f"{name}: {what}"] = functools.partial(check, form)
    for dtype in DTYPES:
        name = f"out of place, {str(dtype).removeprefix('torch.')}"
        runs[name] = functools.partial(out_of_place, dtype)
    runs |= {
        "refusals": refusals,
        "statistics": statistics,
        "options as tensors": options_as_tensors,
        "many tensors and groups": many_tensors,
    }

    def with_compiler(compiler: str, run: Callable[[], str]) -> str:
        with using(compiler):
            return run()

    return [
        Check(
            f"{compiler}: {name}",
            functools.partial(with_compiler, compiler, run),
            functools.partial(missing, compiler),
        )
        for compiler in compilers
        for name, run in runs.items()
    ]


SUITE = Suite(
    "cuda",
    proves="On this card, the CUDA kernels have the bits of the CPU kernels in everything that is compared.",
    leaves_open="Other cards, tensors of billions of elements, and whether the CPU is right (host).",
    checks=checks,
)
