"""The commands."""

from __future__ import annotations

from typing import Annotated

import typer

import fused_adamw
from fused_adamw.cli.bench import bench
from fused_adamw.cli.info import info
from fused_adamw.cli.train import TrainCommand, train
from fused_adamw.cli.verify import verify

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command(cls=TrainCommand)(train)
app.command()(info)
app.command()(verify)
app.command()(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fused_adamw {fused_adamw.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """AdamW and AMSGrad as one kernel: see what it does on your machine."""
