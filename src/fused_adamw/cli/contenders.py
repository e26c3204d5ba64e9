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
from fused_adamw.cli.suites.training import FORMS, Form
from fused_adamw.state import MASTER, REMAINDER, master_key
from fused_adamw.torch_library.checks import REMAINDER_DTYPE

Call = Callable[[], object]

OURS = "fused_adamw"
STAGED = "separate kernels"
FOR_LOOP, FOREACH, FUSED = "torch for-loop", "torch foreach", "torch fused"
COMPILED = "torch compiled foreach"

# Above any norm here: torch's clipping multiplies by 1 then, and has the same gradients in each call.
MAX_NORM = 1e9
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2

# What a step must read and write per parameter to update its float32 weight: the parameter; a bfloat16 and
# the 16 bits that it lacks; a float16 and a master weight.
WEIGHT_BYTES = {torch.float32: 8, torch.bfloat16: 8, torch.float16: 12}


@dataclass(frozen=True)
class Case:
    """What a step does, and where."""

    device: torch.device
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    """Of the gradients."""
    amsgrad: bool = False
    clip: bool = False
    mode: str = "eager"
    params: torch.dtype = torch.float32

    @property
    def elements(self) -> int:
        """All parameters."""
        return sum(self.sizes)

    @property
    def ideal_bytes(self) -> int:
        """What a step must move per parameter: all state both ways, the gradient once, or twice to clip."""
        gradient = self.dtype.itemsize * (2 if self.clip else 1)
        return WEIGHT_BYTES[self.params] + 16 + gradient + (8 if self.amsgrad else 0)


class Storage:
    """Parameters, gradients and moments. All contenders take turns on them, from the same initial state.

    ``weights`` are the parameters, or float32 master weights of those of 16 bits; ``masters`` are what ours
    may keep of these, by the key in its state.
    """

    def __init__(self, case: Case) -> None:
        device = case.device
        self.case = case
        self._seeds = torch.Generator(device)
        self.params = [torch.empty(size, dtype=case.params, device=device) for size in case.sizes]
        self.weights = self.params
        self.masters: dict[str, list[Tensor]] = {}
        if case.params != torch.float32:
            self.weights = [torch.empty_like(param, dtype=torch.float32) for param in self.params]
            self.masters[MASTER] = self.weights
        if case.params == torch.bfloat16:
            self.masters[REMAINDER] = [
                torch.empty_like(param, dtype=REMAINDER_DTYPE) for param in self.params
            ]
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if case.amsgrad else [])]
        self.moments = {name: [torch.empty_like(weight) for weight in self.weights] for name in names}
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
        for tensors in (*self.masters.values(), *self.moments.values()):
            torch._foreach_zero_(tensors)
        if self.masters:
            torch._foreach_copy_(self.weights, self.params)

    def round_weights(self) -> None:
        """Copies master weights to the parameters, where there are any."""
        if self.masters:
            torch._foreach_copy_(self.params, self.weights)

    def state(self, i: int, step: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, as optimizers of torch have it."""
        return {"step": step, **{name: moments[i] for name, moments in self.moments.items()}}


@dataclass
class Contender:
    """A step; its counters, which ``reset`` puts back to 0; and the float32 weights that it comes to."""

    name: str
    call: Call
    counters: list[Tensor]
    weights: Callable[[], list[Tensor]]
    compiler: str = ""
    peak_bytes: int | None = None

    def reset(self) -> None:
        """Before the first step."""
        torch._foreach_zero_(self.counters)


def _optimizer_step(
    storage: Storage, make: Callable[..., Any], updated: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Any, list[nn.Parameter], list[Tensor]]:
    params = []
    for own, grad in zip(updated, grads, strict=True):
        param = nn.Parameter(own)
        param.grad_dtype = None
        param.grad = grad
        params.append(param)
    optimizer = make(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    counters = [torch.zeros((), device=storage.case.device) for _ in params]
    for i, param in enumerate(params):
        optimizer.state[param] = storage.state(i, counters[i])
    return optimizer, params, counters


def ours(storage: Storage, name: str, compiler: str, form: Form) -> Contender:
    """fused_adamw.AdamW, with the kernels of this compiler on CUDA, and master weights in this form."""
    case = storage.case
    max_norm = MAX_NORM if case.clip else None
    make = functools.partial(
        fused_adamw.AdamW, amsgrad=case.amsgrad, max_grad_norm=max_norm, capturable=True, **form.options
    )
    optimizer, params, counters = _optimizer_step(storage, make, storage.params, storage.grads)
    splits = optimizer.splits_masters(optimizer.param_groups[0])
    for i, param in enumerate(params):
        if (key := master_key(param, splits)) is not None:
            optimizer.state[param][key] = storage.masters[key][i]
    step: Call = optimizer.step
    if case.mode == "compile":
        step = torch.compile(optimizer.step, fullgraph=True)

    def weights() -> list[Tensor]:
        return [optimizer.master_param(param) for param in params]

    return Contender(name, step, counters, weights, compiler)


def torchs(storage: Storage, name: str, **choice: Any) -> Contender:
    """torch.optim.AdamW, with clip_grad_norm_ and casts of 16-bit gradients and parameters where needed."""
    case = storage.case
    compiled = case.mode == "compile" or name == COMPILED
    # Counters on the device; what is compiled has them in the graph, which torch wants capturable for.
    capturable = case.device.type == "cuda" or (compiled and "fused" not in choice)
    make = functools.partial(torch.optim.AdamW, amsgrad=case.amsgrad, capturable=capturable, **choice)
    optimizer, params, counters = _optimizer_step(storage, make, storage.weights, storage.wide_grads)

    def step() -> None:
        if case.dtype != torch.float32:
            torch._foreach_copy_(storage.wide_grads, storage.grads)
        if case.clip:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        storage.round_weights()

    call = torch.compile(step, dynamic=False) if compiled else step
    return Contender(name, call, counters, lambda: storage.weights)


def staged(storage: Storage) -> Contender:
    """Each operation as a kernel of its own, over all tensors: what a step costs that is not fused at all."""
    case = storage.case
    (beta1, beta2), counter = BETAS, torch.zeros((), device=case.device)
    params, avgs, squares = storage.weights, storage.moments["exp_avg"], storage.moments["exp_avg_sq"]

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
        storage.round_weights()

    return Contender(STAGED, step, [counter], lambda: storage.weights)


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
    if case.mode == "compile" and case.dtype != case.params:
        narrow = "torch.compile takes no parameter whose gradient has another dtype"
    forms = {name: form for name, form in FORMS.items() if form.dtype == case.params}
    for compiler in compilers if case.device.type == "cuda" else [""]:
        lacks = (build.missing(compiler) if compiler else None) or compiled or narrow
        for form_name, form in forms.items():
            # A form's name begins with the dtype, which is the same for all contenders.
            name = ", ".join(filter(None, [OURS, compiler, *form_name.split(", ")[1:]]))
            make = functools.partial(ours, name=name, compiler=compiler, form=form)
            found.append(Entry(name, make, lacks))
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
