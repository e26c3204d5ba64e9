"""The functional API: an update that returns new tensors and leaves its inputs as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fused_adamw import _C
from fused_adamw.errors import NonfiniteGradientError
from fused_adamw.options import (
    DEFAULT_CONTROL,
    DEFAULT_GUARD,
    DEFAULT_OPTIONS,
    NONFINITE_CHOICES,
    AdamWOptions,
    GradientGuardOptions,
    Scalar,
    StepControl,
)
from fused_adamw.rounding import tensor_seed
from fused_adamw.stats import GradientStats, gradient_stats
from fused_adamw.torch_library import checks
from fused_adamw.torch_library import step as step_op
from fused_adamw.torch_library.library import is_intercepted
from fused_adamw.torch_library.step_options import AmpTensors, StepOptions

_GUARDED = "fused_adamw.guarded_adamw_step"


@dataclass(frozen=True)
class AdamWState:
    """The state of one parameter after ``step`` updates.

    Attributes:
        step: The number of updates that are complete: an int, or a tensor of one element (int64, float32 or
            float64) on the parameter's device. As an int it is exact without end.
        exp_avg: First moment: float32, of the parameter's shape and strides.
        exp_avg_sq: Second moment, likewise.
        max_exp_avg_sq: Running maximum of the second moment, likewise; None without AMSGrad.
        master: The float32 master weight of a float16 or bfloat16 parameter, likewise; None where the
            parameter is float32. (Where it is not, None is taken as the parameter's value.)
    """

    step: Scalar
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None
    master: Tensor | None = None

    @classmethod
    def from_parts(cls, parts: dict[str, Scalar]) -> AdamWState:
        """The state whose ``to_parts()`` these are; so are the states of ``torch.optim.AdamW``.

        Raises:
            ValueError: A part is missing or unknown.
        """
        required = {"step", "exp_avg", "exp_avg_sq"}
        missing = sorted(required - parts.keys())
        allowed = {"max_exp_avg_sq", "master"}
        unknown = sorted(parts.keys() - required - allowed)
        if missing or unknown:
            raise ValueError(
                f"AdamWState: parts {missing} missing, {unknown} unknown; step, exp_avg and exp_avg_sq are "
                "required, max_exp_avg_sq and master are allowed"
            )
        return cls(**parts)  # type: ignore[arg-type]

    def to_parts(self) -> dict[str, Scalar]:
        """The state as a dict of its attributes, without those that are None; nothing is copied."""
        return {name: part for name, part in vars(self).items() if part is not None}


class Update(NamedTuple):
    """What an update returned.

    Attributes:
        parameters: The new parameter, or the old one where nothing was updated.
        state: The new state, or the old one (None before the first update) where nothing was updated.
        updated: Whether the parameter was updated.
    """

    parameters: Tensor
    state: AdamWState | None
    updated: bool


def adamw_step(
    param: Tensor,
    grad: Tensor,
    state: AdamWState | None = None,
    options: AdamWOptions = DEFAULT_OPTIONS,
    control: StepControl = DEFAULT_CONTROL,
) -> Update:
    """One AdamW or AMSGrad update of one tensor, out of place.

    The formula is that of ``csrc/adamw_update.h``; before the first update the state is None and the moments
    are taken as 0. With ``control.skip_update``, or for an empty parameter, nothing is allocated, launched or
    counted and the tensors given are returned.

    Args:
        param: float32, float16 or bfloat16, strided and dense (in any order of its dimensions). The update
            of a 16-bit parameter is that of its master weight, of which the new parameter is the rounding.
        grad: float32, float16 or bfloat16, of the parameter's shape and strides.
        state: What the last update returned, or None.
        options: See ``AdamWOptions``.
        control: See ``StepControl``.

    Returns:
        See ``Update``. New tensors share memory with no input.

    Raises:
        TypeError, ValueError: An argument is refused, as ``torch_library/checks.py`` says.
        RuntimeError: An argument requires grad and gradients are enabled: the update has no derivative.
    """
    given = _step_input(param, grad, state, options, control, 0)
    if control.skip_update or param.numel() == 0:
        step_op.check(given)
        return Update(param, state, updated=False)
    return _updated(given, state, step_op.apply(given))


class Entry(NamedTuple):
    """One parameter of a guarded step, its gradient and its state; see ``adamw_step``."""

    param: Tensor
    grad: Tensor
    state: AdamWState | None = None


SkipReason: TypeAlias = Literal["requested", "empty", "nonfinite"]


class GuardedUpdate(NamedTuple):
    """What a guarded step returned.

    Attributes:
        updates: An ``Update`` per entry.
        stats: The statistics of all gradients; None where the step did not come to look at them.
        updated: Whether any parameter was updated.
        skip_reason: Why none was: "requested" (``control.skip_update``), "empty" (no elements), "nonfinite"
            (a NaN or an infinity in a gradient). None where some were.
    """

    updates: tuple[Update, ...]
    stats: GradientStats | None
    updated: bool
    skip_reason: SkipReason | None


def guarded_adamw_step(
    entries: Sequence[Entry | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, AdamWState | None]],
    options: AdamWOptions = DEFAULT_OPTIONS,
    control: StepControl = DEFAULT_CONTROL,
    guard: GradientGuardOptions = DEFAULT_GUARD,
) -> GuardedUpdate:
    """One update of many tensors, out of place, under the control of their gradients' statistics.

    All entries are validated first. The gradients are unscaled, checked for NaN and infinities, and clipped
    to ``guard.max_norm`` together; they stay as they are, each is read twice, and no other pass over memory
    is made. Reads the report on the host.

    Args:
        entries: Parameter, gradient and state (None before the first update) of each tensor, all on one
            device.
        options: See ``AdamWOptions``.
        control: See ``StepControl``.
        guard: See ``GradientGuardOptions``.

    Raises:
        NonfiniteGradientError: ``guard.nonfinite`` is "error"; names the gradients.
        TypeError, ValueError, RuntimeError: As ``adamw_step``; RuntimeError inside ``torch.compile`` too,
            where no host can read the report: use ``fused_adamw.AdamW`` or the ops there.
    """
    if is_intercepted() or (entries and checks.is_capturing(entries[0][0].device)):
        raise RuntimeError(
            "guarded_adamw_step reads the report of its gradients on the host, which a traced program or a "
            "CUDA graph cannot do; use fused_adamw.AdamW or torch.ops.fused_adamw.adamw_scaled there"
        )
    checks.check_guard(_GUARDED, guard.max_norm, guard.epsilon)
    checks.check_choice(_GUARDED, "nonfinite", guard.nonfinite, NONFINITE_CHOICES)
    all_entries = [Entry(*entry) for entry in entries]
    inputs = [
        _step_input(param, grad, state, options, control, i)
        for i, (param, grad, state) in enumerate(all_entries)
    ]
    for given in inputs:
        step_op.check(given)

    def skipped(reason: SkipReason, stats: GradientStats | None) -> GuardedUpdate:
        updates = tuple(Update(entry.param, entry.state, updated=False) for entry in all_entries)
        return GuardedUpdate(updates, stats, updated=False, skip_reason=reason)

    if control.skip_update:
        return skipped("requested", None)
    if all(entry.param.numel() == 0 for entry in all_entries):
        return skipped("empty", None)
    stats = gradient_stats([entry.grad for entry in all_entries], grad_scale=control.gradient_scale)
    if not stats.finite:
        if guard.nonfinite == "error":
            raise NonfiniteGradientError.naming(
                _GUARDED, [f"grads[{i}]" for i in stats.nonfinite_gradients()]
            )
        return skipped("nonfinite", stats)
    clip = 1.0
    if guard.max_norm is not None:
        clip = _C.clip_coefficient(stats.report.tolist(), guard.max_norm, guard.epsilon)
    results = iter(step_op.update_all([given for given in inputs if given.param.numel() > 0], clip))
    updates = tuple(
        _updated(given, entry.state, next(results))
        if given.param.numel() > 0
        else Update(entry.param, entry.state, updated=False)
        for given, entry in zip(inputs, all_entries, strict=True)
    )
    return GuardedUpdate(updates, stats, updated=True, skip_reason=None)


def _step_input(
    param: Tensor,
    grad: Tensor,
    state: AdamWState | None,
    options: AdamWOptions,
    control: StepControl,
    index: int,
) -> step_op.StepInput:
    moments: dict[str, Tensor | None] = {
        "exp_avg": None if state is None else state.exp_avg,
        "exp_avg_sq": None if state is None else state.exp_avg_sq,
    }
    if options.amsgrad:
        moments["max_exp_avg_sq"] = None if state is None else state.max_exp_avg_sq
    rounding_seed = None
    if param.dtype in checks.ROUNDED_DTYPES:
        moments["master"] = None if state is None else _master(param, state)
        if control.rounding_seed is not None:
            rounding_seed = tensor_seed(control.rounding_seed, index)
    beta1, beta2 = options.betas
    return step_op.StepInput(
        param,
        grad,
        moments,
        0 if state is None else state.step,
        StepOptions(options.lr, beta1, beta2, options.weight_decay, options.eps, options.maximize),
        AmpTensors(control.gradient_scale, None),
        rounding_seed,
    )


def _master(param: Tensor, state: AdamWState) -> Tensor:
    return param.to(torch.float32) if state.master is None else state.master


def _updated(given: step_op.StepInput, state: AdamWState | None, results: tuple[Tensor, ...]) -> Update:
    param, *moments = results
    parts = dict(zip(given.moments, moments, strict=True))
    if state is not None and state.max_exp_avg_sq is not None:
        parts.setdefault("max_exp_avg_sq", state.max_exp_avg_sq)  # carried on without AMSGrad
    return Update(param, AdamWState(given.step + 1, **parts), updated=True)
