"""``StatsPlan``: what merging a number of rows takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from expecttest import assert_expected_inline

from fused_adamw import StatsPlan
from fused_adamw.stats_plan import MAX_ROWS, gradient_rows, merged_rows


@pytest.mark.parametrize(
    ("rows", "stages", "scratch_elements"),
    [
        (1, 1, 0),
        (2, 1, 0),
        (1024, 1, 0),
        (1025, 2, 6),
        (2048, 2, 6),
        (2049, 2, 9),
        (1_048_576, 2, 3072),
        (1_048_577, 3, 3081),
        (4_194_303, 3, 12_300),
        (4_194_304, 3, 12_300),
    ],
)
def test_stages_and_scratch(rows: int, stages: int, scratch_elements: int) -> None:
    plan = StatsPlan(rows)
    assert plan.rows == rows
    assert plan.stages == stages
    assert plan.scratch_elements == scratch_elements
    assert len(plan.rows_after_stages) == stages
    assert plan.rows_after_stages[-1] == 1


def test_each_stage_takes_what_the_last_one_left() -> None:
    assert StatsPlan(4_194_304).rows_after_stages == (4096, 4, 1)
    assert StatsPlan(1_048_577).rows_after_stages == (1025, 2, 1)
    assert merged_rows(1024) == 1
    assert merged_rows(1025) == 2


def test_no_plan_takes_more_scratch_than_the_largest() -> None:
    at_boundaries = {n + d for k in range(1, 4097) for n in [1024 * k] for d in (-1, 0, 1)} | {1, MAX_ROWS}
    assert max(StatsPlan(n).scratch_elements for n in at_boundaries if n <= MAX_ROWS) == 12_300


@pytest.mark.parametrize("rows", [0, -1, 4_194_305, True, 1.0, None, "1"])
def test_refusals_raise(rows: Any) -> None:
    with pytest.raises(ValueError if type(rows) is int else TypeError):
        StatsPlan(rows)


def test_refusals_text() -> None:
    lines = []
    for rows in (0, -1, 4_194_305, True, 1.0):
        with pytest.raises((TypeError, ValueError)) as caught:
            StatsPlan(rows)  # type: ignore[arg-type]
        lines.append(f"{rows!r}: {caught.type.__name__}: {caught.value}")
    assert_expected_inline(
        "\n".join(lines),
        """\
0: ValueError: StatsPlan: rows is 0; 1 to 4194304 is required
-1: ValueError: StatsPlan: rows is -1; 1 to 4194304 is required
4194305: ValueError: StatsPlan: rows is 4194305; 1 to 4194304 is required
True: TypeError: StatsPlan: rows is True; an int is required
1.0: TypeError: StatsPlan: rows is 1.0; an int is required""",
    )


def test_plans_are_values() -> None:
    assert StatsPlan(1025) == StatsPlan(1025)
    assert len({StatsPlan(1025), StatsPlan(1025), StatsPlan(1026)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        StatsPlan(1025).rows = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [((), 0), ((0,), 0), ((1,), 1), ((16384,), 1), ((16385,), 2), ((0, 1, 0, 16385), 3), ((1,) * 100, 100)],
)
def test_rows_of_gradients(sizes: tuple[int, ...], rows: int) -> None:
    assert gradient_rows(sizes) == rows
