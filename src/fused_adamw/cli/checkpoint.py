"""Checkpoints: a run goes on from one as if it had not stopped, to the bit."""

from __future__ import annotations

import os
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import fused_adamw
from fused_adamw.cli.errors import CommandError
from fused_adamw.cli.training import Progress, Settings, Training


def save(training: Training, path: Path) -> None:
    """Writes a checkpoint; one that is there is replaced whole or not at all.

    Raises:
        CommandError: It cannot be written.
    """
    contents = {
        "settings": asdict(training.settings),
        "environment": _environment(),
        "progress": asdict(training.progress),
        **training.state_dict(),
    }
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.save(contents, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
        raise CommandError(f"cannot write {path}: {_reason(error)}") from None


def restore(training: Training, path: Path) -> str | None:
    """Lets a training go on from a checkpoint made under the same settings.

    All settings must agree, the number of steps too: the learning rates depend on it, so that a run of 100
    steps is not the first part of one of 200.

    Returns:
        What differs that could change the last bits of the results, in one sentence, if anything.

    Raises:
        CommandError: There is no checkpoint that this training could go on from.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise CommandError(f"cannot read {path}: {_reason(error)}") from None
    with file:
        try:
            contents = torch.load(file, map_location=training.device, weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, OSError):
            raise _no_checkpoint(path) from None
    if not isinstance(contents, dict):
        raise _no_checkpoint(path)
    try:
        settings, environment = dict(contents["settings"]), dict(contents["environment"])
        progress = Progress(**contents["progress"])
    except (KeyError, TypeError, ValueError):
        raise _no_checkpoint(path) from None
    _check_settings(path, settings, training.settings)
    try:
        training.load_state_dict(contents, progress)
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise _no_checkpoint(path) from None
    here = _environment()
    changes = [
        f"{name} {environment.get(name)} (here {value})"
        for name, value in here.items()
        if environment.get(name) != value
    ]
    return f"{path} was made with {', '.join(changes)}: the last bits may differ" if changes else None


def _check_settings(path: Path, found: dict[str, Any], required: Settings) -> None:
    for name, value in asdict(required).items():
        if found.get(name) == value:
            continue
        if name == "data":
            raise CommandError(f"{path} was made on another text; the same --data is required")
        raise CommandError(
            f"{path} was made with {_as_option(name, found.get(name))}, and this run has "
            f"{_as_option(name, value)}; the same is required"
        )


def _as_option(name: str, value: object) -> str:
    """A setting as it is given on the command line."""
    option = name.replace("_", "-")
    if value is None:
        return f"no --{option}"
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {value}"


def _environment() -> dict[str, str]:
    """What besides the settings decides on the last bits of a matrix product."""
    return {
        "torch": str(torch.__version__),  # a TorchVersion is more than weights_only loads
        "fused_adamw": fused_adamw.__version__,
        "threads": str(torch.get_num_threads()),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _no_checkpoint(path: Path) -> CommandError:
    return CommandError(f"{path} is no checkpoint of this command")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
