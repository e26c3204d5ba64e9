"""``fused_adamw::analyze_gradient``: gradients into rows of statistics, 12 bytes per 16,384 elements.

Mutates ``rows``: float32, contiguous, of shape (n, 3), where n is the sum of ceil(elements / 16,384) over the
gradients. A row is [max_abs, scaled_sum_of_squares, nonfinite] of one chunk, the chunks of each gradient in
the order of its memory, the gradients in the order of the list; see ``csrc/gradient_stats.h``.
``grad_scale`` is divided out first. Reads each gradient once: 4 or 2 bytes per element.
"""

from __future__ import annotations

from torch import Tensor

from fused_adamw.stats_plan import gradient_rows
from fused_adamw.torch_library import checks
from fused_adamw.torch_library.library import (
    backend,
    bump_versions,
    read_table,
    refuse_overlap,
    register,
)
from fused_adamw.torch_library.step_options import AmpTensors

OP = "fused_adamw::analyze_gradient"


def check(grads: list[Tensor], rows: Tensor) -> None:
    """Refuses gradients that cannot be read, and rows of another size than they make."""
    checks.check_gradients(OP, grads)
    checks.check_rows(OP, "rows", rows, gradient_rows(grad.numel() for grad in grads))
    if grads:
        checks.check_same_device(OP, "rows", rows, grads[0].device)


def update(grads: list[Tensor], rows: Tensor, grad_scale: Tensor | float | None = None) -> None:
    """The implementation."""
    checks.refuse_autograd(OP, {"grads": grads, "rows": rows})
    checks.check_backend(OP, rows.device)
    amp = AmpTensors(grad_scale, None)
    amp.check_tensors(OP, rows.device)
    amp.check_values(OP)
    names = ("grads", "rows")
    table = read_table(OP, names, [grads, [rows]], [False, True], lambda: check(grads, rows))
    refuse_overlap(OP, [table], names)
    if rows.numel() == 0:
        return
    bump_versions([[rows]])
    backend(rows.device).analyze_gradients(table, amp)


def _fake(grads: list[Tensor], rows: Tensor, grad_scale: Tensor | None = None) -> None:
    checks.refuse_autograd(OP, {"grads": grads, "rows": rows})
    check(grads, rows)
    AmpTensors(grad_scale, None).check_tensors(OP, rows.device)


register(
    "analyze_gradient(Tensor[] grads, Tensor(a!) rows, *, Tensor? grad_scale=None) -> ()",
    implementation=update,
    fake=_fake,
)
