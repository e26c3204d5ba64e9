"""Plain-data options of the functional API, and the defaults that every layer shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch import Tensor

Scalar: TypeAlias = float | Tensor
"""A Python number, or a tensor of one element (shape ``()`` or ``(1,)``), float32 or float64."""


Nonfinite: TypeAlias = Literal["skip", "error"]
StaleMaster: TypeAlias = Literal["resync", "error"]


@dataclass(frozen=True)
class AdamWOptions:
    """The options of an update; the defaults are those of ``torch.optim.AdamW``.

    Attributes:
        lr: Learning rate, at least 0.
        betas: Decay rates of the first and the second moment, each in ``[0, 1)``.
        eps: Added to the denominator, at least 0.
        weight_decay: Decoupled weight decay, at least 0.
        amsgrad: Divide by the running maximum of the second moment.
        maximize: Ascend instead of descend.

    ``lr`` and the betas may be tensors of one element, so that a compiled program does not depend on their
    values. A float64 tensor gives the same bits as the float it was made from; a float32 tensor holds, and
    gives, the rounded value. Values are checked when they are used.
    """

    lr: Scalar = 1e-3
    betas: tuple[Scalar, Scalar] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class StepControl:
    """What a training loop says of one update.

    Attributes:
        gradient_scale: The factor that the gradients were multiplied by; the update divides it out. Positive,
            with a reciprocal that float32 can hold. A number or a float32 tensor of one element.
        skip_update: Leave the parameter and its state as they are.
        rounding_seed: Round master weights to 16-bit parameters stochastically, by random bits that are a
            function of this number, the parameter's place among those of the call, the element and the
            number of the update. None: to the nearest number.
    """

    gradient_scale: Scalar = 1.0
    skip_update: bool = False
    rounding_seed: int | None = None


@dataclass(frozen=True)
class GradientGuardOptions:
    """How a guarded step treats gradients that are too large or not finite.

    Attributes:
        max_norm: The norm of all gradients together, after unscaling, that they are clipped to; at least 0.
            None: no clipping.
        epsilon: Added to the norm before ``max_norm`` is divided by it, as torch's ``clip_grad_norm_`` does.
        nonfinite: What a NaN or an infinity in any gradient, as it is or after unscaling, does: "skip" leaves
            everything as it is, "error" also raises. (``torch.nn.utils.clip_grad_norm_`` would multiply all
            gradients by 0 or NaN.)
    """

    max_norm: float | None = None
    epsilon: float = 1e-6
    nonfinite: Nonfinite = "skip"


DEFAULT_OPTIONS = AdamWOptions()
DEFAULT_CONTROL = StepControl()
DEFAULT_GUARD = GradientGuardOptions()

NONFINITE_CHOICES = get_args(Nonfinite)
STALE_MASTER_CHOICES = get_args(StaleMaster)
