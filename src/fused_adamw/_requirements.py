"""What the package needs to be imported, said in one sentence where it is not there."""

from __future__ import annotations

import platform
import re
import sys

MINIMUM_TORCH = (2, 11)


def check_requirements() -> None:
    """Raises ImportError where the platform or torch is not one that the package runs with."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise ImportError(
            f"fused_adamw runs on Linux on x86-64 or AArch64, and this is {system} on {machine}."
        )
    required = ".".join(map(str, MINIMUM_TORCH))
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"fused_adamw needs torch {required} or later, and {sys.executable} has no torch."
        ) from None
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is None or tuple(map(int, found.groups())) < MINIMUM_TORCH:
        raise ImportError(
            f"fused_adamw needs torch {required} or later, and found torch {torch.__version__}."
        )
