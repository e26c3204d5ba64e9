"""Where the commands write what they found."""

from __future__ import annotations

import os

from rich.console import Console

_PIPED_WIDTH = 130


def console() -> Console:
    """What the commands print to.

    A pipe or a file, which has no width of its own, gets one that the tables fit in, unless ``COLUMNS`` says
    another: rich would take 80 columns and cut figures off.
    """
    found = Console(highlight=False, markup=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = _PIPED_WIDTH
    return found
