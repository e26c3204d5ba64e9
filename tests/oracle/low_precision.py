"""Roundings of float32 numbers to 16 bits, written from their definitions, in exact arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)


def philox(seed: int, quads: Words, update: int) -> NDArray[np.uint32]:
    """Philox4x32-10 of the counters (quad, update) under the key ``seed``: four words each, in their order.

    Salmon, Moraes, Dror and Shaw (2011), section 3.3.
    """
    counter = [quads & _LOW, quads >> np.uint64(32)]
    counter += [np.full_like(quads, word) for word in (update & 0xFFFFFFFF, update >> 32)]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)]
    for _ in range(10):
        products = [counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)]
        high, low = [p >> np.uint64(32) for p in products], [p & _LOW for p in products]
        counter = [high[1] ^ counter[1] ^ key[0], low[1], high[0] ^ counter[3] ^ key[1], low[0]]
        key = [(key[0] + np.uint64(0x9E3779B9)) & _LOW, (key[1] + np.uint64(0xBB67AE85)) & _LOW]
    return np.stack(counter, axis=1).reshape(-1).astype(np.uint32)


def random_words(seed: int, size: int, update: int) -> NDArray[np.uint32]:
    """The random bits of the first elements of a tensor."""
    return philox(seed, np.arange(-(-size // 4), dtype=np.uint64), update)[:size]


def nearest(master: Tensor, dtype: torch.dtype) -> Tensor:
    """As torch rounds, with one NaN."""
    rounded = master.to(dtype)
    return torch.where(master.isnan(), torch.tensor(torch.nan, dtype=dtype), rounded)


def neighbours(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers of this dtype next to each finite one, toward 0 and away from it; itself if it is one."""
    near = master.to(dtype)
    too_far = near.double().abs() > master.double().abs()
    below = torch.where(too_far, _moved(near, -1), near)
    exact = below.double() == master.double()
    return below, torch.where(exact, below, _moved(below, 1))


def by_chance(master: Tensor, dtype: torch.dtype, words: Any) -> Tensor:
    """One of the neighbours: the one away from 0 where the word is at least the distance to it.

    The distance is that in units in the last place, rounded up to a multiple of 2^-16 for bfloat16, 2^-13 for
    normal float16 numbers, 2^-24 for subnormal ones; all but the last are exact.
    """
    below, above = neighbours(master, dtype)
    value = master.double().abs()
    low, high = below.double().abs(), above.double().abs()
    # Beyond the greatest number there is one more, an infinity, as far away as if exponents went on.
    step = torch.where(high.isinf(), _last_step(dtype), high - low)
    fraction = torch.where(step > 0, (value - low) / torch.where(step > 0, step, 1.0), 0.0)
    words = torch.from_numpy(words.astype(np.int64))
    if dtype is torch.bfloat16:
        up = (words >> 16) + (fraction * 2**16).long() >= 2**16
    else:
        normal = value >= 2.0**-14
        threshold = (0xFFFFFFFF - words >> 8).double() * 2.0**-24
        up = torch.where(normal, (words >> 19) + (fraction * 2**13).long() >= 2**13, threshold < fraction)
    chosen = torch.where(up, above, below)
    chosen = torch.where(value > low + step, above, chosen)
    chosen = torch.where(master.isinf(), master.to(dtype), chosen)
    return torch.where(master.isnan(), torch.tensor(torch.nan, dtype=dtype), chosen)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bfloat16, of two the one of greater magnitude, and the difference of the bits."""
    below, above = neighbours(master, torch.bfloat16)
    value, low, high = (each.double().abs() for each in (master, below, above))
    step = torch.where(high.isinf(), _last_step(torch.bfloat16), high - low)
    param = torch.where(value >= low + step / 2, above, below)
    param = torch.where(master.isinf(), master.to(torch.bfloat16), param)
    param = torch.where(master.isnan(), torch.tensor(torch.nan, dtype=torch.bfloat16), param)
    canonical = torch.where(master.isnan(), torch.nan, master)
    difference = canonical.view(torch.int32).long() - (param.view(torch.int16).long() << 16)
    assert ((difference >= -(2**15)) & (difference < 2**15)).all()
    return param, difference.to(torch.int16)


def _moved(values: Tensor, difference: int) -> Tensor:
    return (values.view(torch.int16) + difference).view(values.dtype)


def _last_step(dtype: torch.dtype) -> float:
    """The distance of the greatest number to the one before it."""
    greatest = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    return float(greatest) - float(_moved(greatest, -1))
