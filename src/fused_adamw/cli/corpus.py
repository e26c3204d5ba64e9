"""The text to train on, as bytes, and batches of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fused_adamw.cli.errors import CommandError

# One byte in so many is held out.
HELD_OUT_PART = 10


@dataclass(frozen=True)
class Corpus:
    """Bytes as token ids (uint8), the last tenth held out from training."""

    training: Tensor
    held_out: Tensor
    digest: str
    """SHA-256 of the text."""

    @classmethod
    def load(cls, paths: Sequence[Path], context: int) -> Corpus:
        """The text of the files in order, or of Python's help topics where there are none.

        Raises:
            CommandError: A file cannot be read, or there is too little text for one window of ``context``.
        """
        data = bytearray(_read(paths) if paths else _help_topics())
        cut = len(data) - len(data) // HELD_OUT_PART
        if len(data) - cut < context + 1:  # a window and the byte after it
            needed = HELD_OUT_PART * (context + 1)
            raise CommandError(
                f"the text has {len(data)} bytes; windows of {context} bytes need {needed} at least"
            )
        tokens = torch.frombuffer(data, dtype=torch.uint8)
        return cls(tokens[:cut], tokens[cut:], hashlib.sha256(data).hexdigest())

    def training_batch(self, seed: int, step: int, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of step ``step``, int64 of shape (batch_size, context).

        They depend on nothing but the arguments, so that a resumed run needs no replay.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.training) - context, (batch_size,), generator=generator)
        return _windows(self.training, starts, context)

    def held_out_batch(self, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets spread evenly over the text that is held out; always the same."""
        last = len(self.held_out) - context - 1
        starts = torch.arange(batch_size) * last // max(1, batch_size - 1)
        return _windows(self.held_out, starts, context)


def _read(paths: Sequence[Path]) -> bytes:
    try:
        return b"\n".join(path.read_bytes() for path in paths)
    except OSError as error:
        raise CommandError(f"cannot read {error.filename}: {error.strerror}") from None


def _help_topics() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        raise CommandError("this Python carries no help topics; give a text with --data") from None
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _windows(tokens: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = tokens[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
