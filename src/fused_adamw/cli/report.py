"""What a run leaves behind: a table, a plot of the loss curves, and the figures as JSON."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

import fused_adamw
from fused_adamw.cli.errors import refusing
from fused_adamw.cli.training import UNTIMED_STEPS, Training

OURS = "fused_adamw.AdamW"
TORCHS = "torch.optim.AdamW"


def figures(ours: Training, theirs: Training | None) -> dict[str, Any]:
    """The figures of one training, or of both; what is not finite is None, for JSON has no NaN."""
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
        "optimizers": {OURS: _figures_of(ours)},
    }
    if theirs is not None:
        found["optimizers"][TORCHS] = _figures_of(theirs)
        params, other_params = (training.model.parameters() for training in (ours, theirs))
        found["largest_parameter_difference"] = _finite(largest_difference(params, other_params))
        if ours.settings.dtype != "float32":
            difference = largest_difference(ours.weights(), theirs.weights())
            found["largest_master_weight_difference"] = _finite(difference)
    return found


def largest_difference(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The largest difference between the tensors of two trainings; NaN if any is NaN."""
    pairs = zip(ours, theirs, strict=True)
    return torch.stack([(a.detach().float() - b.detach().float()).abs().max() for a, b in pairs]).max().item()


def table(found: dict[str, Any]) -> Table:
    """The figures for a terminal."""
    settings = found["settings"]
    result = Table(
        title=f"{settings['steps']} steps, {_parameters(found)}, {found['device']}",
        caption_justify="left",
    )
    result.add_column("")
    for name in found["optimizers"]:
        result.add_column(name, justify="right")
    rows = {
        "last training loss": ("training_loss", "{:.6f}"),
        "held-out loss before": ("held_out_loss_before", "{:.6f}"),
        "held-out loss after": ("held_out_loss", "{:.6f}"),
        "skipped steps": ("skipped_steps", "{}"),
        "optimizer, all timed steps (s)": ("optimizer_seconds", "{:.3f}"),
        "number of timed steps": ("optimizer_timed_steps", "{}"),
        "median optimizer step (ms)": ("optimizer_step_median_ms", "{:.3f}"),
    }
    for label, (key, form) in rows.items():
        values = [run[key] for run in found["optimizers"].values()]
        result.add_row(label, *("-" if value is None else form.format(value) for value in values))
    caption = [f"Losses in nats per byte. Not timed: the first {UNTIMED_STEPS} steps of a process."]
    if "largest_parameter_difference" in found:
        shown = _difference(found["largest_parameter_difference"])
        caption.insert(0, f"Largest parameter difference: {shown}.")
        way = "with fused=True"
        if "largest_master_weight_difference" in found:
            shown = _difference(found["largest_master_weight_difference"])
            caption.insert(1, f"Largest difference of float32 master weights: {shown}.")
            way += ", on float32 copies of the parameters"
        caption.append(f"{TORCHS} runs {way}.")
    result.caption = "\n".join(caption)
    return result


def write(directory: Path, found: dict[str, Any]) -> tuple[Path, Path]:
    """Writes figures.json and loss.png; returns their paths.

    Raises:
        CommandError: They cannot be written.
    """
    json_path, plot_path = directory / "figures.json", directory / "loss.png"
    with refusing("cannot write"):
        json_path.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
        _plot(found, plot_path)
    return json_path, plot_path


def _figures_of(training: Training) -> dict[str, Any]:
    progress = training.progress
    seconds = progress.optimizer_seconds
    held_out = [(step, _finite(loss)) for step, loss in progress.held_out]
    losses = [_finite(loss) for loss in progress.losses]
    return {
        "training_loss": losses[-1],
        "held_out_loss_before": held_out[0][1],
        "held_out_loss": held_out[-1][1],
        "skipped_steps": training.skipped_steps,
        "optimizer_seconds": sum(seconds) if seconds else None,
        "optimizer_timed_steps": len(seconds),
        "optimizer_step_median_ms": 1e3 * statistics.median(seconds) if seconds else None,
        "losses": losses,
        "held_out": held_out,
    }


def _parameters(found: dict[str, Any]) -> str:
    return f"{found['parameters']:,} {found['settings']['dtype']} parameters"


def _difference(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plot(found: dict[str, Any], path: Path) -> None:
    # No pyplot: nothing global is touched and no display is looked for.
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    # The curves lie on each other where all is well: the second is dashed, its marks fit into the first's.
    styles = (("tab:blue", "-", 2.0, "o", 8), ("tab:orange", "--", 1.2, "x", 6))
    runs = found["optimizers"].items()
    for (name, run), (color, line, width, marker, size) in zip(runs, styles, strict=False):
        losses = [math.nan if loss is None else loss for loss in run["losses"]]
        axes.plot(
            range(1, len(losses) + 1), losses, line, color=color, linewidth=width, label=f"{name}, training"
        )
        steps, held_out = zip(*run["held_out"], strict=True)
        held_out = tuple(math.nan if loss is None else loss for loss in held_out)
        axes.plot(
            steps,
            held_out,
            marker,
            color=color,
            markersize=size,
            markerfacecolor="none",
            markeredgewidth=1.5,
            label=f"{name}, held out",
        )
    seed = found["settings"]["seed"]
    axes.set(
        xlabel="optimizer step",
        ylabel="loss (nats per byte)",
        title=f"Byte-level GPT, {_parameters(found)}, seed {seed}, same batches",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, metadata={"Software": f"matplotlib {matplotlib.__version__}"})


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
