"""Master weights of 16-bit parameters outside of the kernels, and the seeds of stochastic rounding.

The representations are those of ``csrc/low_precision.h``.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 2**64 - 1


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 master weight as a bfloat16 tensor and int16 remainders; exact, but for the bits of a NaN."""
    # Of all NaNs the one whose upper half is a NaN when it is rounded, too.
    bits = torch.where(master.isnan(), torch.nan, master).view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return _low_16_bits(upper).view(torch.bfloat16), _low_16_bits(bits)


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """The master weight that ``split_master`` took apart; the parameter, where they make no number."""
    upper = param.view(torch.int16).to(torch.int32) << 16
    master = (upper + remainder.to(torch.int32)).view(torch.float32)
    return torch.where(master.isnan(), param.to(torch.float32), master)


def nearest_to_even(param: Tensor, master: Tensor) -> Tensor:
    """The parameter, rounded as a float32 master weight is from now on: to the nearest number.

    Where it is a neighbour of the master weight (rounded by chance, say), the nearest one; where it is not,
    it was written to by someone else, and stands.
    """
    return _nearest_of_neighbours(param, master, master.to(param.dtype))


def nearest_to_split(param: Tensor, master: Tensor) -> Tensor:
    """The same for a bfloat16 parameter beside a remainder: of two nearest numbers, the greater one."""
    return _nearest_of_neighbours(param, master, split_master(master)[0])


def _nearest_of_neighbours(param: Tensor, master: Tensor, nearest: Tensor) -> Tensor:
    next_to_it = (param.view(torch.int16).int() - nearest.view(torch.int16).int()).abs() <= 1
    above, nearest_above = (number.double() - master.double() for number in (param, nearest))
    return torch.where(next_to_it & (above * nearest_above <= 0.0), nearest, param)


def remainder_of(param: Tensor, master: Tensor) -> Tensor:
    """The remainder of a master weight beside ``nearest_to_split``; 0 where that is not its rounding."""
    nearest, remainder = split_master(master)
    return torch.where(nearest.view(torch.int16) == param.view(torch.int16), remainder, 0)


def tensor_seed(seed: int, index: int) -> int:
    """The seed of a tensor, a signed 64-bit number, from an optimizer's seed and the tensor's place in it.

    Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014): SplitMix64, whose outputs
    differ for all indices of one seed.
    """
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _low_16_bits(bits: Tensor) -> Tensor:
    """int32 to int16, keeping the low bits, without a conversion that is out of range."""
    low = bits & 0xFFFF
    return torch.where(low >= 0x8000, low - 0x10000, low).to(torch.int16)
