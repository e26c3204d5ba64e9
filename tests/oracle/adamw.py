"""The AdamW and AMSGrad update in float64, from the papers, for expected values.

Loshchilov and Hutter (2019), algorithm 2, with decoupled decay applied to the parameter first, and Reddi,
Kale and Kumar (2018) with the maximum of the uncorrected second moment, as torch.optim.AdamW documents both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Oracle:
    """One parameter and its state in float64; ``update`` advances them."""

    param: Tensor
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    maximize: bool = False
    step: int = 0
    exp_avg: Tensor = field(init=False)
    exp_avg_sq: Tensor = field(init=False)
    max_exp_avg_sq: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.param = self.param.detach().to(torch.float64).clone()
        self.exp_avg = torch.zeros_like(self.param)
        self.exp_avg_sq = torch.zeros_like(self.param)
        self.max_exp_avg_sq = torch.zeros_like(self.param)

    def update(self, grad: Tensor, grad_scale: float = 1.0) -> None:
        beta1, beta2 = self.betas
        g = grad.to(torch.float64) / grad_scale
        if self.maximize:
            g = -g
        self.step += 1
        self.param = self.param * (1 - self.lr * self.weight_decay)
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1) * g
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * g * g
        self.max_exp_avg_sq = torch.maximum(self.max_exp_avg_sq, self.exp_avg_sq)
        second_moment = self.max_exp_avg_sq if self.amsgrad else self.exp_avg_sq
        corrected_avg = self.exp_avg / (1 - beta1**self.step)
        corrected_sq = second_moment / (1 - beta2**self.step)
        self.param = self.param - self.lr * corrected_avg / (corrected_sq.sqrt() + self.eps)
