"""What ``fused-adamw bench`` leaves behind: a table, the figures as JSON, and a plot beside the ideal."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from rich.table import Table

from fused_adamw.cli import info
from fused_adamw.cli.bench_run import MEASURED, Measured
from fused_adamw.cli.contenders import Case
from fused_adamw.cli.errors import refusing


def figures(case: Case, work: str, source: str, measured: Measured, command: list[str]) -> dict[str, Any]:
    """All figures with their conditions."""
    return {
        "date": date.today().isoformat(),
        "command": command,
        "device": _device_name(case.device),
        "machine": info.gather(),
        "work": {
            "name": work,
            "source": source,
            "tensors": len(case.sizes),
            "parameters": case.elements,
            "dtype": str(case.params).removeprefix("torch."),
            "gradients": str(case.dtype).removeprefix("torch."),
            "amsgrad": case.amsgrad,
            "clip": case.clip,
            "mode": case.mode,
        },
        "clock": "CUDA events" if case.mode == "graph" else "host, from idle device to idle device",
        "memory_bytes_per_second": measured.rate,
        "ideal_bytes_per_parameter": case.ideal_bytes,
        "contenders": [asdict(row) for row in measured.rows],
    }


def table(found: dict[str, Any]) -> Table:
    """The figures for a terminal."""
    work, rate = found["work"], found["memory_bytes_per_second"]
    words = [work["name"], *_dtypes(work), work["mode"], found["device"]]
    words += [word for word in ("amsgrad", "clip") if work[word]]
    result = Table(title=", ".join(words))
    # Where it is narrow, names are broken, not figures.
    result.add_column("step", overflow="fold")
    for column in ("median,\nus", "least", "most", "bytes/\nparam", "peak,\nMiB", "kernels"):
        result.add_column(column, justify="right", no_wrap=True)
    for row in found["contenders"]:
        if row["outcome"] != MEASURED:
            continue
        timing = row["timing"]
        result.add_row(
            row["name"],
            *(f"{timing[name] * 1e6:,.1f}" for name in ("median", "least", "most")),
            _shown(row["bytes_per_parameter"], "{:,.1f}"),
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.1f}",
            _shown(row["kernels"], "{}"),
        )
    ideal = found["ideal_bytes_per_parameter"]
    result.caption = f"A step must move {ideal} bytes per parameter." + (
        "" if rate is None else f" Memory in the same run: {rate / 1e9:,.1f} GB/s."
    )
    return result


def left_out(found: dict[str, Any]) -> list[str]:
    """Why contenders have no timing: a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for row in found["contenders"]:
        if row["outcome"] != MEASURED:
            reasons.setdefault(f"{row['outcome']}: {row['detail']}", []).append(row["name"])
    return [f"{'; '.join(names)}: {reason}" for reason, names in reasons.items()]


def write(folder: Path, found: dict[str, Any]) -> list[Path]:
    """Writes bench.json, and bench.png where anything was measured; returns their paths.

    Raises:
        CommandError: They cannot be written.
    """
    paths = [folder / "bench.json"]
    with refusing("cannot write"):
        folder.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
        if any(row["timing"] is not None for row in found["contenders"]):
            paths.append(folder / "bench.png")
            _plot(found, paths[1])
    return paths


def _dtypes(work: dict[str, Any]) -> list[str]:
    return [f"{work['dtype']} parameters", f"{work['gradients']} gradients"]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _plot(found: dict[str, Any], path: Path) -> None:
    """Left what a step costs, right how near it comes to the rate of memory."""
    rows = [row for row in found["contenders"] if row["timing"] is not None]
    names = [row["name"] for row in rows]
    ideal, rate = found["ideal_bytes_per_parameter"], found["memory_bytes_per_second"]
    parameters = found["work"]["parameters"]
    figure = Figure(figsize=(11, 1.8 + 0.45 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colors = ["tab:blue" if name.startswith("fused_adamw") else "tab:gray" for name in names]
    costs = [row["bytes_per_parameter"] for row in rows]
    left.barh(names, costs, color=colors)
    left.axvline(ideal, color="tab:red", linestyle="--", label=f"ideal: {ideal}")
    left.set(xlabel="bytes per parameter, at the rate of memory")
    rates = [ideal * parameters / row["timing"]["median"] / 1e9 for row in rows]
    right.barh(names, rates, color=colors)
    right.axvline(rate / 1e9, color="tab:red", linestyle="--", label=f"memory: {rate / 1e9:,.0f} GB/s")
    right.set(xlabel=f"GB/s, if {ideal} bytes per parameter are moved")
    for axes, values in ((left, costs), (right, rates)):
        for i, value in enumerate(values):
            axes.text(value, i, f" {value:,.1f}", va="center", fontsize=8)
        axes.margins(x=0.15)
        axes.legend(loc="lower right", fontsize=8)
    left.invert_yaxis()
    work = found["work"]
    words = [work["name"], f"{parameters:,} elements", *_dtypes(work), work["mode"]]
    figure.suptitle(", ".join([*words, found["device"]]), fontsize=10)
    figure.savefig(path, dpi=120, metadata={"Software": f"matplotlib {matplotlib.__version__}"})


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "no CUDA device"
    return platform.processor() or platform.machine() or "cpu"
