"""Whole training steps of GPT-2 124M: compiled model, bfloat16 autocast, clipping; beside torch's fused step.

    python benchmarks/compiled_training.py [--small] [--output benchmarks/results/compiled_training-h200.json]

Three ways to take the optimizer's step: eager; under ``torch.compile``; and in one CUDA graph with forward
and backward pass. The share of the optimizer is what a step takes longer than its forward and backward pass
alone, taken the same way. Peak memory is what a step adds to what lies there before it: activations,
gradients, and copies, if any.

``--small``: a tiny model, to see that all runs; on the CPU without CUDA graphs.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fused_adamw
from fused_adamw.cli.gpt import GPT
from fused_adamw.cli.timing import peak_of, seconds_of, synchronize
from measure import conditions, medians, write_json

Step = Callable[[], object]
MAX_NORM = 1.0
LR = 3e-4


class Size(NamedTuple):
    """A model, and how often its steps are timed."""

    vocabulary: int
    context: int
    width: int
    heads: int
    layers: int
    batch: int
    rounds: int
    calls: int


GPT2 = Size(vocabulary=50257, context=1024, width=768, heads=12, layers=12, batch=16, rounds=5, calls=4)
SMALL = Size(vocabulary=256, context=64, width=64, heads=2, layers=2, batch=4, rounds=3, calls=2)


@dataclass
class Figures:
    """Of one contender; bytes are not known on the CPU."""

    step_seconds: float
    forward_and_backward_seconds: float
    optimizer_share: float
    peak_bytes: int | None


class Training:
    """A model with its batch and its optimizer; ``optimizer_step`` clips, too."""

    def __init__(self, size: Size, device: torch.device, optimizer: str) -> None:
        self.device = device
        self.model = GPT(size.context, size.width, size.heads, size.layers, 0, size.vocabulary).to(device)
        self.params = list(self.model.parameters())
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1), generator=generator)
        self.batch = tokens.to(device)
        self.loss = torch.compile(self._loss)
        self.optimizer_step = ours(self.params) if optimizer == "fused_adamw" else theirs(self.params)
        self.last_loss = torch.zeros((), device=device)

    def _loss(self) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss: Tensor = self.model(self.batch[:, :-1], self.batch[:, 1:])
        return loss

    def forward_and_backward(self) -> None:
        """All of a step but the optimizer's part."""
        for param in self.params:
            param.grad = None
        loss = self.loss()
        loss.backward()
        self.last_loss = loss.detach()

    def step(self) -> None:
        """A whole training step."""
        self.forward_and_backward()
        self.optimizer_step()


def ours(params: list[torch.nn.Parameter]) -> Step:
    return fused_adamw.AdamW(params, lr=LR, max_grad_norm=MAX_NORM, capturable=True).step


def theirs(params: list[torch.nn.Parameter]) -> Step:
    on_cuda = params[0].is_cuda
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True, capturable=on_cuda)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    return step


def warm_up(step: Step, device: torch.device) -> None:
    """Compiles, and makes states; on a side stream, as torch's documentation asks for before a capture."""
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    synchronize(device)


def captured(step: Step) -> Step:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def compare(way: str, size: Size, device: torch.device) -> dict[str, Figures]:
    """The figures of both optimizers, which must come to the same loss."""
    trainings: dict[str, Training] = {}
    whole: dict[str, Step] = {}
    parts: dict[str, Step] = {}
    peaks: dict[str, int | None] = {}
    for name in ("fused_adamw", "torch fused"):
        training = trainings[name] = Training(size, device, name)
        if way == "optimizer compiled":
            training.optimizer_step = torch.compile(training.optimizer_step)
        warm_up(training.step, device)
        for param in training.params:
            param.grad = None

        def once(training: Training = training) -> Step:
            if way == "CUDA graph":
                return captured(training.step)
            training.step()
            return training.step

        gc.collect()
        peaks[name] = peak_of(lambda name=name, once=once: whole.update({name: once()}), device)
        part = training.forward_and_backward
        parts[name] = captured(part) if way == "CUDA graph" else part
    turns = {"rounds": size.rounds, "calls": size.calls}
    measure = functools.partial(seconds_of, device=device)
    steps = medians(whole, measure, **turns)
    losses = [training.last_loss.item() for training in trainings.values()]
    if abs(losses[0] - losses[1]) > 0.05 * losses[1]:
        raise SystemExit(f"{way}: the losses {losses} differ")
    passes = medians(parts, measure, **turns)
    return {
        name: Figures(steps[name], passes[name], 1.0 - passes[name] / steps[name], peaks[name])
        for name in steps
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    size = SMALL if arguments.small else GPT2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.small:
        parser.error("there is no CUDA device; --small runs on the CPU")
    ways = ["optimizer eager", "optimizer compiled", *(["CUDA graph"] if device.type == "cuda" else [])]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    table = Table(title=f"Training steps on {name}")
    for column in ("way", "optimizer", "step", "in the optimizer", "share", "peak"):
        table.add_column(column, justify="left" if column in ("way", "optimizer") else "right")
    figures: dict[str, dict[str, Figures]] = {}
    for way in ways:
        figures[way] = compare(way, size, device)
        for optimizer, found in figures[way].items():
            table.add_row(
                way,
                optimizer,
                f"{found.step_seconds * 1e3:,.2f} ms",
                f"{(found.step_seconds - found.forward_and_backward_seconds) * 1e3:,.2f} ms",
                f"{found.optimizer_share:.1%}",
                "" if found.peak_bytes is None else f"{found.peak_bytes / 2**20:,.0f} MiB",
            )
        table.add_section()
        torch.compiler.reset()
        gc.collect()
    Console(width=110).print(table)
    if arguments.output is not None:
        where = {**conditions(), "device": name, "date": date.today().isoformat(), "size": size._asdict()}
        rows = {way: {n: asdict(f) for n, f in found.items()} for way, found in figures.items()}
        write_json(arguments.output, {"conditions": where, "figures": rows})


if __name__ == "__main__":
    main()
