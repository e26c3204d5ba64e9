"""The functional API: an update that returns new tensors and leaves its inputs as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fused_adamw.options import DEFAULT_OPTIONS, AdamWOptions, Scalar, StepControl
from fused_adamw.torch_library import step as step_op
from fused_adamw.torch_library.library import AmpTensors, StepOptions


@dataclass(frozen=True)
class AdamWState:
    """The state of one parameter after ``step`` updates.

    Attributes:
        step: The number of updates that are complete: an int, or a tensor of one element (int64, float32 or
            float64) on the parameter's device. As an int it is exact without end.
        exp_avg: First moment: float32, of the parameter's shape and strides.
        exp_avg_sq: Second moment, likewise.
        max_exp_avg_sq: Running maximum of the second moment, likewise; None without AMSGrad.
    """

    step: Scalar
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None

    @classmethod
    def from_parts(cls, parts: dict[str, Scalar]) -> AdamWState:
        """The state whose ``to_parts()`` these are; so are the states of ``torch.optim.AdamW``.

        Raises:
            ValueError: A part is missing or unknown.
        """
        required = {"step", "exp_avg", "exp_avg_sq"}
        missing = sorted(required - parts.keys())
        unknown = sorted(parts.keys() - required - {"max_exp_avg_sq"})
        if missing or unknown:
            raise ValueError(
                f"AdamWState: parts {missing} missing, {unknown} unknown; step, exp_avg and exp_avg_sq are "
                "required, max_exp_avg_sq is allowed"
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
    control: StepControl = StepControl(),  # noqa: B008 (frozen)
) -> Update:
    """One AdamW or AMSGrad update of one tensor, out of place.

    The formula is that of ``csrc/adamw_update.h``; before the first update the state is None and the moments
    are taken as 0. With ``control.skip_update``, or for an empty parameter, nothing is allocated, launched or
    counted and the tensors given are returned.

    Args:
        param: float32, strided and dense (in any order of its dimensions).
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
    moments: dict[str, Tensor | None] = {
        "exp_avg": None if state is None else state.exp_avg,
        "exp_avg_sq": None if state is None else state.exp_avg_sq,
    }
    if options.amsgrad:
        moments["max_exp_avg_sq"] = None if state is None else state.max_exp_avg_sq
    beta1, beta2 = options.betas
    step_options = StepOptions(options.lr, beta1, beta2, options.weight_decay, options.eps, options.maximize)
    given = step_op.StepInput(
        param,
        grad,
        moments,
        0 if state is None else state.step,
        step_options,
        AmpTensors(control.gradient_scale, None),
    )
    if control.skip_update or param.numel() == 0:
        step_op.check(given)
        return Update(param, state, updated=False)
    results = step_op.apply(given)
    # Without AMSGrad a maximum that the state carries is carried on.
    maximum = results[3] if options.amsgrad else (None if state is None else state.max_exp_avg_sq)
    return Update(results[0], AdamWState(given.step + 1, results[1], results[2], maximum), updated=True)
