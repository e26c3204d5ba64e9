"""The plain and the guarded step on a CUDA device beside torch's best paths, eager and in a CUDA graph.

    python benchmarks/cuda_steps.py [--output benchmarks/results/cuda_steps-h200.json]

Bytes per parameter: the time divided by the number of parameters, times the rate of a device copy in the same
run. A step must move 28 (26 for 16-bit gradients, 36 with AMSGrad), and 4 (2) more where it clips. torch,
which takes no 16-bit gradient of a float32 parameter, copies it to float32 first. Eager times are the host's,
from an idle device to an idle device; in a graph, the device's, which is busy when the graph is launched.

A bfloat16 model has float32 master weights: a step must move 26, or 30 where they are not kept as remainders
of 16 bits, and 2 more where it clips. torch has no master weights: float32 copies of the parameters are what
its optimizer updates; gradients are copied to them, and the new weights back.
"""

from __future__ import annotations

import argparse
import gc
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fused_adamw
from fused_adamw import _C
from fused_adamw.cli.masters import MasterCopies
from fused_adamw.cli.models import gpt2, llama, small
from fused_adamw.cli.timing import device_seconds_of, seconds_of
from measure import medians, write_json

Step = Callable[[], object]
Params = list[torch.nn.Parameter]
DEVICE = "cuda"
MAX_NORM = 1e9  # above the norms here, so that torch works on the same gradients in each call


class Case(NamedTuple):
    """What a step does."""

    clip: bool = False
    amsgrad: bool = False
    dtype: torch.dtype = torch.float32  # of the gradients
    params: torch.dtype = torch.float32

    def __str__(self) -> str:
        narrow = "model" if self.params == torch.bfloat16 else "gradients"
        words = [
            "AMSGrad" if self.amsgrad else "",
            f"bfloat16 {narrow}" if self.dtype == torch.bfloat16 else "",
            "clipped" if self.clip else "",
        ]
        return ", ".join(["", *filter(None, words)])


CASES = (
    Case(),
    Case(clip=True),
    Case(dtype=torch.bfloat16),
    Case(dtype=torch.bfloat16, clip=True),
    Case(amsgrad=True),
    Case(amsgrad=True, clip=True),
    Case(dtype=torch.bfloat16, params=torch.bfloat16),
    Case(dtype=torch.bfloat16, params=torch.bfloat16, clip=True),
)

WORKLOADS = {shapes.title: shapes.sizes for shapes in (gpt2(), llama(), small())}


class Contender(NamedTuple):
    """A step; its parameters, and their float32 weights: themselves, or their master weights."""

    step: Step
    params: Params
    weights: Callable[[], Iterable[Tensor]]


def parameters(sizes: Sequence[int], case: Case) -> Params:
    generator = torch.Generator(DEVICE).manual_seed(0)
    params = []
    for size in sizes:
        param = torch.nn.Parameter(torch.randn(size, device=DEVICE, generator=generator).to(case.params))
        param.grad_dtype = None
        param.grad = torch.randn(size, device=DEVICE, generator=generator).to(case.dtype)
        params.append(param)
    return params


def ours(params: Params, case: Case, **masters: bool) -> Contender:
    max_norm = MAX_NORM if case.clip else None
    optimizer = fused_adamw.AdamW(
        params, max_grad_norm=max_norm, amsgrad=case.amsgrad, capturable=True, **masters
    )
    return Contender(optimizer.step, params, lambda: map(optimizer.master_param, params))


def theirs(params: Params, case: Case) -> Contender:
    optimizer = torch.optim.AdamW(params, fused=True, capturable=True, amsgrad=case.amsgrad)
    narrow = [param.grad for param in params]
    for param in params:
        param.grad = param.grad.float()
    wide = [param.grad for param in params]

    def step() -> None:
        if case.dtype != torch.float32:
            torch._foreach_copy_(wide, narrow)
        if case.clip:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    return Contender(step, params, lambda: params)


def theirs_on_copies(params: Params, case: Case) -> Contender:
    copies = MasterCopies(params)
    optimizer = torch.optim.AdamW(copies.masters, fused=True, capturable=True, amsgrad=case.amsgrad)

    def step() -> None:
        copies.take_gradients(param.grad for param in params)
        if case.clip:
            torch.nn.utils.clip_grad_norm_(copies.masters, MAX_NORM)
        optimizer.step()
        copies.give_weights()

    return Contender(step, params, lambda: copies.masters)


def contenders(sizes: Sequence[int], case: Case) -> dict[str, Contender]:
    if case.params == torch.float32:
        makers = {"fused_adamw": ours, "torch fused": theirs}
    else:
        makers = {
            "fused_adamw": ours,
            "fused_adamw, float32 masters": partial(ours, split_masters=False),
            "fused_adamw, stochastic rounding": partial(ours, stochastic_rounding=True),
            "torch fused": theirs_on_copies,
        }
    return {name: make(parameters(sizes, case), case) for name, make in makers.items()}


def compare(found: Contender, expected: Contender) -> None:
    for mine, other in zip(found.weights(), expected.weights(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    for mine, other in zip(found.params, expected.params, strict=True):
        # What has 8 bits may have been rounded to a neighbour of the other's.
        torch.testing.assert_close(mine, other, rtol=2.0**-7 if mine.element_size() == 2 else 1e-4, atol=1e-4)


def graphed(step: Step) -> Step:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds(call: Step) -> float:
    return seconds_of(call, torch.device(DEVICE))


def device_seconds(call: Step) -> float:
    return device_seconds_of(call, torch.device(DEVICE))


# How often each contender is timed, for ``measure.medians``.
TURNS = {"rounds": 5, "calls": 4}


def copy_rate() -> float:
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    return (
        2 * source.nbytes / medians({"copy": lambda: target.copy_(source)}, device_seconds, **TURNS)["copy"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--only", default="", help="a regular expression that the work must match in full")
    arguments = parser.parse_args()
    output = arguments.output
    copies = [copy_rate()]
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for work, sizes in WORKLOADS.items():
        for case in CASES:
            name = f"{work}{case}"
            if arguments.only and not re.fullmatch(arguments.only, name):
                continue
            racers = contenders(sizes, case)
            eager = medians({contender: racer.step for contender, racer in racers.items()}, seconds, **TURNS)
            graphs = {contender: graphed(racer.step) for contender, racer in racers.items()}
            graph = medians(graphs, device_seconds, **TURNS)
            *others, reference = racers.values()
            for racer in others:
                compare(racer, reference)
            figures[name] = {
                contender: {
                    "parameters": sum(sizes),
                    "eager_seconds": eager[contender],
                    "graph_seconds": graph[contender],
                }
                for contender in racers
            }
            del racers, graphs, others, reference, racer
            gc.collect()
            torch.cuda.empty_cache()
    # The ceiling is the better of two: either alone may have been taken in a slow moment.
    copies.append(copy_rate())
    conditions = {
        "date": date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "driver": _C.cuda_driver_version(),
        "torch": torch.__version__,
        "fused_adamw": fused_adamw.__version__,
        "compiler": fused_adamw.cuda_compiler(),
        "copy_bytes_per_second": max(copies),
    }
    Console(width=130).print(table_of(figures, conditions["card"], max(copies)))
    if output is not None:
        write_json(output, {"conditions": conditions, "figures": figures})


def table_of(figures: dict[str, dict[str, dict[str, float]]], card: str, rate: float) -> Table:
    table = Table(title=f"Steps on {card}, device copy {rate / 1e12:.2f} TB/s")
    for column in ("work", "optimizer", "eager", "graph", "bytes per parameter, eager", "graph"):
        table.add_column(column, justify="left" if column in ("work", "optimizer") else "right")
    for name, contenders in figures.items():
        for contender, found in contenders.items():
            times = (found["eager_seconds"], found["graph_seconds"])
            table.add_row(
                name,
                contender,
                *(f"{value * 1e6:,.1f} us" for value in times),
                *(f"{value / found['parameters'] * rate:.2f}" for value in times),
            )
        table.add_section()
    return table


if __name__ == "__main__":
    main()
