"""``fused-adamw train``: a small GPT trained with fused_adamw.AdamW, beside torch.optim.AdamW."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fused_adamw.cli import report
from fused_adamw.cli.corpus import Corpus
from fused_adamw.cli.errors import CommandError
from fused_adamw.cli.training import Settings, Training, check_compiler

# How many lines a run prints where there is no terminal to draw a bar on.
PLAIN_LINES = 10

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130  # as a shell reports a process that SIGINT ended


def train(
    data: Annotated[
        list[Path] | None,
        typer.Option(help="A file to train on; give the option several times for several files."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows of text per step.")] = 16,
    context: Annotated[int, typer.Option(min=2, help="Bytes per window.")] = 128,
    width: Annotated[int, typer.Option(min=1, help="Width of the model.")] = 160,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads; they divide the width.")] = 5,
    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = 4,
    lr: Annotated[float, typer.Option(min=0.0, help="Highest learning rate.")] = 3e-3,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Decoupled weight decay.")] = 0.1,
    amsgrad: Annotated[bool, typer.Option(help="Train with AMSGrad.")] = False,
    max_grad_norm: Annotated[
        float | None, typer.Option(min=0.0, help="Clip the gradients to this norm, inside the step.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and the batches.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    compile: Annotated[bool, typer.Option(help="Compile the training step.")] = True,  # noqa: A002
    compare: Annotated[bool, typer.Option(help="Train with torch.optim.AdamW as well.")] = True,
    output: Annotated[Path, typer.Option(help="Folder for figures.json and loss.png.")] = Path(
        "fused-adamw-train"
    ),
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Where to write checkpoints; on Ctrl-C, OUTPUT/checkpoint.pt if not given."),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    resume: Annotated[
        Path | None, typer.Option(help="Go on from this checkpoint, under the settings it was made with.")
    ] = None,
) -> None:
    """Train a byte-level GPT with fused_adamw.AdamW, and with torch.optim.AdamW beside it.

    The text is that of Python's help topics, or your own (--data). A run that is resumed ends as one that was
    not interrupted, to the bit.
    """
    console = Console()
    try:
        _check(device, compile, width, heads)
        corpus = Corpus.load(data or [], context)
        settings = Settings(
            steps=steps,
            batch_size=batch_size,
            context=context,
            width=width,
            heads=heads,
            layers=layers,
            lr=lr,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            max_grad_norm=max_grad_norm,
            seed=seed,
            device=device,
            compiled=compile,
            data=_digest(corpus),
        )
        ours = Training(settings, corpus, "fused_adamw")
        if resume is not None:
            ours.restore(resume)
        interrupted = _run(ours, report.OURS, console, checkpoint, checkpoint_every)
        if interrupted:
            path = checkpoint or output / "checkpoint.pt"
            ours.save(path)
            console.print(f"interrupted after {ours.progress.step} steps; go on with --resume {path}")
            raise typer.Exit(EXIT_INTERRUPTED)
        if checkpoint is not None:
            ours.save(checkpoint)
        theirs = Training(settings, corpus, "torch") if compare else None
        if theirs is not None and _run(theirs, report.TORCHS, console):
            console.print(f"interrupted; {report.OURS} had finished")
            raise typer.Exit(EXIT_INTERRUPTED)
        found = report.figures(ours, theirs)
        paths = report.write(output, found)
    except CommandError as error:
        typer.echo(f"fused-adamw train: {error}", err=True)
        raise typer.Exit(EXIT_REFUSED) from None
    console.print(report.table(found))
    console.print(f"figures in {paths[0]}, curves in {paths[1]}", soft_wrap=True)


def _check(device: str, compiled: bool, width: int, heads: int) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise CommandError(f"--device is {device}; cpu, cuda or cuda:N is required")
    if kind == "cuda" and not torch.cuda.is_available():
        raise CommandError(f"--device is {device}, and this torch sees no CUDA device")
    if width % heads != 0:
        raise CommandError(f"--width is {width}; a multiple of --heads, {heads}, is required")
    if compiled:
        check_compiler(kind)


def _digest(corpus: Corpus) -> str:
    tokens = torch.cat([corpus.training, corpus.held_out]).to(torch.uint8)
    return hashlib.sha256(bytes(tokens.tolist())).hexdigest()


def _run(
    training: Training,
    name: str,
    console: Console,
    checkpoint: Path | None = None,
    checkpoint_every: int = 1,
) -> bool:
    """Trains to the end; returns whether Ctrl-C stopped it, after the step that it fell into."""
    settings, progress = training.settings, training.progress
    tokens_per_step = settings.batch_size * settings.context
    plain_every = max(1, settings.steps // PLAIN_LINES)
    first_step, start = progress.step, 0.0
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with _interrupts() as interrupted, bar:
        status = "(the first one compiles)" if settings.compiled else ""
        task = bar.add_task(name, total=settings.steps, completed=progress.step, status=status)
        if not console.is_terminal:
            console.print(f"{name}: {settings.steps} steps {status}")
        while progress.step < settings.steps and not interrupted:
            training.run_step()
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
                training.save(checkpoint)
    if progress.held_out:
        console.print(f"{name}: held-out loss {progress.held_out[-1][1]:.4f} after {progress.step} steps")
    return bool(interrupted) and progress.step < settings.steps


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
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
