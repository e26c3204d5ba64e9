"""``fused-adamw bench``: a step beside those of torch, in bytes per parameter."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

from fused_adamw.cli import bench_report, bench_run, terminal
from fused_adamw.cli.contenders import OURS, Case
from fused_adamw.cli.dtypes import METAVAR, dtype_name, dtype_of
from fused_adamw.cli.errors import CommandError
from fused_adamw.cli.models import MODELS, Shapes
from fused_adamw.cli.session import quiet_dynamo
from fused_adamw.cli.suites.cuda import missing_card
from fused_adamw.cli.verify import CompilerChoice

EXIT_WRONG, EXIT_BLOCKED, EXIT_INTERRUPTED = 1, 2, 130


class ModelChoice(str, Enum):
    """Whose tensors."""

    GPT2 = "gpt2"
    LLAMA_1B = "llama-1b"
    RESNET50 = "resnet50"
    SMALL = "small"


class ModeChoice(str, Enum):
    """How a step is called."""

    EAGER = "eager"
    GRAPH = "graph"
    COMPILE = "compile"


class DeviceChoice(str, Enum):
    """Where."""

    CPU = "cpu"
    CUDA = "cuda"


def bench(
    model: Annotated[
        ModelChoice | None, typer.Option(help="Whose tensors to update; small: 400 of 2052 elements.")
    ] = None,
    elements: Annotated[
        int | None, typer.Option(min=1, help="One tensor of so many elements, in place of a model's.")
    ] = None,
    params: Annotated[
        str, typer.Option(parser=dtype_name, metavar=METAVAR, help="The dtype of the parameters.")
    ] = "float32",
    dtype: Annotated[
        str | None,
        typer.Option(
            parser=dtype_name, metavar=METAVAR, help="Of the gradients; that of the parameters if not given."
        ),
    ] = None,
    amsgrad: Annotated[bool, typer.Option("--amsgrad", help="AMSGrad.")] = False,
    clip: Annotated[bool, typer.Option("--clip", help="Clip the gradients, too.")] = False,
    compiler: Annotated[
        CompilerChoice, typer.Option(help="Whose CUDA kernels: NVRTC's, Triton's (ptx), or both.")
    ] = CompilerChoice.BOTH,
    mode: Annotated[
        ModeChoice, typer.Option(help="Eager steps, replays of a CUDA graph, or torch.compile.")
    ] = ModeChoice.EAGER,
    device: Annotated[
        DeviceChoice | None, typer.Option(help="cpu or cuda; a CUDA device where there is one.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for bench.json and bench.png.")] = Path(
        "fused-adamw-bench"
    ),
) -> None:
    """Time a step beside those of torch, from the same state, in turns, and compare all results.

    Bytes per parameter are the time per parameter at the rate of memory in the same run. A wrong result voids
    a timing. What cannot run is listed as blocked, with the reason.

    Parameters of 16 bits have float32 master weights, in each form that fused_adamw.AdamW has, and as copies
    that torch.optim.AdamW updates; these are what is compared.

    Ends with 0 where fused_adamw was measured, 1 where a result was wrong or fused_adamw failed, 2 where it
    could not run here.
    """
    console = terminal.console()
    kind = (device.value if device else None) or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        shapes = _shapes(model, elements)
        case = Case(
            _device(kind),
            shapes.sizes,
            dtype_of(dtype or params),
            amsgrad,
            clip,
            mode.value,
            dtype_of(params),
        )
        reason = missing_card() if kind == "cuda" else None
        if mode is ModeChoice.GRAPH and kind == "cpu":
            reason = "CUDA graphs need a CUDA device"
        if reason is not None:
            measured = bench_run.blocked(case, compiler.compilers, reason)
        else:
            with quiet_dynamo(), console.status("...") as status:
                # The spinner turns in a thread, which would take its share of what is timed.
                measured = bench_run.measure(case, compiler.compilers, status.update, status.stop)
        command = ["fused-adamw", *sys.argv[1:]]
        found = bench_report.figures(case, shapes.title, shapes.source, measured, command)
        paths = bench_report.write(output, found)
    except CommandError as error:
        typer.echo(f"fused-adamw bench: {error}", err=True)
        raise typer.Exit(EXIT_BLOCKED) from None
    except KeyboardInterrupt:
        typer.echo("fused-adamw bench: interrupted; nothing was written", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if measured.rate is not None:
        console.print(bench_report.table(found))
    for line in bench_report.left_out(found):
        console.print(line, soft_wrap=True)
    console.print(f"figures in {', plot in '.join(map(os.fspath, paths))}", soft_wrap=True)
    raise typer.Exit(exit_code(measured))


def exit_code(measured: bench_run.Measured) -> int:
    """0: measured. 1: a result was wrong, or ours failed. 2: ours could not run."""
    ours = [row for row in measured.rows if row.name.startswith(OURS)]
    if any(row.outcome == bench_run.VOID for row in measured.rows):
        return EXIT_WRONG
    if any(row.outcome == bench_run.FAILED for row in ours):
        return EXIT_WRONG
    return 0 if all(row.outcome == bench_run.MEASURED for row in ours) else EXIT_BLOCKED


def _device(kind: str) -> torch.device:
    available = kind == "cuda" and torch.cuda.is_available()
    return torch.device(kind, torch.cuda.current_device()) if available else torch.device(kind)


def _shapes(model: ModelChoice | None, elements: int | None) -> Shapes:
    if elements is None:
        return MODELS[(model or ModelChoice.SMALL).value]()
    if model is not None:
        raise CommandError("--elements takes the place of --model; give one of them")
    return Shapes(f"one tensor of {elements:,}", "--elements", (elements,))
