"""The training loop: one optimizer, from the first step or from a checkpoint to the last."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError

import fused_adamw
from fused_adamw.cli.corpus import Corpus
from fused_adamw.cli.dtypes import dtype_of
from fused_adamw.cli.errors import CommandError
from fused_adamw.cli.gpt import GPT
from fused_adamw.cli.masters import MasterCopies
from fused_adamw.cli.suites.training import params_of

WARM_UP_STEPS = 10
HELD_OUT_BATCH = 32
HELD_OUT_POINTS = 10
"""How often the held-out loss is taken in a run, besides before the first step."""

# The first steps of a process compile and fault memory in: their times say nothing of a step.
UNTIMED_STEPS = 2


@dataclass(frozen=True)
class Settings:
    """What a run depends on, to the bit; a checkpoint can go on only under the same."""

    steps: int
    batch_size: int
    context: int
    width: int
    heads: int
    layers: int
    lr: float
    weight_decay: float
    amsgrad: bool
    max_grad_norm: float | None
    dtype: str
    """Of the parameters."""
    seed: int
    device: str
    compile: bool
    data: str
    """SHA-256 of the text."""

    def learning_rate(self, step: int) -> float:
        """A linear warm-up, then half a cosine to a tenth of ``lr``."""
        if step < WARM_UP_STEPS:
            return self.lr * (step + 1) / WARM_UP_STEPS
        progress = (step - WARM_UP_STEPS) / max(1, self.steps - WARM_UP_STEPS)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


@dataclass
class Progress:
    """What a run has come to."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """(steps done, loss)"""
    optimizer_seconds: list[float] = field(default_factory=list)
    """Of every step but the first ``UNTIMED_STEPS`` of each process."""


class Training:
    """A model in training with one optimizer.

    The step is compiled in two parts: the loss, whose backward pass AOTAutograd compiles with it, and the
    optimizer's step. As one function it would not stay one graph: Dynamo breaks it at ``Tensor.backward()``
    (unless the private ``torch._dynamo.config.trace_autograd_ops`` is set) and runs ``zero_grad`` eagerly.
    Both parts are compiled with ``fullgraph``, so that what cannot be compiled is an error, not a slow run.

    Parameters of 16 bits have float32 master weights: fused_adamw's own, or copies for torch's optimizer. The
    loss of float16 parameters is scaled.
    """

    def __init__(
        self, settings: Settings, corpus: Corpus, optimizer: Literal["fused_adamw", "torch"]
    ) -> None:
        self.settings = settings
        self.corpus = corpus
        self.progress = Progress()
        self.device = torch.device(settings.device)
        self.model = GPT(settings.context, settings.width, settings.heads, settings.layers, settings.seed).to(
            self.device, dtype_of(settings.dtype)
        )
        # A float64 tensor holds any learning rate exactly, and its changes recompile nothing.
        lr = torch.zeros((), dtype=torch.float64, device=self.device)
        options: dict[str, Any] = {"weight_decay": settings.weight_decay, "amsgrad": settings.amsgrad}
        self._copies: MasterCopies | None = None
        self._clip: float | None = None
        scaler_type: type[torch.amp.GradScaler] = torch.amp.GradScaler
        # What torch's training needs compiled, ours has compiled by then.
        self.compiles = settings.compile and optimizer == "fused_adamw"
        if optimizer == "fused_adamw":
            try:
                self.optimizer: torch.optim.Optimizer = fused_adamw.AdamW(
                    self.model.parameters(), lr=lr, max_grad_norm=settings.max_grad_norm, **options
                )
            except (TypeError, ValueError) as error:  # a device without kernels, say
                raise CommandError(str(error)) from None
            if settings.compile:
                compiled: Any = torch.compile(self.optimizer.step, fullgraph=True)
                self.optimizer.step = compiled  # type: ignore[method-assign]
            scaler_type = fused_adamw.GradScaler
        else:
            params = list(self.model.parameters())
            if settings.dtype != "float32":
                self._copies = MasterCopies(params)
                params = self._copies.masters
            # torch's fastest on these devices; it cannot be compiled.
            self.optimizer = torch.optim.AdamW(params, lr=0.0, fused=True, **options)
            self._clip = settings.max_grad_norm
        self._scaler = scaler_type(self.device.type, enabled=settings.dtype == "float16")
        self._loss = _compiled_loss() if settings.compile else _loss
        self._held_out = [
            tensor.to(self.device) for tensor in corpus.held_out_batch(HELD_OUT_BATCH, settings.context)
        ]
        self._untimed = UNTIMED_STEPS

    @property
    def parameter_count(self) -> int:
        """The number of elements of all parameters."""
        return sum(param.numel() for param in self.model.parameters())

    @property
    def skipped_steps(self) -> int:
        """The number of steps that changed nothing, for want of finite gradients."""
        [steps] = {int(state["step"]) for state in self.optimizer.state.values()}
        return self.progress.step - steps

    def weights(self) -> list[Tensor]:
        """The float32 weights of the parameters: the master weights of those of 16 bits."""
        if isinstance(self.optimizer, fused_adamw.AdamW):
            return [self.optimizer.master_param(param) for param in self.model.parameters()]
        return [param.detach() for param in params_of(self.optimizer)]

    def run_step(self) -> None:
        """One step; appends to the progress.

        Raises:
            CommandError: The step cannot be compiled; it has not been taken then.
        """
        settings, progress = self.settings, self.progress
        if not progress.held_out:
            self._take_held_out_loss()
        inputs, targets = self.corpus.training_batch(
            settings.seed, progress.step, settings.batch_size, settings.context
        )
        self._set_learning_rate(settings.learning_rate(progress.step))
        self.model.zero_grad()
        with _compiler_errors():
            loss = self._loss(self.model, inputs.to(self.device), targets.to(self.device))
            self._scaler.scale(loss).backward()
            self._synchronize()
            start = time.perf_counter()
            self._update()
        self._synchronize()
        if self._untimed == 0:
            progress.optimizer_seconds.append(time.perf_counter() - start)
        else:
            self._untimed -= 1
        progress.losses.append(loss.item())
        progress.step += 1
        if progress.step % max(1, settings.steps // HELD_OUT_POINTS) == 0 or progress.step == settings.steps:
            self._take_held_out_loss()

    def _update(self) -> None:
        if self._copies is not None:
            self._copies.take_gradients(param.grad for param in self.model.parameters())
        if self._clip is not None:
            self._scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(params_of(self.optimizer), self._clip)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        if self._copies is not None:
            self._copies.give_weights()

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and the scale of losses, to the bit.

        No random state belongs to it: weights are drawn before the first step and batches from their step's
        own generator.
        """
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], progress: Progress) -> None:
        """Goes on from there; the batches and the learning rate follow from the step."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self.progress = progress

    def _set_learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def _take_held_out_loss(self) -> None:
        # Not compiled: without gradients it would be another graph, which takes longer than it saves.
        with torch.no_grad():
            loss = _loss(self.model, *self._held_out)
        self.progress.held_out.append((self.progress.step, loss.item()))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Lets torch use only what gives the same bits each time.

    Inductor's backward pass of an embedding, for one, otherwise adds rows in the order in which threads come.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for; read when CUDA starts
    filling: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling is for finding reads of uninitialised memory, and costs a pass over each tensor.
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        filling.fill_uninitialized_memory = before[1]


@contextlib.contextmanager
def _compiler_errors() -> Iterator[None]:
    try:
        yield
    except (TorchDynamoException, CppCompileError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        # A backend's error begins with "backend=... raised:".
        reason = next((line for line in lines if line and line[-1] != ":"), type(error).__name__).rstrip(".")
        raise CommandError(f"the step cannot be compiled: {reason}; --no-compile trains without") from error


def check_compiler(device: str) -> None:
    """Refuses to compile for the CPU where Inductor's C++ compiler is missing (CommandError).

    One that is there and does not work is found at the first step.
    """
    compiler = os.environ.get("CXX", "g++")  # as torch._inductor.config.cpp.cxx has it
    if device == "cpu" and shutil.which(compiler) is None:
        raise CommandError(
            f"torch.compile needs a C++ compiler and found no {compiler}; install one, name one in CXX, or "
            "give --no-compile"
        )


def _loss(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model(inputs, targets)
    return loss


@functools.cache
def _compiled_loss() -> Callable[[GPT, Tensor, Tensor], Tensor]:
    # Of a function of the model, not a method of one: both trainings share what is compiled. Shapes are fixed
    # in a run, and a graph for any shape could differ in bits from one for this shape.
    return torch.compile(_loss, fullgraph=True, dynamic=False)
