"""``fused_adamw::step``: one AdamW or AMSGrad update of one tensor, out of place.

Returns the new ``param``, ``exp_avg``, ``exp_avg_sq`` and, with ``.amsgrad``, ``max_exp_avg_sq``: new float32
tensors of the parameter's shape and strides. Inputs are only read, and may share memory with one another.
``step`` is the number of updates that came before; the caller counts on. Before the first update the moments
may be None: they are taken as 0 and nothing is read or zeroed for them.

``grad_scale`` is divided out of the gradient; where ``found_inf`` is not 0, the results are copies of the
inputs.

With ``.master`` (``.master_amsgrad``) the parameter is float16 or bfloat16, and the formula updates its
master weight, as in ``step_``: the new parameter has the old one's dtype, and a new master weight is returned
last. A master weight of None, before the first update, is taken as the parameter, and the new one is float32.
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
    """The arguments of an update; ``moments`` maps names to tensors, in the order of the results.

    A parameter of 16 bits has a "master" among them.
    """

    param: Tensor
    grad: Tensor
    moments: dict[str, Tensor | None]
    step: Scalar
    options: StepOptions
    amp: AmpTensors
    rounding_seed: int | None = None

    def check_metadata(self) -> None:
        """Checks all that can be known without values, which a fake does not have."""
        device = self.param.device
        checks.refuse_autograd(OP, {"param": self.param, "grad": self.grad, **self.moments})
        checks.check_step_tensors(OP, self.param, self.grad, self.moments, self.rounding_seed)
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
    param, grad, moments, step, options, amp, rounding_seed = given
    tensors = [param, grad, *(tensor for tensor in moments.values() if tensor is not None)]
    if not is_intercepted() and _C.only_plain_tensors([tensors]):
        return update(given)
    names = [name for name, part in _OVERLOAD_PARTS if part in moments]
    seed = {} if rounding_seed is None else {"rounding_seed": rounding_seed}
    results: tuple[Tensor, ...] = getattr(torch.ops.fused_adamw.step, "_".join([*names, "tensor"]))(
        param,
        grad,
        *moments.values(),
        scalar_tensor(step, param.device),
        **tensor_arguments(options, amp, param.device),
        **seed,
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
                _initial(name, given.param) if tensor is None else tensor.clone()
                for name, tensor in given.moments.items()
            ),
        )
    return update_all([given])[0]


def update_all(inputs: Sequence[StepInput], clip: float = 1.0) -> list[tuple[Tensor, ...]]:
    """The results of many updates with the same options, at once; ``clip`` multiplies the gradients."""
    olds, results, news = [], [], []
    for given in inputs:
        given.check_metadata()
        given.check_values()
        try:
            olds.append(_table(given, given.param, given.moments, written=False))
        except ValueError:
            checks.refuse_missing_storage(OP, {"param": given.param, "grad": given.grad, **given.moments})
            raise
    for given in inputs:
        param, *moments = _new_results(given)
        results.append((param, *moments))
        news.append(_table(given, param, dict(zip(given.moments, moments, strict=True)), written=True))
    first = inputs[0]
    backend(first.param.device).step_out_of_place(
        olds, news, first.options, first.amp, [given.step for given in inputs], clip
    )
    return results


def fake_update(given: StepInput) -> tuple[Tensor, ...]:
    """The results of ``update`` without their values."""
    given.check_metadata()
    return _new_results(given)


# The list of a step's table that each moment is in.
_LISTS = {
    "exp_avg": "exp_avgs",
    "exp_avg_sq": "exp_avg_sqs",
    "max_exp_avg_sq": "max_exp_avg_sqs",
    "master": "masters",
}


def _table(
    given: StepInput, param: Tensor, moments: dict[str, Tensor | None], *, written: bool
) -> _C.TensorTable:
    lists: dict[str, list[Tensor]] = {name: [] for name in StepLists._fields}
    lists["params"] = [param]
    lists["grads"] = [] if written else [given.grad]
    for name, tensor in moments.items():
        lists[_LISTS[name]] = [] if tensor is None else [tensor]
    seeds = [] if given.rounding_seed is None else [given.rounding_seed]
    return _C.TensorTable(OP, list(lists.values()), [written] * len(lists), seeds)


def _new_results(given: StepInput) -> tuple[Tensor, ...]:
    dtypes = [torch.float32 if tensor is None else tensor.dtype for tensor in given.moments.values()]
    return tuple(torch.empty_like(given.param, dtype=dtype) for dtype in (given.param.dtype, *dtypes))


def _initial(name: str, param: Tensor) -> Tensor:
    """What a moment is taken as before the first update."""
    return param.to(torch.float32) if name == "master" else torch.zeros_like(param, dtype=torch.float32)


# The words of an overload's name, and the part of the state that makes the overload have each.
_OVERLOAD_PARTS = (("master", "master"), ("amsgrad", "max_exp_avg_sq"))


def _operator(parts: Sequence[str], run: Callable[[StepInput], tuple[Tensor, ...]]) -> Callable[..., Any]:
    """An op whose arguments are param, grad, the parts of the state and the step, and then options."""

    def step(param: Tensor, grad: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        moments = dict(zip(parts, arguments, strict=False))
        # The dispatcher passes what has no default, or another value than it, by position.
        step, lr, *_ = *arguments[len(parts) :], DEFAULT_OPTIONS.lr
        rounding_seed = options.pop("rounding_seed", None)
        return run(StepInput(param, grad, moments, step, *split_options(lr, **options), rounding_seed))

    return step


for _words in ((), ("amsgrad",), ("master",), ("master", "amsgrad")):
    _parts = ["exp_avg", "exp_avg_sq", *(part for word, part in reversed(_OVERLOAD_PARTS) if word in _words)]
    _seed = ", int? rounding_seed=None" if "master" in _words else ""
    for _step, _options in (("SymInt step", OPTIONS_AS_NUMBERS), ("Tensor step", OPTIONS_AS_TENSORS)):
        _suffixes = [*_words, "tensor"] if _options is OPTIONS_AS_TENSORS else _words
        _inputs = ", ".join(["Tensor param, Tensor grad", *(f"Tensor? {part}" for part in _parts), _step])
        _results = ", ".join(f"Tensor new_{part}" for part in ("param", *_parts))
        _name = ".".join(filter(None, ("step", "_".join(_suffixes))))
        register(
            f"{_name}({_inputs}, {_options}{_seed}) -> ({_results})",
            implementation=_operator(_parts, update),
            fake=_operator(_parts, fake_update),
        )
