"""How many rows gradients make, and what merging them takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fused_adamw._C import ELEMENTS_PER_ROW, ROWS_PER_MERGE

MAX_ROWS = 4 * ROWS_PER_MERGE**2
"""4,194,304 rows: 68.7 billion gradient elements."""

ROW_ELEMENTS = 3
"""A row is [max_abs, scaled_sum_of_squares, nonfinite], three float32 values (12 bytes)."""


@dataclass(frozen=True)
class StatsPlan:
    """What merging ``rows`` rows of gradient statistics takes, 1024 at a time.

    Attributes:
        rows: The number of rows, 1 to 4,194,304.

    Raises:
        TypeError: ``rows`` is no int.
        ValueError: ``rows`` is out of range.
    """

    rows: int

    def __post_init__(self) -> None:
        if type(self.rows) is not int:
            raise TypeError(f"StatsPlan: rows is {self.rows!r}; an int is required")
        if not 1 <= self.rows <= MAX_ROWS:
            raise ValueError(f"StatsPlan: rows is {self.rows}; 1 to {MAX_ROWS} is required")

    @property
    def rows_after_stages(self) -> tuple[int, ...]:
        """The number of rows after each stage; the last is 1, the report."""
        counts = [merged_rows(self.rows)]
        while counts[-1] > 1:
            counts.append(merged_rows(counts[-1]))
        return tuple(counts)

    @property
    def stages(self) -> int:
        """The number of merges between the rows and the report: 1, 2 or 3."""
        return len(self.rows_after_stages)

    @property
    def scratch_elements(self) -> int:
        """float32 elements for the rows between the first stage and the report; 12,300 at most."""
        return scratch_elements(self.rows)


def merged_rows(rows: int) -> int:
    """The number of rows that one stage leaves."""
    return -(-rows // ROWS_PER_MERGE)


def scratch_elements(rows: int) -> int:
    """``StatsPlan(rows).scratch_elements``; of no rows and of a tracer's symbol as well."""
    elements = 0
    while rows > ROWS_PER_MERGE:
        rows = merged_rows(rows)
        elements += ROW_ELEMENTS * rows
    return elements


def gradient_rows(sizes: Iterable[int]) -> int:
    """The number of rows that gradients of these sizes (in elements) make."""
    return sum(-(-size // ELEMENTS_PER_ROW) for size in sizes)
