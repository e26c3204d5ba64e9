"""How dtypes are named on the command line."""

from __future__ import annotations

import torch
import typer

# Each with its short name.
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
METAVAR = "|".join(DTYPES)


def dtype_name(text: str) -> str:
    """The name of a dtype that was named in full or in short."""
    for name, short in DTYPES.items():
        if text in (name, short):
            return name
    raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, DTYPES))}.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype
