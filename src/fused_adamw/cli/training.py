"""The training loop: one optimizer, from the first step or from a checkpoint to the last."""

from __future__ import annotations

import functools
import math
import os
import pickle
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import fused_adamw
from fused_adamw.cli.corpus import Corpus
from fused_adamw.cli.errors import CommandError
from fused_adamw.cli.gpt import GPT

WARM_UP_STEPS = 10
HELD_OUT_BATCH = 32
HELD_OUT_POINTS = 10
"""How often the held-out loss is taken in a run, besides before the first step."""

# The first steps compile and fault memory in: their times say nothing of a step.
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
    seed: int
    device: str
    compiled: bool
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

    @property
    def optimizer_median(self) -> float:
        """Seconds per optimizer step."""
        return statistics.median(self.optimizer_seconds[UNTIMED_STEPS:] or self.optimizer_seconds)


class Training:
    """A model in training with one optimizer.

    The step is compiled in two parts, the loss with its backward pass and the optimizer's step, because
    ``Tensor.backward()`` inside a compiled function breaks the graph.
    """

    def __init__(
        self, settings: Settings, corpus: Corpus, optimizer: Literal["fused_adamw", "torch"]
    ) -> None:
        self.settings = settings
        self.corpus = corpus
        self.progress = Progress()
        self.device = torch.device(settings.device)
        self.model = GPT(settings.context, settings.width, settings.heads, settings.layers, settings.seed).to(
            self.device
        )
        # A float64 tensor holds any learning rate exactly, and its changes recompile nothing.
        self._lr = torch.zeros((), dtype=torch.float64, device=self.device)
        options: dict[str, Any] = {"weight_decay": settings.weight_decay, "amsgrad": settings.amsgrad}
        self._clip: float | None = None
        if optimizer == "fused_adamw":
            self.optimizer: torch.optim.Optimizer = fused_adamw.AdamW(
                self.model.parameters(), lr=self._lr, max_grad_norm=settings.max_grad_norm, **options
            )
            step = self.optimizer.step
            self._optimizer_step: Callable[[], Any] = torch.compile(step) if settings.compiled else step
        else:
            # torch's fastest on these devices; it cannot be compiled.
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True, **options)
            self._optimizer_step = self.optimizer.step
            self._clip = settings.max_grad_norm
        self._loss = _compiled_loss() if settings.compiled else _loss
        self._held_out = [
            tensor.to(self.device) for tensor in corpus.held_out_batch(HELD_OUT_BATCH, settings.context)
        ]

    @property
    def parameter_count(self) -> int:
        """The number of elements of all parameters."""
        return sum(param.numel() for param in self.model.parameters())

    def run_step(self) -> None:
        """One step; appends to the progress."""
        settings, progress = self.settings, self.progress
        if progress.step == 0:
            self._take_held_out_loss()
        inputs, targets = self.corpus.training_batch(
            settings.seed, progress.step, settings.batch_size, settings.context
        )
        self._set_learning_rate(settings.learning_rate(progress.step))
        self.optimizer.zero_grad()
        loss = self._loss(self.model, inputs.to(self.device), targets.to(self.device))
        loss.backward()
        self._synchronize()
        start = time.perf_counter()
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer_step()
        self._synchronize()
        progress.optimizer_seconds.append(time.perf_counter() - start)
        progress.losses.append(loss.item())
        progress.step += 1
        if progress.step % max(1, settings.steps // HELD_OUT_POINTS) == 0 or progress.step == settings.steps:
            self._take_held_out_loss()

    def save(self, path: Path) -> None:
        """Writes a checkpoint; one that is there is replaced whole or not at all."""
        contents = {
            "settings": asdict(self.settings),
            "progress": asdict(self.progress),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            torch.save(contents, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def restore(self, path: Path) -> None:
        """Goes on from a checkpoint; the batches and the learning rate follow from the step.

        Raises:
            CommandError: There is no checkpoint that this run could go on from.
        """
        try:
            contents = torch.load(path, map_location=self.device, weights_only=True)
            settings, progress = contents["settings"], Progress(**contents["progress"])
        except OSError as error:
            raise CommandError(f"cannot read {path}: {error.strerror}") from None
        except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError):
            raise CommandError(f"{path} is no checkpoint of this command") from None
        for name, value in asdict(self.settings).items():
            if settings.get(name) != value:
                raise CommandError(
                    f"{path} was made with {name} {settings.get(name)}, and this run has {value}; the same "
                    "is required"
                )
        self.model.load_state_dict(contents["model"])
        self.optimizer.load_state_dict(contents["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr  # the loaded tensor is another object, which run_step would not fill
        self.progress = progress

    def _set_learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def _take_held_out_loss(self) -> None:
        with torch.no_grad():
            loss = _loss(self.model, *self._held_out)
        self.progress.held_out.append((self.progress.step, loss.item()))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def check_compiler(device: str) -> None:
    """Refuses to compile for the CPU where no C++ compiler is found (CommandError)."""
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if device == "cpu" and not any(shutil.which(compiler) for compiler in compilers):
        raise CommandError(
            f"torch.compile needs a C++ compiler and found no {' or '.join(compilers)}; install one, or give "
            "--no-compile"
        )


def _loss(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model(inputs, targets)
    return loss


@functools.cache
def _compiled_loss() -> Callable[[GPT, Tensor, Tensor], Tensor]:
    # Of a function of the model, not a method of one: both trainings share what is compiled.
    return torch.compile(_loss)
