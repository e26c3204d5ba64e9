"""The plain step on the CPU beside torch.optim.AdamW(fused=True), torch's best path there.

    python benchmarks/step.py [--output benchmarks/results/step-cpu.json]

Bytes per parameter: the time divided by the number of parameters, times the rate of an in-place pass over
memory in the same run. A step must move 28 (36 with AMSGrad).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fused_adamw
from measure import Timing, alternate, conditions, memory_bytes_per_second, save

# Name, sizes of the tensors, rounds and calls per round.
WORKLOADS: tuple[tuple[str, list[int], int, int], ...] = (
    ("one tensor of 64M", [1 << 26], 4, 5),
    ("400 small tensors (821 k)", [2052] * 400, 20, 10),
    ("400 tiny tensors (3 k)", [8] * 400, 20, 10),
)


def parameters(sizes: list[int], seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    params = []
    for size in sizes:
        param = torch.nn.Parameter(torch.randn(size, generator=generator))
        param.grad = torch.randn(size, generator=generator)
        params.append(param)
    return params


def contenders(sizes: list[int], amsgrad: bool) -> tuple[dict[str, Callable[[], object]], list[list[Tensor]]]:
    ours, theirs = parameters(sizes, 0), parameters(sizes, 0)
    steps: dict[str, Callable[[], object]] = {
        "fused_adamw": fused_adamw.AdamW(ours, amsgrad=amsgrad).step,
        "torch fused": torch.optim.AdamW(theirs, amsgrad=amsgrad, fused=True).step,
    }
    return steps, [list(ours), list(theirs)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    output = parser.parse_args().output

    rate = memory_bytes_per_second()
    table = Table(title=f"Plain step, memory ceiling {rate / 1e9:.1f} GB/s, {conditions()}")
    for column in ("work", "optimizer", "median", "least", "most", "bytes per parameter", "speed-up"):
        table.add_column(column, justify="left" if column in ("work", "optimizer") else "right")
    figures: dict[str, object] = {"memory_bytes_per_second": rate}
    for name, sizes, rounds, calls in WORKLOADS:
        for amsgrad in (False, True):
            steps, results = contenders(sizes, amsgrad)
            timings: dict[str, Timing] = alternate(steps, rounds=rounds, calls=calls)
            for mine, other in zip(*results, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
            work = name + (", AMSGrad" if amsgrad else "")
            figures[work] = {contender: asdict(timing) for contender, timing in timings.items()}
            for contender, timing in timings.items():
                table.add_row(
                    work,
                    contender,
                    *(f"{seconds * 1e6:,.0f} us" for seconds in (timing.median, timing.least, timing.most)),
                    f"{timing.median / sum(sizes) * rate:.1f}",
                    f"{timings['torch fused'].median / timing.median:.2f}",
                )
    Console(width=160).print(table)
    if output is not None:
        save(output, figures)


if __name__ == "__main__":
    main()
