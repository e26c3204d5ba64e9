"""The state of a parameter in the optimizer: how it is made and how a loaded one is brought into form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fused_adamw import _C
from fused_adamw.torch_library import checks

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAXIMUM = "max_exp_avg_sq"


def complete_state(state: dict[str, Any], param: Tensor, amsgrad: bool) -> None:
    """Adds what a parameter's state lacks: all of it before the first update, or the maximum."""
    # Zeros, though the kernels could do without: a skipped first step must leave a state that can be saved
    # and that torch.optim.AdamW goes on from.
    moments = (*_MOMENTS, _MAXIMUM) if amsgrad else _MOMENTS
    if "step" in state and all(name in state for name in moments):
        return
    with _outside_of_capture(param.device):
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for name in moments:
            if name not in state:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)


def normalise_state(state: dict[str, Any], param: Tensor, amsgrad: bool) -> None:
    """Brings a loaded state to the form that the kernels read; values stay."""
    step = state.get("step", 0)
    state["step"] = torch.as_tensor(step, dtype=torch.float32).to(param.device).reshape(())
    for name in (*_MOMENTS, _MAXIMUM):
        moment = state.get(name)
        if moment is not None and moment.shape == param.shape and moment.stride() != param.stride():
            state[name] = torch.empty_like(param).copy_(moment)
    complete_state(state, param, amsgrad)


@contextmanager
def _outside_of_capture(device: torch.device) -> Iterator[None]:
    """Runs what makes a state outside of a CUDA graph that is being captured.

    Inside, the zeros would be a part of the graph: each replay would begin anew.
    """
    if torch.compiler.is_compiling() or not checks.is_capturing(device):
        yield
        return
    with _C.CudaRelaxedCapture():
        stream = _idle_stream(device)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()  # the graph cannot wait for what is no part of it


def _idle_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that is not captured; they come from a pool, in which the capturing one may be."""
    while True:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream
