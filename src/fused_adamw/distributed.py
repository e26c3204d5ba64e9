"""Parameters spread over processes, as DTensors: each process updates the part that it holds.

The update is elementwise, so the part of the result is the result of the part. The ops see plain tensors:
DTensor's own dispatch of a list of tensors costs several times the call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_adamw import _C
from fused_adamw.rounding import tensor_seed
from fused_adamw.torch_library.checks import StepLists
from fused_adamw.torch_library.step_inplace import StepGroup

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_groups(op: str, groups: list[StepGroup]) -> list[StepGroup]:
    """The groups with the local part in the place of every DTensor.

    A gradient that is placed otherwise than its parameter, a sum not yet reduced for one, is brought there:
    a collective, which all processes of the mesh then take part in.

    Raises:
        ValueError: A moment is placed otherwise than its parameter.
    """
    if _only_plain_tensors(groups):
        return groups
    dtensor = _dtensor_type()
    if dtensor is None:
        return groups
    return [
        group._replace(
            lists=_local_lists(op, group.lists, dtensor),
            rounding_seeds=[
                _local_seed(seed, param, dtensor)
                for seed, param in zip(group.rounding_seeds, group.lists.params, strict=False)
            ],
        )
        for group in groups
    ]


def refuse_local_statistics(op: str, groups: list[StepGroup]) -> None:
    """Refuses to take statistics of gradients that other processes hold parts of (ValueError).

    A process would clip by the norm of its own part, or skip alone. Which processes hold what, and what is
    counted once, only the caller knows.
    """
    dtensor = None if _only_plain_tensors(groups) else _dtensor_type()
    if dtensor is not None and any(
        isinstance(grad, dtensor) for group in groups for grad in group.lists.grads
    ):
        raise ValueError(
            f"{op}: gradients are DTensors, whose statistics are spread over processes; gather the reports "
            "of gradient_stats() of the local parts, merge_stats() them, and pass the result as "
            "step(stats=...)"
        )


def map_local(function: Callable[..., Tensor], tensor: Tensor, *others: Tensor) -> Tensor:
    """The result of an elementwise function; of DTensors, which are placed alike, part by part."""
    dtensor = _dtensor_type()
    if dtensor is None or not isinstance(tensor, dtensor):
        return function(tensor, *others)
    parts: list[Any] = [tensor, *others]
    local = function(*(_local(part) for part in parts))
    return dtensor.from_local(
        local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )


def _only_plain_tensors(groups: list[StepGroup]) -> bool:
    return not torch.compiler.is_compiling() and all(_C.only_plain_tensors(group.lists) for group in groups)


def _dtensor_type() -> type[DTensor] | None:
    """The class, or None where nothing has imported it, so that there can be no instance."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def _local_lists(op: str, lists: StepLists, dtensor: type[DTensor]) -> StepLists:
    local: dict[str, list[Tensor]] = {}
    for name, tensors in lists._asdict().items():
        local[name] = []
        for i, tensor in enumerate(tensors):
            if isinstance(tensor, dtensor):
                param = lists.params[i]
                if isinstance(param, dtensor) and name != "state_steps":
                    tensor = _placed_like(op, f"{name}[{i}]", tensor, param)
                if name != "grads" and not torch.compiler.is_compiling():
                    # Its own version, apart from that of its local part, is what autograd looks at.
                    torch.autograd.graph.increment_version(tensor)
                tensor = _local(tensor)
            local[name].append(tensor)
    for i, param in enumerate(lists.params):
        if param.numel() > 0 and local["params"][i].numel() == 0:
            # This process holds nothing of the parameter, but must count its updates as the others do: one
            # element that nothing comes of stands in, since an op leaves an empty tensor's counter alone.
            for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters"):
                if local[name]:
                    local[name][i] = local[name][i].new_zeros(1)
    return StepLists(**local)


def _local_seed(seed: int, param: Tensor, dtensor: type[DTensor]) -> int:
    """The seed of the part that this process holds: of its own, unless other processes hold the same part."""
    if isinstance(param, dtensor):
        for dim, placement in enumerate(param.placements):
            if placement.is_shard():
                seed = tensor_seed(seed, param.device_mesh.get_local_rank(dim))
    return seed


def _placed_like(op: str, name: str, tensor: DTensor, param: DTensor) -> DTensor:
    if tensor.device_mesh == param.device_mesh and tensor.placements == param.placements:
        return tensor
    if not name.startswith("grads"):
        raise ValueError(
            f"{op}: {name} is placed as {tensor.placements} on {tensor.device_mesh}; {param.placements} on "
            f"{param.device_mesh}, as the parameter, is required"
        )
    return tensor.redistribute(param.device_mesh, param.placements)


def _local(tensor: DTensor) -> Tensor:
    local = tensor.to_local()
    # The result of a collective that may still be under way.
    return local.wait() if hasattr(local, "wait") else local
