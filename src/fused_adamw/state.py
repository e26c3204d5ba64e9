"""The state of a parameter in the optimizer: how it is made and how a loaded one is brought into form.

It is that of ``torch.optim.AdamW``, in float32 whatever the parameter's dtype. A 16-bit parameter has a
float32 master weight besides: as ``master_param``, or for bfloat16 as the 16 bits by which it differs from
the parameter, ``master_remainder``. A ``state_dict`` has ``master_param`` in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fused_adamw import _C
from fused_adamw.distributed import map_local
from fused_adamw.rounding import (
    join_master,
    nearest_to_even,
    nearest_to_split,
    remainder_of,
    split_master,
)
from fused_adamw.torch_library import checks

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAXIMUM = "max_exp_avg_sq"
MASTER = "master_param"
REMAINDER = "master_remainder"


def master_key(param: Tensor, split: bool) -> str | None:
    """The key of what makes a parameter's master weight; None for a float32 parameter, which is its own."""
    if param.dtype not in checks.ROUNDED_DTYPES:
        return None
    return REMAINDER if split and param.dtype is torch.bfloat16 else MASTER


def complete_state(state: dict[str, Any], param: Tensor, amsgrad: bool, split: bool) -> None:
    """Adds what a parameter's state lacks: all of it before the first update, a maximum, a master weight.

    ``split``: a master weight of a bfloat16 parameter is kept as its remainder.
    """
    # Zeros, though the kernels could do without: a skipped first step must leave a state that can be saved
    # and that torch.optim.AdamW goes on from.
    master = master_key(param, split)
    if master is not None and master not in state:
        with _outside_of_capture(param.device):
            _make_master(state, param, master)
    _complete_moments(state, param, amsgrad)


def _complete_moments(state: dict[str, Any], param: Tensor, amsgrad: bool) -> None:
    moments = (*_MOMENTS, _MAXIMUM) if amsgrad else _MOMENTS
    if "step" in state and all(name in state for name in moments):
        return
    with _outside_of_capture(param.device):
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for name in moments:
            if name not in state:
                state[name] = _zeros(param, torch.float32)


def _make_master(state: dict[str, Any], param: Tensor, name: str) -> None:
    """A master weight in this form: that of the other form, or else the parameter's value."""
    if name == MASTER:
        state[MASTER] = master_param(state, param)
        state.pop(REMAINDER, None)
    elif MASTER in state:
        # Not before it is needed: a model's weights may be loaded after its optimizer's state.
        weight = state.pop(MASTER)
        with torch.no_grad():
            # By way of data, which leaves the version: stale_master="error" is about others' writes.
            param.data.copy_(map_local(nearest_to_split, param.detach(), weight))
            state[REMAINDER] = map_local(remainder_of, param.detach(), weight)
    else:
        state[REMAINDER] = _zeros(param, checks.REMAINDER_DTYPE)


def round_to_masters(state: dict[str, Any], param: Tensor) -> None:
    """Rounds a parameter to the nearest number to a float32 master weight, where it is a rounding of it.

    For a weight that was rounded otherwise before (by chance, or beside a remainder): the kernels would take
    it for one that someone else wrote.
    """
    if MASTER in state and param.dtype in checks.ROUNDED_DTYPES:
        with torch.no_grad(), _outside_of_capture(param.device):
            param.data.copy_(map_local(nearest_to_even, param.detach(), state[MASTER]))


def master_param(state: dict[str, Any], param: Tensor) -> Tensor:
    """The float32 weight of a parameter: the master weight of a 16-bit one."""
    param = param.detach()
    if param.dtype not in checks.ROUNDED_DTYPES:
        return param
    if MASTER in state:
        master: Tensor = state[MASTER]
        return master
    if REMAINDER in state:
        return map_local(join_master, param, state[REMAINDER])
    return param.to(torch.float32, memory_format=torch.preserve_format)


def set_master_param(state: dict[str, Any], param: Tensor, weight: Tensor) -> None:
    """Makes a float32 weight the master weight, and the parameter its rounding."""
    if param.dtype not in checks.ROUNDED_DTYPES:
        param.copy_(weight)
    elif REMAINDER in state:
        weight = _like(weight, param, torch.float32)
        param.copy_(map_local(lambda weight: split_master(weight)[0], weight))
        state[REMAINDER].copy_(map_local(lambda weight: split_master(weight)[1], weight))
    else:
        param.copy_(weight)
        if MASTER in state:
            state[MASTER].copy_(weight)


def normalise_state(state: dict[str, Any], param: Tensor, amsgrad: bool) -> None:
    """Brings a loaded state to the form that the kernels read, but for a master weight; values stay."""
    for name, value in state.items():
        if isinstance(value, _AsSaved):
            state[name] = value.tensor.to(param.device)
    step = state.get("step", 0)
    state["step"] = torch.as_tensor(step, dtype=torch.float32).to(param.device).reshape(())
    for name in (*_MOMENTS, _MAXIMUM, MASTER):
        if isinstance(state.get(name), Tensor):
            state[name] = _like(state[name], param, torch.float32)
    if param.dtype not in checks.ROUNDED_DTYPES:
        state.pop(MASTER, None)  # of a 16-bit run: nothing would keep it up to date
    _complete_moments(state, param, amsgrad)


def _like(tensor: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in this dtype and, where shapes are equal, with the parameter's strides."""
    if tensor.shape != param.shape or tensor.stride() == param.stride():
        return tensor.to(dtype)
    return torch.empty_like(param, dtype=dtype).copy_(tensor)


def _zeros(param: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


class _AsSaved:
    """A tensor that ``torch.optim.Optimizer.load_state_dict`` passes on as it is.

    It would cast a tensor to the parameter's dtype: of float32 moments 16 bits would be left.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def keep_float32(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook before loading that keeps the state of 16-bit parameters from being cast."""
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    rounded = {i for i, param in zip(saved, params, strict=False) if param.dtype in checks.ROUNDED_DTYPES}
    wrap: Callable[[Any], Any] = lambda value: _AsSaved(value) if isinstance(value, Tensor) else value  # noqa: E731
    states = {
        i: {name: wrap(value) for name, value in state.items()} if i in rounded else state
        for i, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def show_masters(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook after saving that puts master weights in the place of their remainders."""
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = dict(zip(ids, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
    states = {}
    for i, state in state_dict["state"].items():
        if isinstance(state, dict) and REMAINDER in state:
            kept = {name: value for name, value in state.items() if name != REMAINDER}
            with torch.no_grad():
                states[i] = {**kept, MASTER: master_param(state, params[i])}
        else:
            states[i] = state
    return {**state_dict, "state": states}


class ParamVersions:
    """What tells whether 16-bit parameters were written to since the last step.

    Autograd's version counters, and addresses: a change through ``param.data`` is in neither, unless the
    parameter got other memory.
    """

    def __init__(self) -> None:
        self._seen: dict[Tensor, tuple[int, int]] = {}

    def changed(self, params: list[Tensor]) -> list[Tensor]:
        """The parameters that are not what ``record`` saw."""
        return [param for param in params if self._seen.get(param, _version(param)) != _version(param)]

    def record(self, params: list[Tensor]) -> None:
        """Remembers the parameters as they are now."""
        self._seen.update((param, _version(param)) for param in params)


def _version(param: Tensor) -> tuple[int, int]:
    return param._version, param.data_ptr()


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
