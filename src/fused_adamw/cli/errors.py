"""How a command ends when it cannot do what was asked."""

from __future__ import annotations


class CommandError(Exception):
    """What is wrong, in one sentence for the user; the command prints it and exits with code 2."""
