"""``fused_adamw::step_``: one AdamW or AMSGrad update of many tensors, in place.

Mutates ``params``, ``exp_avgs``, ``exp_avg_sqs``, ``max_exp_avg_sqs`` and ``state_steps``; reads ``grads``.
``max_exp_avg_sqs`` is empty without AMSGrad. ``state_steps[i]`` counts the updates of parameter i that are
complete; the op adds 1. It is a float32, as in ``torch.optim``, and stays at 2^24 = 16,777,216 from there on:
both bias corrections have long been 1 by then.

``grad_scale`` is divided out of the gradients; where ``found_inf`` is not 0, nothing is written and no
counter moves. An empty parameter is left alone, its counter too. A gradient may be exactly one of its own
parameter's tensors; any other sharing of memory with a written tensor is refused.

Moves 28 bytes per parameter (36 with AMSGrad) for float32 gradients, 2 fewer for 16-bit ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_adamw import _C
from fused_adamw.options import DEFAULT_OPTIONS, Scalar
from fused_adamw.torch_library import checks
from fused_adamw.torch_library.checks import StepLists
from fused_adamw.torch_library.library import (
    OPTIONS_AS_NUMBERS,
    OPTIONS_AS_TENSORS,
    AmpTensors,
    StepOptions,
    cpu_threads,
    is_intercepted,
    read_table,
    register,
    scalar_tensor,
    split_options,
)

OP = "fused_adamw::step_"

_LISTS = (
    "Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] state_steps"
)
_WRITTEN = tuple(name != "grads" for name in StepLists._fields)


class StepGroup(NamedTuple):
    """Tensors that are updated with the same options."""

    lists: StepLists
    options: StepOptions


def apply(groups: Sequence[StepGroup], amp: AmpTensors) -> None:
    """Updates all groups, through the op where a compiler, a mode or a subclass must see it.

    Otherwise straight, with one launch per device. Raises as ``checks`` says.
    """
    if is_intercepted() or not all(_C.only_plain_tensors(group.lists) for group in groups):
        for lists, options in groups:
            device = lists.params[0].device
            torch.ops.fused_adamw.step_.tensor(
                *lists,
                scalar_tensor(options.lr, device),
                beta1=scalar_tensor(options.beta1, device),
                beta2=scalar_tensor(options.beta2, device),
                weight_decay=options.weight_decay,
                eps=options.eps,
                maximize=options.maximize,
                grad_scale=amp.grad_scale,
                found_inf=amp.found_inf,
            )
        return
    by_device: dict[torch.device, list[StepGroup]] = {}
    for group in groups:
        by_device.setdefault(group.lists.params[0].device, []).append(group)
    for device_groups in by_device.values():
        update(device_groups, amp)


def update(groups: Sequence[StepGroup], amp: AmpTensors) -> None:
    """Updates all groups, of one device, in one parallel region; the op is this for one group.

    Everything is checked before anything is written. Raises as ``checks`` says.
    """
    device = groups[0].lists.params[0].device
    checks.check_backend(OP, device)
    amp.check_tensors(OP, device)
    scale = amp.scale(OP)
    tables = []
    options = []
    for group in groups:
        checks.refuse_autograd(OP, group.lists._asdict())
        tables.append(
            read_table(
                OP, group.lists, _WRITTEN, lambda lists=group.lists: checks.check_step_lists(OP, lists)
            )
        )
        group.options.check_tensors(OP, device)
        options.append(group.options.numbers(OP, scale))
    _refuse_overlap(groups, tables)
    bad_step = _C.find_bad_step(tables)
    if bad_step is not None:
        table, i = bad_step
        checks.check_step_count(OP, f"state_steps[{i}]", groups[table].lists.state_steps[i].item())
    if amp.skip():
        return
    for group in groups:
        for tensors, written in zip(group.lists, _WRITTEN, strict=True):
            if written and tensors:
                torch.autograd.graph.increment_version(tensors)
    _C.adamw_step_in_place(tables, options, cpu_threads())


def _refuse_overlap(groups: Sequence[StepGroup], tables: Sequence[_C.TensorTable]) -> None:
    overlap = _C.find_overlap(tables)
    if overlap is not None:
        written, other = (
            f"{StepLists._fields[field]}[{i}]" + (f" of group {table}" if len(groups) > 1 else "")
            for table, field, i in overlap
        )
        raise checks.overlap_error(OP, written, other)


def _update(lists: StepLists, options: StepOptions, amp: AmpTensors) -> None:
    if lists.params:
        update([StepGroup(lists, options)], amp)
    else:
        checks.check_step_lists(OP, lists)


def _fake_update(lists: StepLists, options: StepOptions, amp: AmpTensors) -> None:
    checks.check_step_lists(OP, lists)
    checks.refuse_autograd(OP, lists._asdict())
    if lists.params:
        device = lists.params[0].device
        options.check_tensors(OP, device)
        amp.check_tensors(OP, device)


def _operator(run: Callable[[StepLists, StepOptions, AmpTensors], None]) -> Callable[..., None]:
    def step_(
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        lr: Scalar = DEFAULT_OPTIONS.lr,
        **options: Any,
    ) -> None:
        lists = StepLists(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
        run(lists, *split_options(lr, **options))

    return step_


for _overload, _options in (("", OPTIONS_AS_NUMBERS), (".tensor", OPTIONS_AS_TENSORS)):
    register(
        f"step_{_overload}({_LISTS}, {_options}) -> ()",
        implementation=_operator(_update),
        fake=_operator(_fake_update),
    )
