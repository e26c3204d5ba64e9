"""The steps that ``fused-adamw bench`` sets side by side, all on the same storage."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fused_adamw
from fused_adamw.cli.suites import build

Call = Callable[[], object]

OURS = "fused_adamw"
STAGED = "separate kernels"
FOR_LOOP, FOREACH, FUSED = "torch for-loop", "torch foreach", "torch fused"
COMPILED = "torch compiled foreach"

# Above any norm here: torch's clipping multiplies by 1 then, and has the same gradients in each call.
MAX_NORM = 1e9
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2


@dataclass(frozen=True)
class Case:
    """What a step does, and where."""

    device: torch.device
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    amsgrad: bool = False
    clip: bool = False
    mode: str = "eager"

    @property
    def elements(self) -> int:
        """All parameters."""
        return sum(self.sizes)

    @property
    def ideal_bytes(self) -> int:
        """What a step must move per parameter: all state both ways, the gradient once, or twice to clip."""
        gradient = self.dtype.itemsize * (2 if self.clip else 1)
        return 24 + gradient + (8 if self.amsgrad else 0)


class Storage:
    """Parameters, gradients and moments. All contenders take turns on them, from the same initial state."""

    def __init__(self, case: Case) -> None:
        device = case.device
        self.case = case
        self._seeds = torch.Generator(device)
        self.params = [torch.empty(size, device=device) for size in case.sizes]
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if case.amsgrad else [])]
        self.moments = {name: [torch.empty_like(param) for param in self.params] for name in names}
        self._seeds.manual_seed(1)
        # torch's optimizers take float32 gradients alone.
        self.wide_grads = [torch.randn(size, device=device, generator=self._seeds) for size in case.sizes]
        self.grads = [grad.to(case.dtype) for grad in self.wide_grads]
        if case.dtype != torch.float32:
            torch._foreach_copy_(self.wide_grads, self.grads)

    def reset(self) -> None:
        """Back to the initial state."""
        self._seeds.manual_seed(0)
        for param in self.params:
            param.normal_(generator=self._seeds)
        for moments in self.moments.values():
            torch._foreach_zero_(moments)

    def state(self, i: int, step: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, as optimizers of torch have it."""
        return {"step": step, **{name: moments[i] for name, moments in self.moments.items()}}


@dataclass
class Contender:
    """A step, and its counters, which ``reset`` puts back to 0."""

    name: str
    call: Call
    counters: list[Tensor]
    compiler: str = ""
    peak_bytes: int | None = None

    def reset(self) -> None:
        """Before the first step."""
        torch._foreach_zero_(self.counters)


def _optimizer_step(
    storage: Storage, make: Callable[..., torch.optim.Optimizer], grads: Sequence[Tensor]
) -> tuple[torch.optim.Optimizer, list[nn.Parameter], list[Tensor]]:
    params = []
    for own, grad in zip(storage.params, grads, strict=True):
        param = nn.Parameter(own)
        param.grad_dtype = None
        param.grad = grad
        params.append(param)
    optimizer = make(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    counters = [torch.zeros((), device=storage.case.device) for _ in params]
    for i, param in enumerate(params):
        optimizer.state[param] = storage.state(i, counters[i])
    return optimizer, params, counters


def ours(storage: Storage, compiler: str) -> Contender:
    """fused_adamw.AdamW, with the kernels of this compiler on CUDA."""
    case = storage.case
    max_norm = MAX_NORM if case.clip else None
    make: Any = functools.partial(
        fused_adamw.AdamW, amsgrad=case.amsgrad, max_grad_norm=max_norm, capturable=True
    )
    optimizer, _, counters = _optimizer_step(storage, make, storage.grads)
    step: Call = optimizer.step
    if case.mode == "compile":
        step = torch.compile(optimizer.step, fullgraph=True)
    return Contender(f"{OURS}, {compiler}" if compiler else OURS, step, counters, compiler)


def torchs(storage: Storage, name: str, **choice: Any) -> Contender:
    """torch.optim.AdamW, with clip_grad_norm_ and a cast of 16-bit gradients where the case asks for them."""
    case = storage.case
    compiled = case.mode == "compile" or name == COMPILED
    # Counters on the device; what is compiled has them in the graph, which torch wants capturable for.
    capturable = case.device.type == "cuda" or (compiled and "fused" not in choice)
    make: Any = functools.partial(torch.optim.AdamW, amsgrad=case.amsgrad, capturable=capturable, **choice)
    optimizer, params, counters = _optimizer_step(storage, make, storage.wide_grads)

    def step() -> None:
        if case.dtype != torch.float32:
            torch._foreach_copy_(storage.wide_grads, storage.grads)
        if case.clip:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    return Contender(name, torch.compile(step, dynamic=False) if compiled else step, counters)


def staged(storage: Storage) -> Contender:
    """Each operation as a kernel of its own, over all tensors: what a step costs that is not fused at all."""
    case = storage.case
    (beta1, beta2), counter = BETAS, torch.zeros((), device=case.device)
    params, avgs, squares = storage.params, storage.moments["exp_avg"], storage.moments["exp_avg_sq"]

    def step() -> None:
        counter.add_(1.0)
        grads = storage.grads
        if case.dtype != torch.float32:
            grads = [grad.float() for grad in grads]
        if case.clip:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            coefficient = torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0)
            grads = [grad * coefficient for grad in grads]
        bias1, bias2 = 1.0 - beta1**counter, 1.0 - beta2**counter
        for i, (param, grad, avg, square) in enumerate(zip(params, grads, avgs, squares, strict=True)):
            param.mul_(1.0 - LR * WEIGHT_DECAY)
            avg.mul_(beta1).add_(grad, alpha=1.0 - beta1)
            square.mul_(beta2).add_(grad * grad, alpha=1.0 - beta2)
            second = square
            if case.amsgrad:
                second = storage.moments["max_exp_avg_sq"][i]
                torch.maximum(second, square, out=second)
            denominator = (second / bias2).sqrt().add_(EPS)
            param.sub_((avg / bias1).mul_(LR).div_(denominator))

    return Contender(STAGED, step, [counter])


def _missing_cpp_compiler(case: Case) -> str | None:
    name = os.environ.get("CXX", "g++")  # as torch._inductor.config.cpp.cxx has it
    found = case.device.type != "cpu" or shutil.which(name) is not None
    return None if found else f"torch.compile needs a C++ compiler, and {name} was not found"


@dataclass(frozen=True)
class Entry:
    """A contender that may take part: how it is made, or why it cannot be."""

    name: str
    make: Callable[[Storage], Contender]
    blocked: str | None = None


def entries(case: Case, compilers: Sequence[str]) -> list[Entry]:
    """All contenders of a case, ours first; the names of CUDA compilers matter on CUDA alone."""
    found = []
    needs_cpp = _missing_cpp_compiler(case)
    compiled = needs_cpp if case.mode == "compile" else None
    narrow = None
    if case.mode == "compile" and case.dtype != torch.float32:
        narrow = "torch.compile takes no parameter whose gradient has another dtype"
    for compiler in compilers if case.device.type == "cuda" else [""]:
        name = f"{OURS}, {compiler}" if compiler else OURS
        lacks = (build.missing(compiler) if compiler else None) or compiled or narrow
        found.append(Entry(name, functools.partial(ours, compiler=compiler), lacks))
    slow = "a kernel for each tensor takes Inductor minutes; see the compiled foreach"
    alone = slow if case.mode == "compile" else None
    found.append(Entry(STAGED, staged))  # what the others are compared with; never compiled
    same = f"compiled, it is the {COMPILED}" if case.mode == "compile" else None
    choices: list[tuple[str, dict[str, Any], str | None]] = [
        (FOR_LOOP, {"foreach": False, "fused": False}, compiled or alone),
        (FOREACH, {"foreach": True}, compiled or same),
        (COMPILED, {"foreach": True}, needs_cpp),
        (FUSED, {"fused": True}, compiled),
    ]
    for name, choice, lacks in choices:
        found.append(Entry(name, functools.partial(torchs, name=name, **choice), lacks))
    return found


def captured(contender: Contender, device: torch.device) -> Call:
    """The step in a CUDA graph; before it, a warm-up on a side stream, as torch's documentation has it."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            contender.call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        contender.call()
    return graph.replay
