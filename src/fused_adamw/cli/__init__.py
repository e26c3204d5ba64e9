"""The command ``fused-adamw``; needs the extra ``cli`` (typer, rich, matplotlib)."""

from __future__ import annotations

import importlib.util
import sys

_NEEDED = ("typer", "rich", "matplotlib")


def main() -> None:
    """Runs the command line."""
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        print("fused-adamw needs the 'cli' extra: pip install 'fused_adamw[cli]'", file=sys.stderr)
        sys.exit(2)
    from fused_adamw.cli.app import app

    app(prog_name="fused-adamw")
