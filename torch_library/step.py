"""``fused_adamw::step`` and ``.amsgrad``: one AdamW or AMSGrad update of one tensor, out of place.

Returns the new ``param``, ``exp_avg``, ``exp_avg_sq`` and, with AMSGrad, ``max_exp_avg_sq``: new float32
tensors of the parameter's shape and strides. Inputs are only read, and may share memory with one another.
``step`` is the number of updates that came before; the caller counts on. Before the first update the moments
may be None: they are taken as 0 and nothing is read or zeroed for them.

``grad_scale`` is divided out of the gradient; where ``found_inf`` is not 0, the results are copies of the
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_adamw import _C
from fused_adamw.options import DEFAULT_OPTIONS, Scalar
from fused_adamw.torch_library import checks
from fused_adamw.torch_library.library import backend, is_intercepted, register
from fused_adamw.torch_library.step_options import (
    OPTIONS_AS_NUMBERS,
    OPTIONS_AS_TENSORS,
    AmpTensors,
    StepOptions,
    check_option_tensor,
    scalar_tensor,
    split_options,
    tensor_arguments,
)

OP = "fused_adamw::step"


class StepInput(NamedTuple):
    """The arguments of an update; ``moments`` maps names to tensors, in the order of the results."""

    param: Tensor
    grad: Tensor
    moments: dict[str, Tensor | None]
    step: Scalar
    options: StepOptions
    amp: AmpTensors

    def check_metadata(self) -> None:
        """Checks all that can be known without values, which a fake does not have."""
        device = self.param.device
        checks.refuse_autograd(OP, {"param": self.param, "grad": self.grad, **self.moments})
        checks.check_step_tensors(OP, self.param, self.grad, self.moments)
        check_option_tensor(OP, "step", self.step, device, checks.STEP_DTYPES)
        self.options.check_tensors(OP, device)
        self.amp.check_tensors(OP, device)

    def check_values(self) -> None:
        """Checks what the host can read without waiting for a device."""
        checks.check_backend(OP, self.param.device)
        checks.refuse_frozen_count(OP, self.step, self.param.device)
        if not isinstance(self.step, Tensor):
            checks.check_step_count(OP, "step", self.step)
        elif self.step.device.type == "cpu":
            checks.check_step_count(OP, "step", self.step.item())
        self.options.check_values(OP)
        self.amp.check_values(OP)


def apply(given: StepInput) -> tuple[Tensor, ...]:
    """The results of the op, through the dispatcher where a compiler, a mode or a subclass must see it."""
    param, grad, moments, step, options, amp = given
    tensors = [param, grad, *(tensor for tensor in moments.values() if tensor is not None)]
    if not is_intercepted() and _C.only_plain_tensors([tensors]):
        return update(given)
    op = torch.ops.fused_adamw.step
    results: tuple[Tensor, ...] = (op.amsgrad_tensor if len(moments) == 3 else op.tensor)(
        param,
        grad,
        *moments.values(),
        scalar_tensor(step, param.device),
        **tensor_arguments(options, amp, param.device),
    )
    return results


def check(given: StepInput) -> None:
    """Raises what ``apply`` would raise, and computes nothing."""
    if torch.compiler.is_dynamo_compiling():
        return  # Dynamo cannot trace all checks; where an op is called, its fake makes them
    given.check_metadata()
    if not is_intercepted():
        given.check_values()


def update(given: StepInput) -> tuple[Tensor, ...]:
    """The implementation."""
    given.check_metadata()  # before the value of found_inf is read
    if backend(given.param.device).must_skip(given.amp, None):
        given.check_values()
        return (
            given.param.clone(),
            *(
                torch.zeros_like(given.param) if tensor is None else tensor.clone()
                for tensor in given.moments.values()
            ),
        )
    return update_all([given])[0]


def update_all(inputs: Sequence[StepInput], clip: float = 1.0) -> list[tuple[Tensor, ...]]:
    """The results of many updates with the same options, at once; ``clip`` multiplies the gradients."""
    olds, results, news = [], [], []
    for given in inputs:
        given.check_metadata()
        given.check_values()
        moments = [[] if tensor is None else [tensor] for tensor in given.moments.values()]
        old = [[given.param], [given.grad], *moments]
        try:
            olds.append(_C.TensorTable(OP, old, [False] * len(old)))
        except ValueError:
            checks.refuse_missing_storage(OP, {"param": given.param, "grad": given.grad, **given.moments})
            raise
    for given in inputs:
        new = _new_results(given)
        results.append(new)
        new_lists = [[new[0]], [], *([result] for result in new[1:])]
        news.append(_C.TensorTable(OP, new_lists, [True] * len(new_lists)))
    first = inputs[0]
    backend(first.param.device).step_out_of_place(
        olds, news, first.options, first.amp, [given.step for given in inputs], clip
    )
    return results


def fake_update(given: StepInput) -> tuple[Tensor, ...]:
    """The results of ``update`` without their values."""
    given.check_metadata()
    return _new_results(given)


def _new_results(given: StepInput) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(given.param) for _ in range(1 + len(given.moments)))


def _operators(
    run: Callable[[StepInput], tuple[Tensor, ...]],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def step(
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor | None,
        exp_avg_sq: Tensor | None,
        step: Scalar,
        lr: Scalar = DEFAULT_OPTIONS.lr,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        return run(StepInput(param, grad, moments, step, *split_options(lr, **options)))

    def step_amsgrad(
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor | None,
        exp_avg_sq: Tensor | None,
        max_exp_avg_sq: Tensor | None,
        step: Scalar,
        lr: Scalar = DEFAULT_OPTIONS.lr,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "max_exp_avg_sq": max_exp_avg_sq}
        return run(StepInput(param, grad, moments, step, *split_options(lr, **options)))

    return step, step_amsgrad


_step, _step_amsgrad = _operators(update)
_step_fake, _step_amsgrad_fake = _operators(fake_update)

_INPUTS = "Tensor param, Tensor grad, Tensor? exp_avg, Tensor? exp_avg_sq"
_RESULTS = "Tensor new_param, Tensor new_exp_avg, Tensor new_exp_avg_sq"
_MAXIMUM = "Tensor? max_exp_avg_sq"

for _schema, _implementation, _fake in (
    (f"step({_INPUTS}, SymInt step, {OPTIONS_AS_NUMBERS}) -> ({_RESULTS})", _step, _step_fake),
    (f"step.tensor({_INPUTS}, Tensor step, {OPTIONS_AS_TENSORS}) -> ({_RESULTS})", _step, _step_fake),
    (
        f"step.amsgrad({_INPUTS}, {_MAXIMUM}, SymInt step, {OPTIONS_AS_NUMBERS})"
        f" -> ({_RESULTS}, Tensor new_max_exp_avg_sq)",
        _step_amsgrad,
        _step_amsgrad_fake,
    ),
    (
        f"step.amsgrad_tensor({_INPUTS}, {_MAXIMUM}, Tensor step, {OPTIONS_AS_TENSORS})"
        f" -> ({_RESULTS}, Tensor new_max_exp_avg_sq)",
        _step_amsgrad,
        _step_amsgrad_fake,
    ),
):
    register(_schema, implementation=_implementation, fake=_fake)
