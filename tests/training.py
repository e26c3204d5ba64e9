"""Training runs that the tests of the optimizer share: parameters, gradients, comparisons."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo.callback
from torch import Tensor, nn

from cases import assert_same_bits
from oracle.adamw import Oracle

SHAPES = ((5, 7), (), (33,), (2, 3, 4))


def make_params(shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def make_gradients(
    params: Sequence[Tensor], steps: int, dtype: torch.dtype = torch.float32, seed: int = 1
) -> list[list[Tensor]]:
    """Gradients for each step and parameter; their magnitudes span four decades."""
    generator = torch.Generator().manual_seed(seed)

    def gradient(param: Tensor) -> Tensor:
        magnitudes = 10.0 ** (4.0 * torch.rand(param.shape, generator=generator) - 2.0)
        return (magnitudes * torch.randn(param.shape, generator=generator)).to(dtype)

    return [[gradient(param) for param in params] for _ in range(steps)]


def set_gradients(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad_dtype = None  # any dtype may be assigned
        param.grad = None if grad is None else grad.clone(memory_format=torch.preserve_format)


def train(
    optimizer: torch.optim.Optimizer,
    gradients: Iterable[Sequence[Tensor | None]],
    after_step: Callable[[], Any] | None = None,
) -> None:
    """One step per element of ``gradients``, which are in the order of the optimizer's parameters."""
    for grads in gradients:
        set_gradients([p for group in optimizer.param_groups for p in group["params"]], grads)
        optimizer.step()
        if after_step is not None:
            after_step()


def oracles_of(params: Sequence[Tensor], **options: Any) -> list[Oracle]:
    return [Oracle(param, **options) for param in params]


def advance(oracles: Sequence[Oracle], gradients: Iterable[Sequence[Tensor | None]]) -> None:
    for grads in gradients:
        for oracle, grad in zip(oracles, grads, strict=True):
            if grad is not None:
                oracle.update(grad)


def error(params: Sequence[Tensor], oracles: Sequence[Oracle]) -> float:
    """The largest distance of any element from the oracle's."""
    return max(
        (param.detach().double() - oracle.param).abs().max().item()
        for param, oracle in zip(params, oracles, strict=True)
    )


def assert_all_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for i, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(mine, other, f"tensor {i}")


def refusal(call: Callable[[], Any]) -> str:
    """The error that a call raises, in lines that fit a test."""
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        call()
    return textwrap.fill(f"{caught.type.__name__}: {caught.value}", 100)


@contextmanager
def compilations() -> Iterator[set[str]]:
    """The ids of Dynamo's compilations while the context lasts; a recompilation has an id of its own."""
    ids: set[str] = set()
    handler = torch._dynamo.callback.callback_handler

    def note(arguments: Any) -> None:
        ids.add(arguments.compile_id)

    torch._dynamo.reset()
    handler.register_start_callback(note)
    try:
        yield ids
    finally:
        handler.remove_start_callback(note)
        torch._dynamo.reset()


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters and states of an optimizer, in a fixed order."""
    tensors = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            tensors += [param, *(state[name] for name in sorted(state))]
    return tensors


def snapshot(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors_of(optimizer)]


def copy_over(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Gives ``target`` the parameters and the state of ``source``."""
    with torch.no_grad():
        for mine, other in zip(params_of(target), params_of(source), strict=True):
            mine.copy_(other)
    target.load_state_dict(copy.deepcopy(source.state_dict()))


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


# An update rounds a handful of times, in another order than torch's; measured: up to 1.3 times torch's error.
SLACK = 1.5
ONE_ULP = 2.0**-23  # of values around 1


def assert_as_accurate_as_torch(
    ours: Sequence[Tensor], torchs: Sequence[Tensor], oracles: Sequence[Oracle]
) -> None:
    """That ``ours`` is no farther from the oracle than ``torchs``, and both are near."""
    mine, theirs = error(ours, oracles), error(torchs, oracles)
    assert mine <= SLACK * theirs + ONE_ULP, f"error {mine}, torch's {theirs}"
    assert theirs < 1e-4
