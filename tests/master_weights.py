"""Training with 16-bit parameters, and the float32 training that its master weights must be the bits of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused_adamw
from cases import bits
from training import assert_all_same_bits, make_gradients, params_of, set_gradients

# How a 16-bit parameter and its master weight are kept: the dtype, and options of the optimizer.
FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16 split": (torch.bfloat16, {}),
    "bf16 whole": (torch.bfloat16, {"split_masters": False}),
    "bf16 by chance": (torch.bfloat16, {"stochastic_rounding": True}),
    "fp16": (torch.float16, {}),
    "fp16 by chance": (torch.float16, {"stochastic_rounding": True}),
}

all_forms = pytest.mark.parametrize("form", FORMS)
bfloat16_forms = pytest.mark.parametrize("form", [form for form in FORMS if form.startswith("bf16")])


def make_values(seed: int = 0) -> list[Tensor]:
    """Weights of every layout that an update accepts, in float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return [
        normal(5, 7),
        normal(9, 4).t(),
        normal(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        normal(),
        normal(0, 3),
        normal(1037),
    ]


def as_params(values: Iterable[Tensor], dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(value.detach().to(dtype, copy=True)) for value in values]


def make_rounded(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    return as_params(make_values(seed), dtype)


def gradients_for(
    params: Sequence[Tensor], steps: int, dtype: torch.dtype, seed: int = 1
) -> list[list[Tensor]]:
    """Gradients with the parameters' strides."""
    return [
        [torch.empty_like(param, dtype=dtype).copy_(grad) for param, grad in zip(params, grads, strict=True)]
        for grads in make_gradients(params, steps, seed=seed)
    ]


def in_float32(gradients: Iterable[Sequence[Tensor | None]]) -> list[list[Tensor | None]]:
    return [[None if grad is None else grad.float() for grad in grads] for grads in gradients]


def float32_twin(
    params: Sequence[Tensor], cls: Callable[..., Any] = fused_adamw.AdamW, **options: Any
) -> torch.optim.Optimizer:
    """An optimizer of float32 parameters with these values."""
    return cls(as_params(params, torch.float32), **options)


def master_optimizer(form: str, **options: Any) -> fused_adamw.AdamW:
    dtype, own = FORMS[form]
    return fused_adamw.AdamW(make_rounded(dtype), **own, **options)


def masters_of(optimizer: fused_adamw.AdamW) -> list[Tensor]:
    return [optimizer.master_param(param) for param in params_of(optimizer)]


def moments_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The states besides the master weights."""
    states = (optimizer.state.get(param, {}) for param in params_of(optimizer))
    return [state[name] for state in states for name in sorted(state) if not name.startswith("master_")]


def assert_masters_are(optimizer: fused_adamw.AdamW, twin: torch.optim.Optimizer) -> None:
    """That the weights and moments are the bits of a float32 run, and the parameters their roundings."""
    assert_all_same_bits(masters_of(optimizer), [param.detach() for param in params_of(twin)])
    assert_all_same_bits(moments_of(optimizer), moments_of(twin))
    for group in optimizer.param_groups:
        for param in group["params"]:
            assert_rounding(
                param, optimizer.master_param(param), by_chance=group.get("rounding_seed") is not None
            )


def assert_rounding(param: Tensor, master: Tensor, *, by_chance: bool) -> None:
    """That no 16-bit number is nearer to the master weight; or, by chance, that none is in between."""
    param = param.detach()
    assert param.stride() == master.stride()
    if param.dtype == torch.float32:
        assert torch.equal(param, master)
    elif by_chance:
        # The numbers next to a parameter; one that is not 0, as those of the tests.
        around = [(bits(param) + difference).view(param.dtype).double().abs() for difference in (-1, 1)]
        magnitude = master.double().abs()
        assert torch.equal(param.signbit(), master.signbit())
        assert ((around[0] < magnitude) & (magnitude < around[1])).all()
    else:
        mine, torchs = ((p.double() - master.double()).abs() for p in (param, master.to(param.dtype)))
        assert torch.equal(mine, torchs)


def train_both(
    optimizer: torch.optim.Optimizer,
    twin: torch.optim.Optimizer,
    gradients: Iterable[Sequence[Tensor | None]],
) -> None:
    """Steps of both by the same gradients, those of the twin in float32."""
    for grads in gradients:
        set_gradients(params_of(optimizer), grads)
        set_gradients(params_of(twin), [None if grad is None else grad.float() for grad in grads])
        optimizer.step()
        twin.step()
