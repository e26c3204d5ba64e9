"""``fused-adamw verify``: what this installation promises, checked on this machine."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

import fused_adamw
from fused_adamw import _C, cuda_kernels, torch_library
from fused_adamw.cli import info, runner, terminal
from fused_adamw.cli.errors import CommandError, refusing
from fused_adamw.cli.session import interrupts
from fused_adamw.cli.suites import SUITES

EXIT_CODES = {runner.PASSED: 0, runner.FAILED: 1, runner.BLOCKED: 2, runner.INTERRUPTED: 130}
STYLES = {runner.PASSED: "green", runner.FAILED: "bold red", runner.BLOCKED: "yellow"}


class SuiteChoice(str, Enum):
    """A suite, or all."""

    ORACLE = "oracle"
    REFERENCE = "reference"
    HOST = "host"
    BUILD = "build"
    CUDA = "cuda"
    GRAPH = "graph"
    ALL = "all"


class CompilerChoice(str, Enum):
    """A CUDA compiler, or both."""

    NVRTC = "nvrtc"
    PTX = "ptx"
    BOTH = "both"

    @property
    def compilers(self) -> tuple[str, ...]:
        """Their names."""
        return cuda_kernels.COMPILERS if self is CompilerChoice.BOTH else (self.value,)


def verify(
    suite: Annotated[SuiteChoice, typer.Option(help="What to check.")] = SuiteChoice.ALL,
    compiler: Annotated[
        CompilerChoice, typer.Option(help="Whose CUDA kernels: NVRTC's, Triton's (ptx), or both.")
    ] = CompilerChoice.BOTH,
    report: Annotated[Path, typer.Option(help="Folder for verify.json.")] = Path("fused-adamw-verify"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the checks and make none.")] = False,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a check may take.")] = 300.0,
) -> None:
    """Check what this installation promises, on this machine.

    Suites: oracle (the formula that errors are measured by, beside torch), reference (the C++ headers in a
    program without torch), host (the CPU kernels beside torch), build (all CUDA kernels compiled; needs no
    card), cuda (the CUDA kernels beside the CPU's), graph (compiled steps and CUDA graphs beside eager ones).

    Ends with 0 where all passed, 1 where any failed, 2 where none failed but some could not be made for want
    of a compiler or a card, 130 after Ctrl-C.
    """
    console = terminal.console()
    names = list(SUITES) if suite is SuiteChoice.ALL else [suite.value]
    results = [runner.planned(SUITES[name], compiler.compilers) for name in names]
    if dry_run:
        for result in results:
            console.print(listing(result), soft_wrap=True)
        return
    command = ["fused-adamw", *sys.argv[1:]]
    started, start = datetime.now(timezone.utc), time.perf_counter()
    try:
        with refusing("cannot write to"):
            report.mkdir(parents=True, exist_ok=True)
        path = report / "verify.json"
        with interrupts() as interrupted:
            for result in results:
                with console.status(f"{result.suite.name} ...") as status:
                    runner.run_suite(
                        result,
                        compiler.compilers,
                        timeout,
                        interrupted,
                        lambda check, name=result.suite.name: status.update(f"{name}: {check.name}, done"),  # type: ignore[misc]
                    )
                if interrupted:
                    break
                console.print(f"{result.suite.name}: {_summary(result)}")
        outcome = runner.worst([result.outcome for result in results])
        found = {
            "outcome": outcome,
            "command": command,
            "started": started.isoformat(timespec="seconds"),
            "seconds": time.perf_counter() - start,
            "timeout_seconds": timeout,
            "compilers": list(compiler.compilers),
            "machine": info.gather(),
            "sources": sources(),
            "suites": [result.to_json() for result in results],
        }
        with refusing("cannot write"):
            path.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    except CommandError as error:
        typer.echo(f"fused-adamw verify: {error}", err=True)
        raise typer.Exit(EXIT_CODES[runner.BLOCKED]) from None
    console.print(table(results))
    for result in results:
        console.print(f"{result.suite.name}: {result.suite.proves} Left open: {result.suite.leaves_open}")
    console.print(f"{outcome}; report in {path}", soft_wrap=True)
    raise typer.Exit(EXIT_CODES[outcome])


def listing(result: runner.SuiteResult) -> str:
    """A suite and the names of its checks."""
    head = f"{result.suite.name}: {result.suite.proves}\n  Left open: {result.suite.leaves_open}"
    return "\n".join([head, *(f"  - {check.name}" for check in result.checks)])


def table(results: list[runner.SuiteResult]) -> Table:
    """A row for each check, or for several that lack the same."""
    found = Table(show_lines=False)
    for column in ("suite", "check", "outcome"):
        found.add_column(column)
    found.add_column("s", justify="right")
    found.add_column("seen, or missing", ratio=1)
    for result in results:
        for (outcome, _), checks in itertools.groupby(result.checks, _alike):
            rows = list(checks)
            # What lacks the same card is one row; the report has all.
            name = f"{len(rows)} checks" if len(rows) > 1 else rows[0].name
            found.add_row(
                result.suite.name,
                Text(name),
                Text(outcome, style=STYLES.get(outcome, "")),
                f"{sum(check.seconds for check in rows):.1f}",
                Text(rows[0].detail),
            )
        found.add_section()
    return found


def _alike(check: runner.CheckResult) -> tuple[str, str]:
    """The same for checks that one row can stand for: those that lack the same."""
    if check.outcome in (runner.BLOCKED, runner.NOT_RUN):
        return check.outcome, check.detail
    return check.outcome, check.name


def sources() -> dict[str, str]:
    """SHA-256 of each installed source, and of the compiled module, by its place in the package."""
    package = Path(fused_adamw.__file__).parent
    library = Path(torch_library.__file__).parent
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    files |= {f"torch_library/{path.name}": path for path in library.glob("*.py")}
    for path in cuda_kernels.SOURCES.rglob("*"):
        if path.is_file():
            files[f"csrc/{path.relative_to(cuda_kernels.SOURCES).as_posix()}"] = path
    files["cli/suites/reference.cpp"] = package / "cli" / "suites" / "reference.cpp"
    files[Path(_C.__file__).name] = Path(_C.__file__)
    return {name: hashlib.sha256(files[name].read_bytes()).hexdigest() for name in sorted(files)}


def _summary(result: runner.SuiteResult) -> str:
    outcomes = [check.outcome for check in result.checks]
    counts = {outcome: outcomes.count(outcome) for outcome in (runner.PASSED, runner.FAILED, runner.BLOCKED)}
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count > 0)
