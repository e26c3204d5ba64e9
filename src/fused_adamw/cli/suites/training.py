"""Trainings that suites compare: parameters, gradients of every kind, steps, states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fused_adamw
from fused_adamw.cli.suites.check import require, same_bits
from fused_adamw.torch_library.checks import PARAM_DTYPES, ROUNDED_DTYPES

Gradients = list[list[Tensor]]

# Of parameters; of gradients, too.
DTYPES = (*PARAM_DTYPES, *ROUNDED_DTYPES)

SHAPES: tuple[tuple[int, ...], ...] = ((50, 7), (), (300,), (2, 3, 4), (20_000,), (0,))

# Of torch.optim.AdamW and of ours.
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no decay": {"weight_decay": 0.0, "lr": 1e-2},
    "strong decay": {"weight_decay": 0.5, "lr": 1e-2},
    "AMSGrad": {"amsgrad": True},
    "maximize": {"maximize": True, "weight_decay": 0.0},
    "AMSGrad, maximize, other betas": {
        "amsgrad": True,
        "maximize": True,
        "betas": (0.5, 0.95),
        "eps": 1e-5,
    },
}

# Of ours alone.
GUARDS: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.5},
    "clipped, AMSGrad": {"max_grad_norm": 0.5, "amsgrad": True},
    "clipped, serial statistics": {"max_grad_norm": 0.5, "hierarchical_stats": False},
    "clipped below float32": {"max_grad_norm": 1e-42},
}


class Form(NamedTuple):
    """The dtype of parameters, and the options that say how their master weights are kept."""

    dtype: torch.dtype
    options: dict[str, Any]


# Parameters of 16 bits.
MASTER_FORMS = {
    "bfloat16, remainders": Form(torch.bfloat16, {}),
    "bfloat16, float32 masters": Form(torch.bfloat16, {"split_masters": False}),
    "bfloat16, rounded by chance": Form(torch.bfloat16, {"stochastic_rounding": True}),
    "float16": Form(torch.float16, {}),
    "float16, rounded by chance": Form(torch.float16, {"stochastic_rounding": True}),
}
FORMS = {"float32": Form(torch.float32, {}), **MASTER_FORMS}

_SPECIAL = (
    *(0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")),
    *(2.0**-149, -(2.0**-149), 2.0**-127, 2.0**-126, -(2.0**-126), 1e-30, -1e-20),
    *(3.4028234663852886e38, -3.4028234663852886e38, 1e30, -1e20, 65504.0, 6e-8),
)


def make_params(
    shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """Normal values, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def make_gradients(
    params: Sequence[Tensor], steps: int, dtype: torch.dtype = torch.float32, seed: int = 1
) -> Gradients:
    """Gradients of each step, whose magnitudes span four decades; on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def gradient(param: Tensor) -> Tensor:
        magnitudes = 10.0 ** (4.0 * torch.rand(param.shape, generator=generator) - 2.0)
        return (magnitudes * torch.randn(param.shape, generator=generator)).to(dtype)

    return [[gradient(param) for param in params] for _ in range(steps)]


def wide_values(size: int, seed: int, *, signed: bool = True) -> Tensor:
    """Random bits, special values, and ordinary values with exponents from all over the range."""
    generator = torch.Generator().manual_seed(seed)
    third = size // 3
    bits = torch.randint(-(2**31), 2**31, (third,), generator=generator, dtype=torch.int64)
    special = torch.tensor(_SPECIAL)[torch.randint(len(_SPECIAL), (third,), generator=generator)]
    exponents = torch.rand(size - 2 * third, generator=generator, dtype=torch.float64) * 270 - 145
    spread = torch.exp2(exponents).float()
    if signed:
        spread *= torch.randn(spread.shape, generator=generator)
    return torch.cat([bits.to(torch.int32).view(torch.float32), special, spread])


def moved(params: Sequence[Tensor], device: torch.device | str) -> list[nn.Parameter]:
    """Copies on a device."""
    return [nn.Parameter(param.detach().clone().to(device)) for param in params]


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_gradients(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Gives each parameter a copy of a gradient, of any dtype, on its device."""
    for param, grad in zip(params, grads, strict=True):
        param.grad_dtype = None
        param.grad = grad.detach().clone().to(param.device)


def train(
    optimizer: torch.optim.Optimizer, gradients: Gradients, step: Callable[[], object] | None = None
) -> None:
    """A step, or a call of ``step``, for each list of gradients."""
    for grads in gradients:
        set_gradients(params_of(optimizer), grads)
        (step or optimizer.step)()


def tensors_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All parameters and states by name."""
    tensors: dict[str, Tensor] = {}
    for i, param in enumerate(params_of(optimizer)):
        tensors[f"parameter {i}"] = param.detach()
        for name, value in sorted(optimizer.state.get(param, {}).items()):
            tensors[f"{name} of parameter {i}"] = value
    return tensors


def same_training(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    """Raises ``FailedError`` unless both hold the same bits everywhere."""
    mine, others = tensors_of(found), tensors_of(expected)
    require(mine.keys() == others.keys(), f"states differ: {sorted(mine.keys() ^ others.keys())}")
    for name, tensor in mine.items():
        same_bits(tensor, others[name], name)


@contextlib.contextmanager
def using(compiler: str) -> Iterator[None]:
    """Lets this compiler make the CUDA kernels; "" changes nothing."""
    if compiler:
        fused_adamw.set_cuda_compiler(compiler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        if compiler:
            fused_adamw.set_cuda_compiler(None)
