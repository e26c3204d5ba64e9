"""``fused_adamw::adamw_scaled``: the step ``step_`` under the control of a report of gradient statistics.

Mutates what ``step_`` mutates. Reads ``report``, [max_abs, scaled_sum_of_squares, nonfinite] (float32, shape
(3,)), as ``merge_gradient_stats`` made it of gradients that were unscaled by the same ``grad_scale``:

- nonfinite is not 0: nothing is written and no counter moves;
- ``max_norm`` is given: the gradients are multiplied by min(1, max_norm / (norm + norm_epsilon)), the clip
  coefficient of ``torch.nn.utils.clip_grad_norm_``; with ``max_norm`` 0 by 0, and the step goes on. The
  gradients themselves stay as they are. A coefficient too small for a float32 is applied in two factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_adamw import _C
from fused_adamw.options import DEFAULT_GUARD, DEFAULT_OPTIONS, GradientGuardOptions, Scalar
from fused_adamw.stats_plan import ROW_ELEMENTS
from fused_adamw.torch_library import checks, merge_gradient_stats, step_inplace
from fused_adamw.torch_library.checks import StepLists
from fused_adamw.torch_library.library import backend, register
from fused_adamw.torch_library.step_inplace import StepGroup
from fused_adamw.torch_library.step_options import (
    OPTIONS_AS_NUMBERS,
    OPTIONS_AS_TENSORS,
    AmpTensors,
    moved,
    split_options,
    tensor_arguments,
)

OP = "fused_adamw::adamw_scaled"

_GRADS = StepLists._fields.index("grads")


def apply(groups: Sequence[StepGroup], report: Tensor, guard: GradientGuardOptions, amp: AmpTensors) -> None:
    """Updates all groups, through the op where a compiler, a mode or a subclass must see it."""
    if step_inplace.must_dispatch(groups):
        for group in groups:
            device = group.lists.params[0].device
            checks.check_backend(OP, device)  # fakes know no backend
            lists, masters = group.op_lists()
            torch.ops.fused_adamw.adamw_scaled.tensor(
                *lists,
                moved(report, device),
                max_norm=guard.max_norm,
                norm_epsilon=guard.epsilon,
                **tensor_arguments(group.options, amp.on(device), device),
                **masters,
            )
        return
    for device, device_groups in step_inplace.by_device(groups):
        update(device_groups, moved(report, device), guard, amp.on(device))


def update(groups: Sequence[StepGroup], report: Tensor, guard: GradientGuardOptions, amp: AmpTensors) -> None:
    """Updates all groups of one device, unless the report says to skip.

    Raises as ``checks`` says, before anything is written.
    """
    device = groups[0].lists.params[0].device
    checks.check_backend(OP, device)
    _check_report(report, device)
    checks.check_guard(OP, guard.max_norm, guard.epsilon)
    step_inplace.update(groups, amp, op=OP, report=report, guard=guard)


def analyze_and_update(
    groups: Sequence[StepGroup], guard: GradientGuardOptions, amp: AmpTensors, *, hierarchical: bool
) -> tuple[Tensor, Tensor]:
    """The three ops of a guarded step in one call: statistics of the gradients, then ``update`` by them.

    The groups are of one device and hold plain tensors. Every tensor is read once, and on CUDA the rows are
    merged by the launch that makes them. Returns the report and the rows.
    """
    device = groups[0].lists.params[0].device
    checks.check_guard(OP, guard.max_norm, guard.epsilon)
    tables = step_inplace.read(groups, amp, op=OP)
    count = sum(table.count_rows(_GRADS) for table in tables)
    checks.check_row_count(OP, "rows", count)
    rows = torch.empty(count, ROW_ELEMENTS, dtype=torch.float32, device=device)
    scratch, report = merge_gradient_stats.new_storage(rows, hierarchical)
    stats = _C.TensorTable(OP, [[rows], [scratch], [report]], [True, True, True])
    backend(device).analyze_and_merge(tables, stats, amp, hierarchical)
    step_inplace.write(groups, tables, amp, report, guard, after_analysis=True)
    return report, rows


def _check_report(report: Tensor, device: torch.device) -> None:
    checks.check_buffer(OP, "report", report, checks.REPORT_SHAPE)
    checks.check_same_device(OP, "report", report, device)


Run = Callable[[StepGroup, Tensor, GradientGuardOptions, AmpTensors], Any]


def _operator(run: Run) -> Callable[..., None]:
    def adamw_scaled(
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        report: Tensor,
        lr: Scalar = DEFAULT_OPTIONS.lr,
        *,
        max_norm: float | None = None,
        norm_epsilon: float = DEFAULT_GUARD.epsilon,
        masters: list[Tensor] | None = None,
        rounding_seeds: list[int] | None = None,
        **options: Any,
    ) -> None:
        lists = StepLists(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, masters or ())
        step_options, amp = split_options(lr, **options)
        group = StepGroup(lists, step_options, rounding_seeds or ())
        run(group, report, GradientGuardOptions(max_norm, norm_epsilon), amp)

    return adamw_scaled


def _update(group: StepGroup, report: Tensor, guard: GradientGuardOptions, amp: AmpTensors) -> None:
    if group.lists.params:
        update([group], report, guard, amp)
    else:
        checks.check_step_lists(OP, group.lists, group.rounding_seeds)


def _fake_update(group: StepGroup, report: Tensor, guard: GradientGuardOptions, amp: AmpTensors) -> None:
    step_inplace.fake_update(group, amp, op=OP)
    if group.lists.params:
        _check_report(report, group.lists.params[0].device)
    checks.check_guard(OP, guard.max_norm, guard.epsilon)


for _overload, _options in (("", OPTIONS_AS_NUMBERS), (".tensor", OPTIONS_AS_TENSORS)):
    register(
        f"adamw_scaled{_overload}({step_inplace.LISTS}, Tensor report, {_options}, float? max_norm=None, "
        f"float norm_epsilon={DEFAULT_GUARD.epsilon}, {step_inplace.MASTERS}) -> ()",
        implementation=_operator(_update),
        fake=_operator(_fake_update),
    )
