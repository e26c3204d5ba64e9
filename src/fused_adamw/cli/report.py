"""What a run leaves behind: a table, a plot of the loss curves, and the figures as JSON."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from rich.table import Table

import fused_adamw
from fused_adamw.cli.training import Progress, Training

OURS = "fused_adamw.AdamW"
TORCHS = "torch.optim.AdamW(fused=True)"


def figures(ours: Training, theirs: Training | None) -> dict[str, Any]:
    """The figures of one training, or of both."""
    found: dict[str, Any] = {
        "versions": {
            "fused_adamw": fused_adamw.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": _device_name(ours.device),
        "threads": torch.get_num_threads(),
        "instruction_set": fused_adamw.cpu_capability(),
        "settings": asdict(ours.settings),
        "parameters": ours.parameter_count,
        "optimizers": {OURS: _figures_of(ours.progress)},
    }
    if theirs is not None:
        found["optimizers"][TORCHS] = _figures_of(theirs.progress)
        found["largest_parameter_difference"] = largest_difference(ours, theirs)
    return found


def largest_difference(ours: Training, theirs: Training) -> float:
    """The largest difference between the parameters of two trainings."""
    pairs = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def table(found: dict[str, Any]) -> Table:
    """The figures for a terminal."""
    result = Table(title=f"{found['settings']['steps']} steps, {found['parameters']:,} parameters")
    result.add_column("")
    for name in found["optimizers"]:
        result.add_column(name, justify="right")
    rows = {
        "training loss (nats per byte)": ("training_loss", "{:.6f}"),
        "held-out loss before": ("held_out_loss_before", "{:.6f}"),
        "held-out loss after": ("held_out_loss", "{:.6f}"),
        "time in the optimizer (s)": ("optimizer_seconds", "{:.3f}"),
        "per step, median (ms)": ("optimizer_step_median_ms", "{:.3f}"),
    }
    for label, (key, form) in rows.items():
        result.add_row(label, *(form.format(run[key]) for run in found["optimizers"].values()))
    if "largest_parameter_difference" in found:
        result.caption = f"largest parameter difference {found['largest_parameter_difference']:.3g}"
    return result


def write(directory: Path, found: dict[str, Any]) -> tuple[Path, Path]:
    """Writes figures.json and loss.png; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    json_path, plot_path = directory / "figures.json", directory / "loss.png"
    json_path.write_text(json.dumps(found, indent=2) + "\n")
    _plot(found, plot_path)
    return json_path, plot_path


def _figures_of(progress: Progress) -> dict[str, Any]:
    return {
        "training_loss": progress.losses[-1],
        "held_out_loss_before": progress.held_out[0][1],
        "held_out_loss": progress.held_out[-1][1],
        "optimizer_seconds": sum(progress.optimizer_seconds),
        "optimizer_step_median_ms": 1e3 * progress.optimizer_median,
        "losses": progress.losses,
        "held_out": progress.held_out,
    }


def _plot(found: dict[str, Any], path: Path) -> None:
    # No pyplot: nothing global is touched and no display is looked for.
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    # The curves lie on each other where all is well, so the second is dashed.
    for (name, run), style, marker in zip(found["optimizers"].items(), ("-", "--"), ("o", "x"), strict=False):
        steps = range(1, len(run["losses"]) + 1)
        (line,) = axes.plot(steps, run["losses"], style, linewidth=1.2, label=f"{name}, training")
        axes.plot(
            *zip(*run["held_out"], strict=True),
            marker,
            color=line.get_color(),
            label=f"{name}, held out",
        )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A byte-level GPT, same seed, same batches")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, metadata={"Software": f"matplotlib {matplotlib.__version__}"})


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
