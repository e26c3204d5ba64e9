"""``fused_adamw::merge_gradient_stats_chunks``: one stage of merging, 1024 rows into one.

Mutates ``merged``: float32, contiguous, of shape (ceil(n / 1024), 3) for ``rows`` of shape (n, 3).
``merge_gradient_stats`` runs all stages; this is one stage, for callers who reduce in their own way.
"""

from __future__ import annotations

from torch import Tensor

from fused_adamw.stats_plan import merged_rows
from fused_adamw.torch_library import checks
from fused_adamw.torch_library.library import backend, bump_versions, read_table, refuse_overlap, register

OP = "fused_adamw::merge_gradient_stats_chunks"


def check(rows: Tensor, merged: Tensor) -> None:
    """Refuses what are no rows, and ``merged`` of another size than they merge into."""
    checks.check_rows(OP, "rows", rows)
    checks.check_rows(OP, "merged", merged, merged_rows(rows.shape[0]))
    checks.check_same_device(OP, "merged", merged, rows.device)


def update(rows: Tensor, merged: Tensor) -> None:
    """The implementation."""
    checks.refuse_autograd(OP, {"rows": rows, "merged": merged})
    checks.check_backend(OP, rows.device)
    names = ("rows", "merged")
    table = read_table(OP, names, [[rows], [merged]], [False, True], lambda: check(rows, merged))
    refuse_overlap(OP, [table], names)
    bump_versions([[merged]])
    backend(rows.device).merge_rows(table)


def _fake(rows: Tensor, merged: Tensor) -> None:
    checks.refuse_autograd(OP, {"rows": rows, "merged": merged})
    check(rows, merged)


register(
    "merge_gradient_stats_chunks(Tensor rows, Tensor(a!) merged) -> ()", implementation=update, fake=_fake
)
