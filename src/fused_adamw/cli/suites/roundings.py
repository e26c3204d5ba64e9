"""Roundings of float32 to 16 bits, by torch and in float64 NumPy: independent of every kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_adamw.cli.suites.check import require, same_bits
from fused_adamw.cli.suites.training import Form, wide_values

# float64 or uint32 of any shape
Array = Any

# Of the numbers of 16 bits: the bits behind the leading one, the least exponent of a normal number.
_FORMATS = {torch.bfloat16: (7, -126), torch.float16: (10, -14)}

# What lies between two neighbours of bfloat16: its ends, its middle, and what is next to these.
_LOWER_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def weights() -> Tensor:
    """All bfloat16 numbers, the ties between them and what is beside a tie or a number; any float32 numbers.

    A NaN is the one that kernels write.
    """
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    near = torch.cat([upper | lower for lower in _LOWER_HALVES]).view(torch.float32)
    # Of float16 the ties are elsewhere: in the middle of 13 bits.
    half = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    ties = half.view(torch.int32) + 0x1000
    found = torch.cat([near, half, *((ties + shift).view(torch.float32) for shift in (-1, 0, 1))])
    found = torch.cat([found, subnormal_ties(), wide_values(50_001, 0)])
    return torch.where(found.isnan(), torch.nan, found)


def subnormal_ties() -> Tensor:
    """What lies between the subnormal numbers of float16, and beside that."""
    middles = ((torch.arange(1024, dtype=torch.float64) + 0.5) * 2.0**-24).float()
    return torch.cat([(middles.view(torch.int32) + shift).view(torch.float32) for shift in (-1, 0, 1)])


def nearest(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest number, of two the even one, as torch has it; its NaN are of several kinds."""
    return torch.where(weights.isnan(), torch.tensor(torch.nan, dtype=dtype), weights.to(dtype))


def away_from_ties(weights: Tensor) -> Tensor:
    """The nearest bfloat16, of two that of greater magnitude."""
    bits = weights.view(torch.int32)
    greater = ((bits >> 16) + 1).to(torch.int16).view(torch.bfloat16)
    return torch.where((bits & 0xFFFF) == 0x8000, greater, nearest(weights, torch.bfloat16))


def check_param(param: Tensor, weights: Tensor, form: Form, what: str) -> None:
    """Raises ``FailedError`` unless a parameter of this form is a rounding of its master weights."""
    if form.options.get("stochastic_rounding"):
        lower, unit, place = position(weights, form.dtype)
        neighbours = torch.from_numpy(np.stack([lower, np.where(place > 0.0, lower + unit, lower)]))
        # Those beyond the greatest number are infinity.
        right = (neighbours.to(form.dtype) == param.detach().abs()).any(0) & (
            param.signbit() == weights.signbit()
        )
        require(
            bool(right.all()), f"{what}: {int((~right).sum())} elements are no neighbours of their weights"
        )
    elif form.dtype is torch.bfloat16 and form.options.get("split_masters", True):
        same_bits(param, away_from_ties(weights), what)
    else:
        same_bits(param, nearest(weights, form.dtype), what)


def position(weights: Tensor, dtype: torch.dtype) -> tuple[Array, Array, Array]:
    """Finite weights as (magnitude of the neighbour towards 0, distance of the other, place between them)."""
    magnitudes = np.abs(weights.double().numpy())
    digits, least = _FORMATS[dtype]
    # An exponent is of a number in [0.5, 1).
    unit = np.exp2(np.maximum(np.frexp(magnitudes)[1] - 1, least) - float(digits))
    whole = np.floor(magnitudes / unit)
    return whole * unit, unit, magnitudes / unit - whole


def rounded_by_chance(weights: Tensor, random: Array, dtype: torch.dtype) -> Tensor:
    """Finite weights rounded by these random bits, of which as many count as a place has.

    Those are the bits that are lost, or 24 where a float16 becomes subnormal.
    """
    lower, unit, place = position(weights, dtype)
    digits, least = _FORMATS[dtype]
    subnormal = (dtype is torch.float16) & (lower < 2.0**least)
    bits = np.where(subnormal, 24, 23 - digits)
    threshold = (~random >> (32 - bits).astype(np.uint32)) / np.exp2(bits)
    magnitudes = lower + np.where(threshold < place, unit, 0.0)
    return torch.from_numpy(np.copysign(magnitudes, weights.double().numpy())).to(dtype)
