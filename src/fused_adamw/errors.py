"""The errors that are the package's own; all else that is refused raises built-in exceptions."""

from __future__ import annotations

from collections.abc import Sequence


class NonfiniteGradientError(RuntimeError):
    """Gradients held a NaN or an infinity, and ``nonfinite="error"`` was asked for."""

    @classmethod
    def naming(cls, op: str, names: Sequence[str]) -> NonfiniteGradientError:
        """The error that names the gradients; nothing has been written when it is raised."""
        return cls(f"{op}: NaN or infinity in {', '.join(names)}; nothing was updated")


class StaleMasterError(RuntimeError):
    """16-bit parameters were written to by someone else, and ``stale_master="error"`` was asked for."""

    @classmethod
    def naming(cls, op: str, names: Sequence[str]) -> StaleMasterError:
        """The error that names the parameters; nothing has been written when it is raised."""
        return cls(
            f"{op}: {', '.join(names)} written to since the last step, so that a master weight is no longer "
            "that of its parameter; resync_masters(), set_master_param() or stale_master='resync' is required"
        )


class CompilerError(RuntimeError):
    """A compiler is missing, or refused a kernel; the message holds its log."""
