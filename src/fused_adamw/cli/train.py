"""``fused-adamw train``: a small GPT trained with fused_adamw.AdamW, beside torch.optim.AdamW."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperCommand

from fused_adamw.cli import checkpoint as checkpoints
from fused_adamw.cli import report, terminal
from fused_adamw.cli.corpus import Corpus
from fused_adamw.cli.dtypes import METAVAR, dtype_name
from fused_adamw.cli.errors import CommandError, refusing
from fused_adamw.cli.session import interrupts, quiet_dynamo, run_to_end
from fused_adamw.cli.training import Settings, Training, check_compiler, deterministic

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130  # as a shell reports a process that SIGINT ended


class TrainCommand(TyperCommand):
    """Takes several files after one ``--data``, as a shell pattern gives them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads ``--data a b`` as ``--data a --data b``; the command has no arguments that b could be."""
        spelled: list[str] = []
        in_data = False
        for i, arg in enumerate(args):
            if arg.startswith("-"):
                in_data = arg == "--data" or arg.startswith("--data=")
            elif in_data and args[i - 1] != "--data":
                spelled.append("--data")
            spelled.append(arg)
        return super().parse_args(ctx, spelled)


def train(
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH...", help="Files to train on, in place of Python's help topics."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 300,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows of text per step.")] = 8,
    context: Annotated[int, typer.Option(min=2, help="Bytes per window.")] = 64,
    width: Annotated[int, typer.Option(min=1, help="Width of the model.")] = 208,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads; they divide the width.")] = 4,
    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = 2,
    lr: Annotated[float, typer.Option(min=0.0, help="Highest learning rate.")] = 2e-3,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Decoupled weight decay.")] = 0.1,
    amsgrad: Annotated[bool, typer.Option(help="Train with AMSGrad.")] = False,
    max_grad_norm: Annotated[
        float | None, typer.Option(min=0.0, help="Clip the gradients to this norm, inside the step.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(parser=dtype_name, metavar=METAVAR, help="Of the parameters.")
    ] = "float32",
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the weights and the batches.")] = 0,
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
        Path | None,
        typer.Option(
            help="Go on from this checkpoint, under the settings it was made with; --steps is one of them, "
            "since the learning rates depend on it."
        ),
    ] = None,
) -> None:
    """Train a byte-level GPT with fused_adamw.AdamW, and with torch.optim.AdamW beside it.

    The text is that of Python's help topics, or your own (--data). A run that is resumed ends as one that was
    not interrupted, to the bit. The run to compare with is not kept in checkpoints: it starts anew.

    Parameters of 16 bits have float32 master weights: fused_adamw's own, and for torch.optim.AdamW copies
    that it updates in their place. With float16, each side scales the loss with its gradient scaler.
    """
    console = terminal.console()
    try:
        _check(device, compile, width, heads, lr=lr, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        corpus = Corpus.load(data or [], context)
        _check_writable(output, checkpoint)
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
            dtype=dtype,
            seed=seed,
            device=device,
            compile=compile,
            data=corpus.digest,
        )
        with interrupts() as interrupted, deterministic(), quiet_dynamo():
            ours = Training(settings, corpus, "fused_adamw")
            if resume is not None and (note := checkpoints.restore(ours, resume)) is not None:
                console.print(f"note: {note}", soft_wrap=True)
            run_to_end(ours, report.OURS, console, interrupted, checkpoint, checkpoint_every)
            if checkpoint is not None and not interrupted:
                checkpoints.save(ours, checkpoint)
            theirs = None
            if compare and not interrupted:
                theirs = Training(settings, corpus, "torch")
                run_to_end(theirs, report.TORCHS, console, interrupted)
            if interrupted:
                path = checkpoint or output / "checkpoint.pt"
                checkpoints.save(ours, path)
                console.print(
                    f"interrupted; {report.OURS} has done {ours.progress.step} of {steps} steps; go on with "
                    f"--resume {path}",
                    soft_wrap=True,
                )
                raise typer.Exit(EXIT_INTERRUPTED)
            found = report.figures(ours, theirs)
            paths = report.write(output, found)
    except CommandError as error:
        typer.echo(f"fused-adamw train: {error}", err=True)
        raise typer.Exit(EXIT_REFUSED) from None
    console.print(report.table(found))
    console.print(f"figures in {paths[0]}, curves in {paths[1]}", soft_wrap=True)


def _check(device: str, compiled: bool, width: int, heads: int, **numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not math.isfinite(number):
            raise CommandError(f"--{name.replace('_', '-')} is {number}; a finite number is required")
    try:
        parsed = torch.device(device)
    except RuntimeError:
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise CommandError(f"--device is {device}; cpu, cuda or cuda:N is required")
    if parsed.type == "cuda":
        if not torch.cuda.is_available():
            raise CommandError(f"--device is {device}, and this torch sees no CUDA device")
        if parsed.index is not None and parsed.index >= torch.cuda.device_count():
            raise CommandError(
                f"--device is {device}, and this torch sees {torch.cuda.device_count()} CUDA devices"
            )
    if width % heads != 0:
        raise CommandError(f"--width is {width}; a multiple of --heads, {heads}, is required")
    if compiled:
        check_compiler(parsed.type)


def _check_writable(output: Path, checkpoint: Path | None) -> None:
    """Finds out before the training, not after it."""
    folders = [output] if checkpoint is None else [output, checkpoint.parent]
    with refusing("cannot write to"):
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".{os.getpid()}.probe"
            probe.touch()
            probe.unlink()
    if checkpoint is not None and checkpoint.is_dir():
        raise CommandError(f"cannot write {checkpoint}: it is a folder")
