"""What a training shows while it runs, and how Ctrl-C ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from fused_adamw.cli import checkpoint as checkpoints
from fused_adamw.cli.training import Training

# How many lines a run prints where there is no terminal to draw a bar on.
PLAIN_LINES = 10


def run_to_end(
    training: Training,
    name: str,
    console: Console,
    interrupted: list[int],
    checkpoint: Path | None = None,
    checkpoint_every: int = 1,
) -> None:
    """Trains to the end, or until there is an entry in ``interrupted``: then the step at hand is finished."""
    settings, progress = training.settings, training.progress
    tokens_per_step = settings.batch_size * settings.context
    plain_every = max(1, settings.steps // PLAIN_LINES)
    first_step, start = progress.step, 0.0
    bar = Progress(
        SpinnerColumn(finished_text=" "),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
        MofNCompleteColumn(),
        _StatusColumn(interrupted),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        expand=True,
    )
    with bar:
        status = "(the first one compiles)" if training.compiles else ""
        task = bar.add_task(name, total=settings.steps, completed=progress.step, status=status)
        if not console.is_terminal and progress.step < settings.steps:
            console.print(f"{name}: {settings.steps} steps {status}".rstrip())
        while progress.step < settings.steps and not interrupted:
            try:
                training.run_step()
            except Exception:
                # A terminal sends Ctrl-C to the compiler's processes too; their end fails a step not taken.
                if not interrupted:
                    raise
                break
            status = f"loss {progress.losses[-1]:.3f}"
            if start == 0.0:  # the first step compiles and does not tell of the rate
                first_step, start = progress.step, time.perf_counter()
            else:
                rate = (progress.step - first_step) * tokens_per_step / (time.perf_counter() - start)
                status += f"  {rate:,.0f} tokens/s"
            bar.update(task, completed=progress.step, status=status)
            if not console.is_terminal and progress.step % plain_every == 0:
                console.print(f"  step {progress.step}/{settings.steps}  {status}")
            if checkpoint is not None and progress.step % checkpoint_every == 0:
                checkpoints.save(training, checkpoint)
    if progress.step == settings.steps:
        console.print(f"{name}: held-out loss {progress.held_out[-1][1]:.4f} after {progress.step} steps")


class _StatusColumn(ProgressColumn):
    """Loss and rate, or that Ctrl-C was seen: a step that compiles goes on for a while."""

    def __init__(self, interrupted: list[int]) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._interrupted = interrupted

    def render(self, task: Task) -> Text:
        """The text of now."""
        return Text("finishing this step" if self._interrupted else task.fields["status"])


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """A list that Ctrl-C puts an entry into; a second Ctrl-C ends the process as usual."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def quiet_dynamo() -> Iterator[None]:
    """Keeps Dynamo's warning of the profiler's mark in every optimizer's step out of the progress bar."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    if "TORCH_LOGS" not in os.environ:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
