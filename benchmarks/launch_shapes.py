"""How the shapes of the CUDA kernels were chosen: variants of their sources, timed side by side.

    python benchmarks/launch_shapes.py [--output benchmarks/results/launch_shapes-h200.json]

A variant is the source with a constant replaced. Figures are bytes per parameter at the rate of a device copy
in the same run: analyzing must move 4 (2 for bfloat16), a step 28 (26).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import fused_adamw
from cuda_steps import TURNS, WORKLOADS, copy_rate, device_seconds
from fused_adamw import _C, cuda_kernels, nvrtc
from fused_adamw.stats_plan import ROW_ELEMENTS, gradient_rows
from measure import medians, write_json

Replacement = tuple[str, str]

ANALYSES: dict[str, list[Replacement]] = {
    f"{batch} accesses a batch, {blocks} blocks": [
        ("kBatch = 4", f"kBatch = {batch}"),
        ("kAnalysesPerProcessor = 5", f"kAnalysesPerProcessor = {blocks}"),
    ]
    for batch in (2, 4, 8)
    for blocks in (4, 5, 6)
}
_STREAMED_STORES = (
    "*reinterpret_cast<float4*>(target) = make_float4(values[0], values[1], values[2], values[3]);",
    "__stcs(reinterpret_cast<float4*>(target), make_float4(values[0], values[1], values[2], values[3]));",
)
_STREAMED_LOADS = (
    "*reinterpret_cast<const float4*>(source);",
    "__ldcs(reinterpret_cast<const float4*>(source));",
)


_BLOCKS: int = _C.CUDA_LAYOUT["kStepsPerProcessor"]


class StepShape(NamedTuple):
    """Blocks of a step on a multiprocessor, and rounds of each block; then what else is replaced."""

    blocks: int = _BLOCKS
    rounds: int = 1
    replacements: tuple[Replacement, ...] = ()

    def all_replacements(self) -> list[Replacement]:
        """What is replaced in the sources; the rounds are the launcher's."""
        blocks = (f"kStepsPerProcessor = {_BLOCKS};", f"kStepsPerProcessor = {self.blocks};")
        return [blocks, *self.replacements]


STEPS = {
    **{
        f"{blocks} blocks, {rounds} rounds": StepShape(blocks, rounds)
        for blocks in (4, 5, 6)
        for rounds in (1, 2, 4)
    },
    "one counter a tensor": StepShape(replacements=(("kManyBlocks = 64", "kManyBlocks = 0xFFFFFFFEu"),)),
    "16 counters a tensor": StepShape(replacements=(("kWays = 4", "kWays = 16"),)),
    "addresses kept": StepShape(replacements=(('asm volatile("" : "+r"(index) : : "memory");', ""),)),
    "streaming stores": StepShape(replacements=(_STREAMED_STORES,)),
    "streaming loads": StepShape(replacements=(_STREAMED_LOADS,)),
    "streaming stores and loads": StepShape(replacements=(_STREAMED_STORES, _STREAMED_LOADS)),
}


def compiled(
    source: str, replacements: Sequence[Replacement], definitions: tuple[str, ...], rounds: int = 0
) -> _C.CudaModule:
    """The module of a variant; a replacement that finds nothing to replace is an error."""
    text, headers = cuda_kernels.texts(source)
    for old, new in replacements:
        if not any(old in found for found in (text, *headers.values())):
            raise ValueError(f"{source} no longer has {old!r}")
        text = text.replace(old, new)
        headers = {name: found.replace(old, new) for name, found in headers.items()}
    architecture = _C.cuda_compute_capability(0)
    cubin = nvrtc.compile_to_cubin(source, text, headers, architecture, definitions)[0]
    return _C.CudaModule(0, cubin, rounds)


def variants(sizes: Sequence[int], dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Calls of every variant on tensors of these sizes, which all share."""
    lists = [[torch.randn(size, device="cuda") for size in sizes] for _ in range(4)]
    lists[1] = [grad.to(dtype) for grad in lists[1]]
    lists[3] = [exp_avg_sq.square_() for exp_avg_sq in lists[3]]
    steps = [torch.zeros((), device="cuda") for _ in sizes]
    written = [True, False, True, True, True, True]
    table = _C.TensorTable("launch_shapes", [*lists, [], steps], written)
    count = gradient_rows(sizes)
    rows = torch.empty(count, ROW_ELEMENTS, device="cuda")
    grads = _C.TensorTable("launch_shapes", [lists[1], [rows]], [False, True])
    kept = (lists, steps, rows)

    def call(function: Callable[..., object], *arguments: object) -> Callable[[], object]:
        return lambda: (function(*arguments), kept)[0]

    calls: dict[str, Callable[[], object]] = {}
    for name, replacements in ANALYSES.items():
        module = compiled(cuda_kernels.ANALYSIS, replacements, ())
        calls[f"analyze: {name}"] = call(_C.cuda_analyze_gradients, module, grads, 1.0)
    group = _C.CudaGroupSettings(1e-3, 0.9, 0.999, 0.01, 1e-8, False)
    settings = _C.CudaStepSettings(1.0, 0.0, 1.0, None, -1.0, 1e-6)
    variant = cuda_kernels.StepVariant(in_place=True, amsgrad=False, weights="float32")
    for name, shape in STEPS.items():
        module = compiled(cuda_kernels.STEP, shape.all_replacements(), variant.definitions(), shape.rounds)
        calls[f"step: {name}"] = call(_C.cuda_step_in_place, module, [table], [group], settings)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    output = parser.parse_args().output
    rate = copy_rate()
    figures: dict[str, dict[str, float]] = {}
    for work in ("GPT-2 124M", "Llama 1.2B"):
        for dtype in (torch.float32, torch.bfloat16):
            sizes = WORKLOADS[work]
            seconds = medians(variants(sizes, dtype), device_seconds, **TURNS)
            kind = str(dtype).removeprefix("torch.")
            figures[f"{work}, {kind}"] = {k: v / sum(sizes) * rate for k, v in seconds.items()}
            torch.cuda.empty_cache()
    table = Table(title=f"Bytes per parameter, {torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s")
    table.add_column("variant")
    for work in figures:
        table.add_column(work, justify="right")
    for name in next(iter(figures.values())):
        table.add_row(name, *(f"{found[name]:.2f}" for found in figures.values()))
    Console(width=150).print(table)
    if output is not None:
        conditions = {
            "date": date.today().isoformat(),
            "card": torch.cuda.get_device_name(),
            "nvrtc": ".".join(map(str, nvrtc.version())),
            "torch": torch.__version__,
            "fused_adamw": fused_adamw.__version__,
            "copy_bytes_per_second": rate,
        }
        write_json(output, {"conditions": conditions, "bytes_per_parameter": figures})


if __name__ == "__main__":
    main()
