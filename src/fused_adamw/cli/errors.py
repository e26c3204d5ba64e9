"""How a command ends when it cannot do what was asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class CommandError(Exception):
    """What is wrong, in one sentence for the user; the command prints it and exits with code 2."""


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turns an OSError inside into a CommandError: ``what`` ("cannot write", say), the file, the reason."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{what} {error.filename}: {error.strerror}") from None
