"""The namespace of the ops, and how an op is registered in it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_adamw import _C
from fused_adamw.options import DEFAULT_OPTIONS, Scalar
from fused_adamw.torch_library import checks

NAMESPACE = "fused_adamw"

_library = torch.library.Library(NAMESPACE, "DEF")

_C.initialize(torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, torch.nn.Parameter)


def register(schema: str, *, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Defines an op with its implementation and its fake.

    ``torch.library.Library`` rather than ``torch.library.custom_op``: a call with hundreds of tensors costs a
    fifth. What ``custom_op`` would do on top is done here and in ``checks.py``: implementations bump the
    version counters of what they write, and refuse tensors that autograd would have to follow.

    The kernels read tensors of one call at equal strides, so a compiler must keep those that it traced with.

    The implementation stands for every backend: empty lists, which have none, reach it, and so do sparse
    tensors and devices without kernels, which the checks refuse in a sentence.
    """
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    name = schema.partition("(")[0]
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


# The options at the end of each step op's schema; one overload takes numbers, the other tensors of one
# element (0-dim or of shape (1,)) for those that may change from step to step.
_SHARED_OPTIONS = (
    f"float weight_decay={DEFAULT_OPTIONS.weight_decay}, float eps={DEFAULT_OPTIONS.eps}, "
    f"bool maximize={DEFAULT_OPTIONS.maximize}, Tensor? grad_scale=None, Tensor? found_inf=None"
)
OPTIONS_AS_NUMBERS = (
    f"float lr={DEFAULT_OPTIONS.lr}, *, float beta1={DEFAULT_OPTIONS.betas[0]}, "
    f"float beta2={DEFAULT_OPTIONS.betas[1]}, {_SHARED_OPTIONS}"
)
OPTIONS_AS_TENSORS = f"Tensor lr, *, Tensor beta1, Tensor beta2, {_SHARED_OPTIONS}"


class StepOptions(NamedTuple):
    """The options of a step as an op receives them: numbers, or tensors of one element."""

    lr: Scalar
    beta1: Scalar
    beta2: Scalar
    weight_decay: float
    eps: float
    maximize: bool

    def check_tensors(self, op: str, device: torch.device) -> None:
        """Checks what can be known without the values, which a fake does not have."""
        for name in ("lr", "beta1", "beta2"):
            check_option_tensor(op, name, getattr(self, name), device)

    def numbers(self, op: str, grad_scale: float, clip: float = 1.0) -> _C.StepOptions:
        """The values, checked. Reads CPU tensors only, so it waits for no device."""
        lr, beta1, beta2 = float(self.lr), float(self.beta1), float(self.beta2)
        checks.check_options(
            op, lr=lr, beta1=beta1, beta2=beta2, weight_decay=self.weight_decay, eps=self.eps
        )
        return _C.StepOptions(lr, beta1, beta2, self.weight_decay, self.eps, grad_scale, clip, self.maximize)


def check_option_tensor(
    op: str,
    name: str,
    value: Scalar | None,
    device: torch.device,
    dtypes: Sequence[torch.dtype] = checks.SCALAR_DTYPES,
) -> None:
    """Refuses a tensor in the place of a number that is no single number on the parameters' device."""
    if isinstance(value, Tensor):
        checks.refuse_autograd(op, {name: value})
        checks.check_scalar_tensor(op, name, value, dtypes)
        checks.check_same_device(op, name, value, device)


class AmpTensors(NamedTuple):
    """What a gradient scaler hands to a step: the scale to divide out, and whether to skip."""

    grad_scale: Scalar | None
    found_inf: Tensor | None

    def check_tensors(self, op: str, device: torch.device) -> None:
        """Checks what can be known without the values, which a fake does not have."""
        check_option_tensor(op, "grad_scale", self.grad_scale, device)
        check_option_tensor(op, "found_inf", self.found_inf, device, checks.FOUND_INF_DTYPES)

    def scale(self, op: str) -> float:
        """The value of the scale, checked; 1 where there is none."""
        value = 1.0 if self.grad_scale is None else float(self.grad_scale)
        checks.check_grad_scale(op, value)
        return value

    def skip(self) -> bool:
        """Whether the scaler found a gradient that is not finite."""
        return self.found_inf is not None and bool(self.found_inf)


def split_options(
    lr: Scalar,
    *,
    beta1: Scalar = DEFAULT_OPTIONS.betas[0],
    beta2: Scalar = DEFAULT_OPTIONS.betas[1],
    weight_decay: float = DEFAULT_OPTIONS.weight_decay,
    eps: float = DEFAULT_OPTIONS.eps,
    maximize: bool = DEFAULT_OPTIONS.maximize,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> tuple[StepOptions, AmpTensors]:
    """The options of an op call; the dispatcher leaves out those that have their default value."""
    return (
        StepOptions(lr, beta1, beta2, weight_decay, eps, maximize),
        AmpTensors(grad_scale, found_inf),
    )


def read_table(
    op: str,
    lists: Sequence[Sequence[Tensor]],
    written: Sequence[bool],
    check: Callable[[], None],
) -> _C.TensorTable:
    """Reads the tensors of a call; runs ``check`` where tensors laid out like these never passed it."""
    try:
        table = _C.TensorTable(op, lists, written)
    except Exception:
        check()  # what cannot be read is refused there, in a sentence
        raise
    if not table.layout_known():
        check()
        table.remember_layout()
    return table


def refuse_overlap(
    op: str,
    tables: Sequence[_C.TensorTable],
    names: Sequence[str],
    *,
    elementwise: bool = False,
) -> None:
    """Refuses a written tensor that shares memory with another; ``names`` are those of a table's lists.

    ``elementwise``: a tensor that is read may be exactly one that is written, at the same index.
    """
    overlap = _C.find_overlap(tables, elementwise)
    if overlap is not None:
        written, other = (
            f"{names[field]}[{i}]" + (f" of group {table}" if len(tables) > 1 else "")
            for table, field, i in overlap
        )
        raise checks.overlap_error(op, written, other)


def bump_versions(written: Iterable[Sequence[Tensor]]) -> None:
    """Tells autograd that these are about to change; ops of ``Library.impl`` have to do so themselves."""
    for tensors in written:
        torch.autograd.graph.increment_version(tensors)


def is_intercepted() -> bool:
    """Whether something watches or replaces op calls, so that they must go through the dispatcher.

    That is: a tracing compiler, a dispatch or function mode (FakeTensorMode for one), a functorch transform.
    Where nothing does, an optimizer calls an op's implementation itself: passing 2,000 tensors through the
    dispatcher and back costs more than reading them.
    """
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def scalar_tensor(value: Scalar, device: torch.device) -> Tensor:
    """A float64 tensor of one element for the ops' tensor overloads; a tensor is returned as it is."""
    if isinstance(value, Tensor):
        return value
    # A product, not torch.full: a float that changes from call to call becomes an input of a compiled graph
    # only where a tensor operation takes it; as the argument of a factory it would be a constant, and each
    # new value a new compilation. The product with 1 is exact.
    return torch.ones((), dtype=torch.float64, device=device) * value


def tensor_arguments(options: StepOptions, amp: AmpTensors, device: torch.device) -> dict[str, Any]:
    """The options as the keyword arguments of an op's tensor overload."""
    return {
        "lr": scalar_tensor(options.lr, device),
        "beta1": scalar_tensor(options.beta1, device),
        "beta2": scalar_tensor(options.beta2, device),
        "weight_decay": options.weight_decay,
        "eps": options.eps,
        "maximize": options.maximize,
        "grad_scale": None if amp.grad_scale is None else scalar_tensor(amp.grad_scale, device),
        "found_inf": amp.found_inf,
    }


def cpu_threads() -> int:
    """The number of threads that torch's own CPU operators use."""
    threads = torch.get_num_threads()
    if threads > 1 and not _C.has_openmp_runtime():
        _warn_of_one_thread()
    return threads


@functools.cache
def _warn_of_one_thread() -> None:
    warnings.warn(
        "fused_adamw found no OpenMP runtime in torch's libraries: its CPU kernels use one thread",
        stacklevel=2,
    )
