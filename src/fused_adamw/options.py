"""Plain-data options of the functional API, and the defaults that every layer shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Scalar: TypeAlias = float | Tensor
"""A Python number, or a tensor of one element (shape ``()`` or ``(1,)``), float32 or float64."""


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
    """

    gradient_scale: Scalar = 1.0
    skip_update: bool = False


DEFAULT_OPTIONS = AdamWOptions()
