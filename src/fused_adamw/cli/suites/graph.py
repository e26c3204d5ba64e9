"""Compiled steps and replays of CUDA graphs beside eager steps: the same bits."""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fused_adamw import AdamW
from fused_adamw.cli.suites import cuda
from fused_adamw.cli.suites.check import Check, Suite, require, same_bits
from fused_adamw.cli.suites.training import (
    MASTER_FORMS,
    make_gradients,
    make_params,
    moved,
    params_of,
    same_training,
    using,
)

STEPS = 12
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "AMSGrad": {"amsgrad": True},
    "clipped": {"max_grad_norm": 0.5},
    "skipping": {"nonfinite": "skip"},
    **{name: {"dtype": form.dtype, **form.options} for name, form in MASTER_FORMS.items()},
    "bfloat16, clipped": {"dtype": torch.bfloat16, "max_grad_norm": 0.5},
}
SHAPES: tuple[tuple[int, ...], ...] = ((5, 7), (), (33,), (2, 3, 4), (4097,))


def make_optimizer(device: str, dtype: torch.dtype = torch.float32, **options: Any) -> AdamW:
    """Two groups, options as tensors, gradients of the parameters' dtype whose memory stays."""
    params = moved(make_params(SHAPES, dtype=dtype), device)
    for param in params:
        param.grad = torch.zeros_like(param)
    groups: list[dict[str, Any]] = [
        {"params": params[0::2]},
        {"params": params[1::2], "maximize": True, "weight_decay": 0.5},
    ]
    numbers = [torch.tensor(x, dtype=torch.float64, device=device) for x in (0.1, 0.9, 0.99)]
    return AdamW(groups, lr=numbers[0], betas=(numbers[1], numbers[2]), **options)


def train(optimizer: AdamW, step: Callable[[], object], *, bad: Sequence[int] = ()) -> None:
    """Steps with a new learning rate in each; in bad ones a gradient holds an infinity."""
    gradients = make_gradients(params_of(optimizer), STEPS)
    for i, grads in enumerate(gradients):
        if i in bad:
            grads[0].view(-1)[0] = math.inf
        for param, grad in zip(params_of(optimizer), grads, strict=True):
            assert param.grad is not None
            param.grad.copy_(grad)
        lr: Tensor = optimizer.param_groups[0]["lr"]
        lr.fill_(0.1 / (1 + i))
        step()


def _bad(options: dict[str, Any]) -> list[int]:
    return [4] if options.keys() & {"max_grad_norm", "nonfinite"} else []


def compiled(device: str, compiler: str, options: dict[str, Any]) -> str:
    """``torch.compile(optimizer.step, fullgraph=True)``."""
    with using(compiler):
        torch._dynamo.reset()
        optimizer, twin = make_optimizer(device, **options), make_optimizer(device, **options)
        step = torch.compile(optimizer.step, fullgraph=True)
        train(optimizer, step, bad=_bad(options))
        train(twin, twin.step, bad=_bad(options))
        same_training(optimizer, twin)
    return f"{STEPS} steps, one graph"


def replayed(compiler: str, options: dict[str, Any]) -> str:
    """One capture, replayed with other gradients and learning rates."""
    with using(compiler):
        optimizer, twin = make_optimizer("cuda", **options), make_optimizer("cuda", **options)
        for each in (optimizer, twin):  # loads the kernels, makes the states
            each.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        train(optimizer, graph.replay, bad=_bad(options))
        train(twin, twin.step, bad=_bad(options))
        same_training(optimizer, twin)
    return f"{STEPS} replays"


def whole_training_step(compiler: str, dtype: torch.dtype) -> str:
    """Forward and backward pass and step in one graph; the twin is given the gradients of each replay."""
    with using(compiler):
        model, twin_model = _model().to(dtype), _model().to(dtype)
        optimizer, twin = (
            AdamW(own.parameters(), lr=1e-2, capturable=True, max_grad_norm=0.5)
            for own in (model, twin_model)
        )
        batch = torch.randn(8, 16, device="cuda", dtype=dtype)

        def loss() -> Tensor:
            found: Tensor = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            return found

        def follow() -> None:
            for mine, other in zip(params_of(twin), params_of(optimizer), strict=True):
                mine.grad = None if other.grad is None else other.grad.clone()
            twin.step()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()
                follow()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad()
        with torch.cuda.graph(graph):
            loss().backward()
            optimizer.step()
        for _ in range(STEPS):
            batch.normal_()
            graph.replay()
            follow()
        same_training(optimizer, twin)
    return f"{STEPS} replays"


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to("cuda")


def frozen_numbers_are_refused(compiler: str) -> str:
    """A learning rate that a replay could not change is refused in a capture, and nothing is written."""
    with using(compiler):
        optimizer = AdamW(moved(make_params(SHAPES), "cuda"))
        params = params_of(optimizer)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        before = [param.detach().clone() for param in params]
        other, refused = torch.zeros(3, device="cuda"), False
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            try:
                optimizer.step()
            except RuntimeError:
                refused = True
            other.add_(1.0)
        graph.replay()
        require(refused, "a learning rate that is a number was captured")
        for i, (param, old) in enumerate(zip(params, before, strict=True)):
            same_bits(param, old, f"parameter {i}")
    return "the capture goes on without it"


def missing_cpp_compiler() -> str | None:
    """Why Inductor cannot compile for the CPU."""
    name = os.environ.get("CXX", "g++")  # as torch._inductor.config.cpp.cxx has it
    return (
        None if shutil.which(name) else f"no C++ compiler for torch.compile on the CPU: {name} was not found"
    )


def checks(compilers: Sequence[str]) -> list[Check]:
    """Compiled on the CPU and on CUDA; replays on CUDA."""
    found = [
        Check(f"cpu: compiled, {name}", functools.partial(compiled, "cpu", "", options), missing_cpp_compiler)
        for name, options in OPTIONS.items()
    ]
    for compiler in compilers:
        missing = functools.partial(cuda.missing, compiler)
        for name, options in OPTIONS.items():
            run = functools.partial(compiled, "cuda", compiler, options)
            found.append(Check(f"{compiler}: compiled, {name}", run, missing))
        for name, options in OPTIONS.items():
            run = functools.partial(replayed, compiler, options)
            found.append(Check(f"{compiler}: CUDA graph, {name}", run, missing))
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{compiler}: CUDA graph of a training step, {str(dtype).removeprefix('torch.')}"
            found.append(Check(name, functools.partial(whole_training_step, compiler, dtype), missing))
        run = functools.partial(frozen_numbers_are_refused, compiler)
        found.append(Check(f"{compiler}: CUDA graph, a number is refused", run, missing))
    return found


SUITE = Suite(
    "graph",
    proves="A step under torch.compile(fullgraph=True), and one replayed from a CUDA graph, has the bits of "
    "an eager step.",
    leaves_open="Whether the eager bits are right (host and cuda), and other modes of torch.compile.",
    checks=checks,
)
