"""The command ``fused-adamw``; needs the extra ``cli`` (typer, rich, matplotlib)."""

from __future__ import annotations

import importlib.util
import sys

_NEEDED = ("typer", "rich", "matplotlib")


def main() -> None:
    """Runs the command line."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"fused-adamw: the command line needs {', '.join(missing)}: pip install 'fused_adamw[cli]'")
    from fused_adamw.cli.app import app

    app(prog_name="fused-adamw")
