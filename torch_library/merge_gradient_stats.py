"""``fused_adamw::merge_gradient_stats``: all rows into the 12-byte report.

Mutates ``report`` (float32, shape (3,)) and ``scratch`` (float32, ``StatsPlan(n).scratch_elements`` elements;
none where ``hierarchical`` is False, for the rows are then summed one after another). ``rows`` has shape
(n, 3); no rows make the report of no gradient: [0, 0, 0]. The norm is ``max_abs *
sqrt(scaled_sum_of_squares)``, to be taken in float64.
"""

from __future__ import annotations

from torch import Tensor

from fused_adamw import stats_plan
from fused_adamw.stats_plan import ROW_ELEMENTS
from fused_adamw.torch_library import checks
from fused_adamw.torch_library.library import backend, bump_versions, read_table, refuse_overlap, register

OP = "fused_adamw::merge_gradient_stats"


def scratch_elements(rows: int, hierarchical: bool) -> int:
    """The size of the scratch that merging takes."""
    return stats_plan.scratch_elements(rows) if hierarchical else 0


def new_storage(rows: Tensor, hierarchical: bool) -> tuple[Tensor, Tensor]:
    """Scratch and report for merging these rows."""
    scratch = rows.new_empty(scratch_elements(rows.shape[0], hierarchical))
    return scratch, rows.new_empty(ROW_ELEMENTS)


def check(rows: Tensor, scratch: Tensor, report: Tensor, hierarchical: bool) -> None:
    """Refuses what are no rows, and storage of another size than merging takes."""
    checks.check_rows(OP, "rows", rows)
    checks.check_buffer(OP, "scratch", scratch, (scratch_elements(rows.shape[0], hierarchical),))
    checks.check_buffer(OP, "report", report, checks.REPORT_SHAPE)
    checks.check_same_device(OP, "scratch", scratch, rows.device)
    checks.check_same_device(OP, "report", report, rows.device)


def update(rows: Tensor, scratch: Tensor, report: Tensor, *, hierarchical: bool = True) -> None:
    """The implementation."""
    checks.refuse_autograd(OP, {"rows": rows, "scratch": scratch, "report": report})
    checks.check_backend(OP, rows.device)
    names = ("rows", "scratch", "report")
    table = read_table(
        f"{OP} hierarchical={hierarchical}",
        names,
        [[rows], [scratch], [report]],
        [False, True, True],
        lambda: check(rows, scratch, report, hierarchical),
    )
    refuse_overlap(OP, [table], names)
    bump_versions([[scratch], [report]])
    backend(rows.device).merge_all_rows(table, hierarchical)


def _fake(rows: Tensor, scratch: Tensor, report: Tensor, *, hierarchical: bool = True) -> None:
    checks.refuse_autograd(OP, {"rows": rows, "scratch": scratch, "report": report})
    check(rows, scratch, report, hierarchical)


register(
    "merge_gradient_stats(Tensor rows, Tensor(a!) scratch, Tensor(b!) report, *, "
    "bool hierarchical=True) -> ()",
    implementation=update,
    fake=_fake,
)
