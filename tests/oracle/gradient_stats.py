"""Statistics of gradients, twice: exactly, and in the bits that every backend promises.

``exact_norm`` and ``exact_max`` say what is right. ``rows_of``, ``merge_chunks`` and ``merge`` follow the
design's rule for the order of every sum, written in numpy from its text: element i of a chunk of 16,384 adds
its float64 square to lane i mod 1024; lanes are summed by neighbours; a row is formed once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

ELEMENTS_PER_ROW = 16384
LANES = 1024


def unscaled(grad: Tensor, grad_scale: float = 1.0) -> Any:
    """The float32 values that the statistics are of, in the order of memory."""
    in_memory_order = torch.as_strided(grad.detach().cpu(), (grad.numel(),), (1,))
    values = in_memory_order.to(torch.float32).numpy()
    with np.errstate(over="ignore"):
        return values * (np.float32(1.0) / np.float32(grad_scale))


def exact_norm(grads: Sequence[Tensor], grad_scale: float = 1.0) -> float:
    """The norm of all finite elements: exact squares, summed without error."""
    squares: list[float] = []
    for grad in grads:
        values = unscaled(grad, grad_scale).astype(np.float64)
        squares += (values[np.isfinite(values)] ** 2).tolist()
    return math.sqrt(math.fsum(squares))


def exact_max(grads: Sequence[Tensor], grad_scale: float = 1.0) -> float:
    """The greatest magnitude of all finite elements."""
    magnitudes = [np.abs(unscaled(grad, grad_scale)) for grad in grads]
    return max((float(m[np.isfinite(m)].max(initial=0.0)) for m in magnitudes), default=0.0)


def clip_coefficient(norm: float, max_norm: float | None, epsilon: float = 1e-6) -> float:
    """That of ``torch.nn.utils.clip_grad_norm_``, in float64."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + epsilon))


def rows_of(grads: Sequence[Tensor], grad_scale: float = 1.0) -> Tensor:
    """The rows of gradients, of shape (n, 3)."""
    rows = []
    for grad in grads:
        values = unscaled(grad, grad_scale)
        for begin in range(0, len(values), ELEMENTS_PER_ROW):
            chunk = values[begin : begin + ELEMENTS_PER_ROW]
            finite = np.isfinite(chunk)
            magnitudes = np.where(finite, np.abs(chunk), np.float32(0.0))
            squares = magnitudes.astype(np.float64) ** 2
            padded = np.zeros(-(-len(squares) // LANES) * LANES)
            padded[: len(squares)] = squares
            lanes = np.zeros(LANES)
            for values_of_lanes in padded.reshape(-1, LANES):
                lanes = lanes + values_of_lanes
            rows.append(_row(magnitudes.max(), _sum_by_neighbours(lanes), not finite.all()))
    return _table(rows)


def merge_chunks(rows: Tensor) -> Tensor:
    """One row for each 1024 rows."""
    table = rows.cpu().numpy()
    return _table([_merge_block(table[begin : begin + LANES]) for begin in range(0, len(table), LANES)])


def merge(rows: Tensor) -> Tensor:
    """The report: 1024 rows into one, until one is left."""
    if len(rows) == 0:
        return torch.zeros(3)
    merged = merge_chunks(rows)
    while len(merged) > 1:
        merged = merge_chunks(merged)
    return merged[0]


def merge_serially(rows: Tensor) -> Tensor:
    """The report: all rows in one sum, from the first to the last."""
    total = 0.0
    for square in _squares(rows.cpu().numpy()).tolist():
        total += square
    table = rows.cpu().numpy()
    return _table([_row(table[:, 0].max(initial=0.0), total, bool((table[:, 2] != 0).any()))])[0]


def _squares(rows: Any) -> Any:
    wide = rows.astype(np.float64)
    return wide[:, 0] * wide[:, 0] * wide[:, 1]


def _merge_block(rows: Any) -> tuple[float, float, float]:
    lanes = np.zeros(LANES)
    lanes[: len(rows)] = _squares(rows)
    return _row(rows[:, 0].max(), _sum_by_neighbours(lanes), bool((rows[:, 2] != 0).any()))


def _sum_by_neighbours(lanes: Any) -> float:
    while len(lanes) > 1:
        lanes = lanes[0::2] + lanes[1::2]
    return float(lanes[0])


def _row(max_abs: Any, squares: float, nonfinite: bool) -> tuple[float, float, float]:
    scale = float(max_abs) * float(max_abs)
    return (float(max_abs), squares / scale if scale > 0.0 else 0.0, float(nonfinite))


def _table(rows: Sequence[tuple[float, float, float]]) -> Tensor:
    # float64 to float32 rounds the quotients once; the other two values are float32 already.
    return torch.from_numpy(np.array(rows, dtype=np.float64).reshape(-1, 3).astype(np.float32))
