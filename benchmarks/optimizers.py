"""What the optimizer benchmarks share: the workloads, and a table of contenders beside torch's best path."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from measure import alternate, conditions, memory_bytes_per_second, write_json

Step = Callable[[], object]
Params = list[torch.nn.Parameter]


class Workload(NamedTuple):
    """Tensors of these sizes; ``rounds`` rounds of ``calls`` timed calls for each contender."""

    name: str
    sizes: list[int]
    rounds: int
    calls: int


WORKLOADS = (
    Workload("one tensor of 64M", [1 << 26], rounds=6, calls=5),
    Workload("400 small tensors (821 k)", [2052] * 400, rounds=20, calls=10),
    Workload("400 tiny tensors (3 k)", [8] * 400, rounds=20, calls=10),
)


def parameters(sizes: Sequence[int]) -> Params:
    """Parameters with gradients, the same ones for each call."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for size in sizes:
        param = torch.nn.Parameter(torch.randn(size, generator=generator))
        param.grad = torch.randn(size, generator=generator)
        params.append(param)
    return params


def compare(description: str, cases: dict[str, dict[str, Callable[[Params], Step]]]) -> None:
    """Times each case's contenders on each workload and prints a table, or writes it with ``--output``.

    A case maps the names of contenders to what makes a step of parameters; the last contender is torch's best
    path, beside which the others are set. A result that differs from the last one's voids the timing.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    output = parser.parse_args().output

    rate = memory_bytes_per_second()
    table = Table(title=description.splitlines()[0], caption=f"memory ceiling {rate / 1e9:.1f} GB/s")
    for column in ("work", "optimizer", "median", "least", "most", "bytes per parameter", "speed-up"):
        table.add_column(column, justify="left" if column in ("work", "optimizer") else "right")
    figures: dict[str, object] = {"memory_bytes_per_second": rate}
    for workload in WORKLOADS:
        for case, makers in cases.items():
            params = {name: parameters(workload.sizes) for name in makers}
            steps = {name: make(params[name]) for name, make in makers.items()}
            timings = alternate(steps, rounds=workload.rounds, calls=workload.calls)
            reference = list(makers)[-1]
            for name in makers:
                for ours, theirs in zip(params[name], params[reference], strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            work = f"{workload.name}, {case}"
            figures[work] = {name: asdict(timing) for name, timing in timings.items()}
            for name, timing in timings.items():
                table.add_row(
                    work,
                    name,
                    *(f"{seconds * 1e6:,.0f} us" for seconds in (timing.median, timing.least, timing.most)),
                    f"{timing.median / sum(workload.sizes) * rate:.1f}",
                    f"{timings[reference].median / timing.median:.2f}",
                )
            table.add_section()
    console = Console(width=150)
    console.print(conditions())
    console.print(table)
    if output is not None:
        write_json(output, {"conditions": conditions(), **figures})
