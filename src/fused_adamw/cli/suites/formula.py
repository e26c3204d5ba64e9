"""AdamW and AMSGrad in float64 NumPy, from the papers: independent of every kernel and of torch.

Loshchilov and Hutter (2019), algorithm 2, the decay applied to the parameter first; Reddi, Kale and Kumar
(2018), with the maximum of the second moment before its bias correction, as torch.optim.AdamW documents both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# float64 of any shape
Array = Any


class Formula:
    """One parameter and its state; the options are those of ``torch.optim.AdamW``."""

    def __init__(
        self,
        param: Array,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        self.param = np.array(param, dtype=np.float64)
        self.exp_avg = np.zeros_like(self.param)
        self.exp_avg_sq = np.zeros_like(self.param)
        self.max_exp_avg_sq = np.zeros_like(self.param)
        self.steps = 0
        self._lr, self._betas, self._eps, self._weight_decay = lr, betas, eps, weight_decay
        self._amsgrad, self._maximize = amsgrad, maximize

    def update(self, grad: Array) -> None:
        """One step."""
        beta1, beta2 = self._betas
        g = np.asarray(grad, dtype=np.float64) * (-1.0 if self._maximize else 1.0)
        self.steps += 1
        self.param = self.param * (1.0 - self._lr * self._weight_decay)
        self.exp_avg = beta1 * self.exp_avg + (1.0 - beta1) * g
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1.0 - beta2) * g * g
        self.max_exp_avg_sq = np.maximum(self.max_exp_avg_sq, self.exp_avg_sq)
        second = self.max_exp_avg_sq if self._amsgrad else self.exp_avg_sq
        corrected = self.exp_avg / (1.0 - beta1**self.steps)
        denominator = np.sqrt(second / (1.0 - beta2**self.steps)) + self._eps
        self.param = self.param - self._lr * corrected / denominator


def clip_coefficient(grads: Sequence[Array], max_norm: float) -> float:
    """What ``torch.nn.utils.clip_grad_norm_`` multiplies gradients by."""
    norm = float(np.sqrt(sum(float((np.asarray(grad, dtype=np.float64) ** 2).sum()) for grad in grads)))
    return min(1.0, max_norm / (norm + 1e-6))
