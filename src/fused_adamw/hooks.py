"""How ``step`` is called: with the hooks of torch.optim, and a mark in profiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.optim import optimizer as torch_optimizer

P = ParamSpec("P")
R = TypeVar("R")


def with_hooks(step: Callable[P, R]) -> Callable[P, R]:
    """What ``torch.optim.Optimizer.profile_hook_step`` makes of a ``step``, at a tenth of its cost.

    That marks the step for profiles, which takes as long as the kernel launches of a whole model. So it is
    called where Python knows of a profile or a hook. Elsewhere the mark is the fast one of torch, for
    profiles taken from outside; an ExecutionTraceObserver without a profile does not see it.
    """
    observed_step = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def unobserved_step(*args: P.args, **kwargs: P.kwargs) -> R:
        optimizer: Any = args[0]
        if torch.compiler.is_compiling() or _is_observed(optimizer):
            return observed_step(*args, **kwargs)
        with _RecordFunctionFast(f"Optimizer.step#{type(optimizer).__name__}.step"):
            return step(*args, **kwargs)

    return unobserved_step


def _is_observed(optimizer: Any) -> bool:
    return bool(
        torch.autograd.profiler._is_profiler_enabled
        or torch._C._autograd._profiler_enabled()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )
