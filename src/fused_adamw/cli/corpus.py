"""The text to train on, as bytes, and batches of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from fused_adamw.cli.errors import CommandError

HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class Corpus:
    """Bytes as token ids (int64, 0 to 255), the last tenth held out from training."""

    training: Tensor
    held_out: Tensor

    @classmethod
    def load(cls, paths: Sequence[Path], context: int) -> Corpus:
        """The text of the files in order, or of Python's help topics where there are none.

        Raises:
            CommandError: A file cannot be read, or there is too little text for one window of ``context``.
        """
        data = _read(paths) if paths else "\n".join(topics[name] for name in sorted(topics)).encode()
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(torch.int64) if data else None
        cut = len(data) - int(len(data) * HELD_OUT_SHARE)
        if tokens is None or len(data) - cut < context + 2:
            needed = int((context + 2) / HELD_OUT_SHARE) + 1
            raise CommandError(
                f"the text has {len(data)} bytes; windows of {context} bytes need {needed} at least"
            )
        return cls(tokens[:cut], tokens[cut:])

    def training_batch(self, seed: int, step: int, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of step ``step``, shape (batch_size, context).

        They depend on nothing but the arguments, so that a resumed run needs no replay.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.training) - context, (batch_size,), generator=generator)
        return _windows(self.training, starts, context)

    def held_out_batch(self, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets spread evenly over the text that is held out; always the same."""
        last = len(self.held_out) - context - 1
        starts = torch.linspace(0, last, batch_size).long()
        return _windows(self.held_out, starts, context)


def _read(paths: Sequence[Path]) -> bytes:
    try:
        return b"\n".join(path.read_bytes() for path in paths)
    except OSError as error:
        raise CommandError(f"cannot read {error.filename}: {error.strerror}") from None


def _windows(tokens: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    positions = starts[:, None] + torch.arange(context)
    return tokens[positions], tokens[positions + 1]
