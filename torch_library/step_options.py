"""The options of a step as an op receives them, and how they are written in its schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_adamw.options import DEFAULT_OPTIONS, Scalar
from fused_adamw.torch_library import checks

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
    """Numbers, or tensors of one element."""

    lr: Scalar
    beta1: Scalar
    beta2: Scalar
    weight_decay: float
    eps: float
    maximize: bool

    def tensors(self) -> dict[str, Tensor]:
        """Those of the options that are tensors, by their names."""
        values = (("lr", self.lr), ("beta1", self.beta1), ("beta2", self.beta2))
        return {name: value for name, value in values if isinstance(value, Tensor)}

    def on(self, device: torch.device) -> StepOptions:
        """The options with their tensors where the parameters are."""
        if not self.tensors():
            return self
        lr, beta1, beta2 = (_on(value, device) for value in (self.lr, self.beta1, self.beta2))
        return self._replace(lr=lr, beta1=beta1, beta2=beta2)

    def check_tensors(self, op: str, device: torch.device) -> None:
        """Checks what can be known without the values, which a fake does not have."""
        for name, value in self.tensors().items():
            check_option_tensor(op, name, value, device)

    def check_values(self, op: str) -> None:
        """Checks the values that the host can read without waiting for a device."""
        checks.check_options(
            op,
            lr=host_value(self.lr),
            beta1=host_value(self.beta1),
            beta2=host_value(self.beta2),
            weight_decay=self.weight_decay,
            eps=self.eps,
        )


class AmpTensors(NamedTuple):
    """What a gradient scaler hands to a step: the scale to divide out, and whether to skip."""

    grad_scale: Scalar | None
    found_inf: Tensor | None

    def on(self, device: torch.device) -> AmpTensors:
        """The same where the parameters are; a scaler keeps one scale for all devices."""
        scale = None if self.grad_scale is None else _on(self.grad_scale, device)
        found_inf = None if self.found_inf is None else moved(self.found_inf, device)
        return AmpTensors(scale, found_inf)

    def check_tensors(self, op: str, device: torch.device) -> None:
        """Checks what can be known without the values, which a fake does not have."""
        check_option_tensor(op, "grad_scale", self.grad_scale, device)
        check_option_tensor(op, "found_inf", self.found_inf, device, checks.FOUND_INF_DTYPES)

    def check_values(self, op: str) -> None:
        """Checks the scale, where the host can read it without waiting for a device."""
        scale = None if self.grad_scale is None else host_value(self.grad_scale)
        if scale is not None:
            checks.check_grad_scale(op, scale)

    def scale_or_one(self) -> Scalar:
        """The scale as it was given; 1 where there is none."""
        return 1.0 if self.grad_scale is None else self.grad_scale

    def scale_number(self) -> float:
        """The value of the scale; 1 where there is none."""
        return float(self.scale_or_one())

    def skip(self) -> bool:
        """Whether the scaler found a gradient that is not finite; waits for the device."""
        return self.found_inf is not None and bool(self.found_inf)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on this device; one without a value is left to be refused.

    Copied without waiting, but to the CPU: it would be read there before the copy has come.
    """
    if tensor.device == device or tensor.is_meta:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")


def _on(value: Scalar, device: torch.device) -> Scalar:
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "cpu" != device.type and value.numel() == 1 and not torch.compiler.is_compiling():
        return value.item()  # a number needs no copy to the device
    return moved(value, device)


def host_value(value: Scalar) -> float | None:
    """The value, or None where reading it would wait for a device."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return None
    return float(value)


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
