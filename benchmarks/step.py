"""The plain step on the CPU beside torch.optim.AdamW(fused=True), torch's best path there.

    python benchmarks/step.py [--output benchmarks/results/step-cpu.json]

Bytes per parameter: the time divided by the number of parameters, times the rate of an in-place pass over
memory in the same run. A step must move 28 (36 with AMSGrad).
"""

from __future__ import annotations

from functools import partial

import torch

import fused_adamw
from optimizers import Params, Step, compare


def ours(amsgrad: bool, params: Params) -> Step:
    return fused_adamw.AdamW(params, amsgrad=amsgrad).step


def theirs(amsgrad: bool, params: Params) -> Step:
    return torch.optim.AdamW(params, amsgrad=amsgrad, fused=True).step


if __name__ == "__main__":
    compare(
        __doc__,
        {
            case: {"fused_adamw": partial(ours, amsgrad), "torch fused": partial(theirs, amsgrad)}
            for case, amsgrad in (("AdamW", False), ("AMSGrad", True))
        },
    )
