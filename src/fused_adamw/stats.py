"""Statistics of gradients: finite check, greatest magnitude and global norm in 12-byte rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fused_adamw.options import Scalar
from fused_adamw.stats_plan import ROW_ELEMENTS, gradient_rows
from fused_adamw.torch_library import analyze_gradient, checks, merge_gradient_stats
from fused_adamw.torch_library.library import is_intercepted
from fused_adamw.torch_library.step_options import scalar_tensor


@dataclass(frozen=True)
class GradientStats:
    """What is known of gradients, all together and one by one.

    Attributes:
        report: float32, shape (3,): [max_abs, scaled_sum_of_squares, nonfinite] of all gradients.
        rows: float32, shape (n, 3): the rows that were merged. From ``gradient_stats``: one per 16,384
            elements of each gradient.
        sizes: The number of elements of each gradient; empty where the rows are not of gradients.

    Values are read from the device when a property asks for them, and only then. Magnitudes and norms are
    those of the unscaled gradients; elements that are not finite do not count in them.
    """

    report: Tensor
    rows: Tensor
    sizes: tuple[int, ...] = field(default=())

    @cached_property
    def _values(self) -> tuple[float, float, float]:
        max_abs, squares, nonfinite = self.report.tolist()
        return max_abs, squares, nonfinite

    @property
    def max_abs(self) -> float:
        """The greatest magnitude."""
        return self._values[0]

    @property
    def norm(self) -> float:
        """The Euclidean norm, taken in float64: it neither overflows nor vanishes."""
        return self._values[0] * math.sqrt(self._values[1])

    @property
    def finite(self) -> bool:
        """Whether all elements are finite, as they are and after unscaling."""
        return self._values[2] == 0.0

    def per_gradient(self) -> list[GradientStats]:
        """The statistics of each gradient."""
        counts = [gradient_rows([size]) for size in self.sizes]
        return [
            GradientStats(_merge(rows, hierarchical=True), rows, (size,))
            for rows, size in zip(self.rows.split(counts), self.sizes, strict=True)
        ]

    def nonfinite_gradients(self) -> list[int]:
        """The indices of the gradients that hold a NaN or an infinity."""
        return [i for i, stats in enumerate(self.per_gradient()) if not stats.finite]


def gradient_stats(
    grads: Tensor | Iterable[Tensor], *, grad_scale: Scalar | None = None, hierarchical: bool = True
) -> GradientStats:
    """The statistics of gradients, which are read once.

    Args:
        grads: Gradients of one device: float32, float16 or bfloat16, in any mix, dense (in any order of their
            dimensions). Empty ones and an empty list are allowed: [0, 0, 0] is the report of nothing.
        grad_scale: The factor that the gradients were multiplied by; divided out in float32.
        hierarchical: Merge rows 1024 at a time, or one after another.

    Raises:
        TypeError, ValueError: A gradient is refused, as ``torch_library/checks.py`` says.
    """
    grads = [grads] if isinstance(grads, Tensor) else list(grads)
    with torch.no_grad():
        return analyze(grads, grad_scale, hierarchical=hierarchical)


def merge_stats(rows: Tensor, *, hierarchical: bool = True) -> GradientStats:
    """The statistics of all that these rows stand for.

    For callers who reduce across ranks themselves: gather each rank's ``report`` (or ``rows``), stack them,
    and merge. A report is a row.

    Args:
        rows: float32, shape (n, 3), n at most 4,194,304.
        hierarchical: Merge rows 1024 at a time, or one after another.

    Raises:
        TypeError, ValueError: These are no rows.
    """
    rows = rows.detach()
    if rows.layout is torch.strided:
        rows = rows.contiguous()
    if not is_intercepted():  # where it is, the op checks
        checks.check_rows(merge_gradient_stats.OP, "rows", rows)
    return GradientStats(_merge(rows, hierarchical), rows)


def analyze(grads: Sequence[Tensor], grad_scale: Scalar | None, *, hierarchical: bool) -> GradientStats:
    """``gradient_stats`` of a list; through the ops where a compiler or a mode must see them."""
    device = grads[0].device if grads else torch.device("cpu")
    sizes = tuple(map(Tensor.numel, grads))
    intercepted = is_intercepted()
    count = gradient_rows(sizes) if intercepted else _cached_gradient_rows(sizes)
    rows = torch.empty(count, ROW_ELEMENTS, dtype=torch.float32, device=device)
    if intercepted:
        scale = None if grad_scale is None else scalar_tensor(grad_scale, device)
        torch.ops.fused_adamw.analyze_gradient(grads, rows, grad_scale=scale)
    else:
        analyze_gradient.update(list(grads), rows, grad_scale)
    return GradientStats(_merge(rows, hierarchical), rows, sizes)


# A model asks with the same sizes in each step.
_cached_gradient_rows = lru_cache(maxsize=64)(gradient_rows)


def _merge(rows: Tensor, hierarchical: bool) -> Tensor:
    scratch, report = merge_gradient_stats.new_storage(rows, hierarchical)
    if is_intercepted():
        torch.ops.fused_adamw.merge_gradient_stats(rows, scratch, report, hierarchical=hierarchical)
    else:
        merge_gradient_stats.update(rows, scratch, report, hierarchical=hierarchical)
    return report
