"""The guarded step with clipping on the CPU beside clip_grad_norm_ + torch.optim.AdamW(fused=True).

    python benchmarks/adamw_scaled.py [--output benchmarks/results/adamw_scaled-cpu.json]

Bytes per parameter: the time divided by the number of parameters, times the rate of an in-place pass over
memory in the same run. A guarded step must move 32: it reads the gradients twice. torch moves 40 where it
clips: it also rewrites them. max_norm lies above the norm here, so that torch, whose clipping multiplies by 1
then, works on the same gradients in each call.
"""

from __future__ import annotations

import torch

import fused_adamw
from optimizers import Params, Step, compare

MAX_NORM = 1e6


def ours(params: Params) -> Step:
    return fused_adamw.AdamW(params, max_grad_norm=MAX_NORM).step


def theirs(params: Params) -> Step:
    optimizer = torch.optim.AdamW(params, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    return step


if __name__ == "__main__":
    compare(__doc__, {"clipped AdamW": {"fused_adamw": ours, "clip_grad_norm_ + torch fused": theirs}})
