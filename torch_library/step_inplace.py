"""``fused_adamw::step_``: one AdamW or AMSGrad update of many tensors, in place.

Mutates ``params``, ``exp_avgs``, ``exp_avg_sqs``, ``max_exp_avg_sqs``, ``state_steps`` and ``masters``; reads
``grads``.
``max_exp_avg_sqs`` is empty without AMSGrad. ``state_steps[i]`` counts the updates of parameter i that are
complete; the op adds 1. It is a float32, as in ``torch.optim``, and stays at 2^24 = 16,777,216 from there on:
both bias corrections have long been 1 by then.

``grad_scale`` is divided out of the gradients; where ``found_inf`` is not 0, nothing is written and no
counter moves. An empty parameter is left alone, its counter too. A gradient may be exactly one of its own
parameter's tensors; any other sharing of memory with a written tensor is refused.

Parameters of 16 bits need ``masters``, their float32 weights: the formula updates those, and the parameters
become their roundings (``csrc/low_precision.h``), in the same pass.

- float32 masters: a parameter becomes the nearest number, of two the even one. An element that was no
  rounding of its master was written to by someone else: it stands, and the master takes its value before the
  update.
- int16 masters of bfloat16 parameters: the bits by which the float32 weight differs from the parameter, which
  is the nearest number, of two the one of greater magnitude. Exact for every float32 weight; the two always
  agree.
- ``rounding_seeds``, one for each parameter, with float32 masters: a parameter becomes one of the two
  neighbours by chance, on average its master. An element's random bits are a function of its parameter's
  seed, its place in memory and the number of the update.

Moves 28 bytes per parameter (36 with AMSGrad) for float32 gradients, 2 fewer for 16-bit ones; as many with
int16 masters, 4 more with float32 ones beside their 16-bit parameters, which are read, too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_adamw import _C
from fused_adamw.options import DEFAULT_GUARD, DEFAULT_OPTIONS, GradientGuardOptions, Scalar
from fused_adamw.torch_library import checks
from fused_adamw.torch_library.checks import StepLists
from fused_adamw.torch_library.library import (
    backend,
    bump_versions,
    is_intercepted,
    read_table,
    refuse_overlap,
    register,
)
from fused_adamw.torch_library.step_options import (
    OPTIONS_AS_NUMBERS,
    OPTIONS_AS_TENSORS,
    AmpTensors,
    StepOptions,
    split_options,
    tensor_arguments,
)

OP = "fused_adamw::step_"

LISTS = (
    "Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] state_steps"
)
# Behind the options, where it can be left out: a schema knows no empty list of tensors as a default.
MASTERS = "Tensor(f!)[]? masters=None, int[]? rounding_seeds=None"
_WRITTEN = tuple(name != "grads" for name in StepLists._fields)


class StepGroup(NamedTuple):
    """Tensors that are updated with the same options."""

    lists: StepLists
    options: StepOptions
    rounding_seeds: Sequence[int] = ()

    def op_lists(self) -> tuple[tuple[Sequence[Tensor], ...], dict[str, object]]:
        """The tensors and seeds as positional and keyword arguments of an op."""
        if not self.lists.masters:
            return self.lists[:-1], {}
        seeds = list(self.rounding_seeds) if self.rounding_seeds else None
        return self.lists[:-1], {"masters": self.lists.masters, "rounding_seeds": seeds}


def apply(groups: Sequence[StepGroup], amp: AmpTensors) -> None:
    """Updates all groups, through the op where a compiler, a mode or a subclass must see it.

    Otherwise straight, with one launch per device. Raises as ``checks`` says.
    """
    if must_dispatch(groups):
        for group in groups:
            device = group.lists.params[0].device
            checks.check_backend(OP, device)  # fakes know no backend
            lists, masters = group.op_lists()
            arguments = tensor_arguments(group.options, amp.on(device), device)
            torch.ops.fused_adamw.step_.tensor(*lists, **arguments, **masters)
        return
    for device, device_groups in by_device(groups):
        update(device_groups, amp.on(device))


def check(groups: Sequence[StepGroup], amp: AmpTensors) -> None:
    """Raises what ``apply`` would raise, and writes nothing."""
    if not must_dispatch(groups):
        for device, device_groups in by_device(groups):
            read(device_groups, amp.on(device))


def must_dispatch(groups: Sequence[StepGroup]) -> bool:
    """Whether a compiler, a mode or a tensor subclass must see the op call."""
    return is_intercepted() or not all(_C.only_plain_tensors(group.lists) for group in groups)


def by_device(groups: Sequence[StepGroup]) -> Iterable[tuple[torch.device, list[StepGroup]]]:
    """The groups, device by device; refuses a device without kernels before any group is updated.

    The tensors of a group are of one device.
    """
    devices: dict[torch.device, list[StepGroup]] = {}
    for group in groups:
        devices.setdefault(group.lists.params[0].device, []).append(group)
    for device in devices:
        checks.check_backend(OP, device)
    return devices.items()


def update(
    groups: Sequence[StepGroup],
    amp: AmpTensors,
    *,
    op: str = OP,
    report: Tensor | None = None,
    guard: GradientGuardOptions = DEFAULT_GUARD,
) -> None:
    """Updates all groups, of one device, at once; the op is this for one group.

    ``report`` and ``guard`` are those of ``adamw_scaled``. Everything is checked before anything is written.
    Raises as ``checks`` says, in the name of ``op``.
    """
    write(groups, read(groups, amp, op=op, report=report), amp, report, guard)


def read(
    groups: Sequence[StepGroup], amp: AmpTensors, *, op: str = OP, report: Tensor | None = None
) -> list[_C.TensorTable]:
    """A table of tensors for each group, all of one device, after every check that ``update`` makes."""
    device = groups[0].lists.params[0].device
    checks.check_backend(op, device)
    amp.check_tensors(op, device)
    amp.check_values(op)
    tables = []
    for i, group in enumerate(groups):
        name = op if len(groups) == 1 else f"{op}, group {i}"
        checks.refuse_autograd(name, group.lists._asdict())
        seeds = group.rounding_seeds
        check = functools.partial(checks.check_step_lists, name, group.lists, seeds)
        tables.append(read_table(OP, StepLists._fields, group.lists, _WRITTEN, check, seeds))
        group.options.check_tensors(name, device)
        group.options.check_values(name)
    scalars: dict[str, object] = {"report": report, **amp._asdict()}
    for i, group in enumerate(groups):
        suffix = f" of group {i}" if len(groups) > 1 else ""
        for name, value in group.options.tensors().items():
            scalars[name + suffix] = value
    refuse_overlap(op, tables, StepLists._fields, elementwise=True, scalars=scalars)
    bad_step = backend(device).bad_step(tables)
    if bad_step is not None:
        table, i = bad_step
        checks.check_step_count(op, f"state_steps[{i}]", groups[table].lists.state_steps[i].item())
    return tables


def write(
    groups: Sequence[StepGroup],
    tables: Sequence[_C.TensorTable],
    amp: AmpTensors,
    report: Tensor | None,
    guard: GradientGuardOptions,
    *,
    after_analysis: bool = False,
) -> None:
    """Updates the groups that these tables were read of; right after their analysis, or not."""
    runs = backend(groups[0].lists.params[0].device)
    if runs.must_skip(amp, report):
        return
    options = [group.options for group in groups]
    runs.step_in_place(tables, options, amp, report, guard, after_analysis=after_analysis)
    # While a device computes.
    for group in groups:
        bump_versions(itertools.compress(group.lists, _WRITTEN))


def fake_update(group: StepGroup, amp: AmpTensors, *, op: str = OP) -> None:
    """The checks of ``update`` that need no values."""
    lists, options, rounding_seeds = group
    checks.check_step_lists(op, lists, rounding_seeds)
    checks.refuse_autograd(op, lists._asdict())
    if lists.params:
        device = lists.params[0].device
        options.check_tensors(op, device)
        amp.check_tensors(op, device)


def _update(group: StepGroup, amp: AmpTensors) -> None:
    if group.lists.params:
        update([group], amp)
    else:
        checks.check_step_lists(OP, group.lists, group.rounding_seeds)


def _operator(run: Callable[[StepGroup, AmpTensors], None]) -> Callable[..., None]:
    def step_(
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        lr: Scalar = DEFAULT_OPTIONS.lr,
        *,
        masters: list[Tensor] | None = None,
        rounding_seeds: list[int] | None = None,
        **options: Any,
    ) -> None:
        lists = StepLists(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, masters or ())
        step_options, amp = split_options(lr, **options)
        run(StepGroup(lists, step_options, rounding_seeds or ()), amp)

    return step_


for _overload, _options in (("", OPTIONS_AS_NUMBERS), (".tensor", OPTIONS_AS_TENSORS)):
    register(
        f"step_{_overload}({LISTS}, {_options}, {MASTERS}) -> ()",
        implementation=_operator(_update),
        fake=_operator(fake_update),
    )
