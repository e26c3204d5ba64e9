"""What an optimizer does otherwise while a compiler traces it together with the backward pass."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fused_adamw.state import complete_state
from fused_adamw.torch_library import checks

if TYPE_CHECKING:
    from fused_adamw.optimizer import AdamW

# By a name of its own, for a traced program can hand a string to Python, but no optimizer.
_optimizers: WeakValueDictionary[str, AdamW] = WeakValueDictionary()
_names = map(str, itertools.count())


def register(optimizer: AdamW) -> str:
    """A name under which ``prepare`` finds the optimizer."""
    name = next(_names)
    _optimizers[name] = optimizer
    return name


def traces_backward() -> bool:
    """Whether Dynamo traces ``backward()`` too, so that gradients may be values of the program.

    Dynamo then cannot run ``_init_group``, as it does otherwise, to find the gradients on the parameters.
    """
    return torch.compiler.is_compiling() and bool(
        getattr(torch._dynamo.config, "trace_autograd_ops", False)  # not in every torch
    )


# torch 2.11 takes separate inputs that lie in one buffer, and that an op writes, for views of the first one:
# under Inductor the others are then updated from wrong values, silently. 2.13 is right.
INDUCTOR_KNOWS_SHARED_STORAGE = torch.__version__ >= "2.13"


def prepare(name: str, *, states: bool) -> None:
    """Checks an optimizer while it is traced, and makes all its states, at fixed addresses, where asked to.

    Were the states made by the program, its second call would find them and be another program; and in the
    memory of a CUDA graph they would be overwritten.
    """
    optimizer = _optimizers[name]
    if not INDUCTOR_KNOWS_SHARED_STORAGE:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        values = [value for state in optimizer.state.values() for value in state.values()]
        checks.refuse_shared_storage("fused_adamw.AdamW", [*params, *values])
    optimizer.settle_roundings()
    if states:
        _make_states(optimizer)


def _make_states(optimizer: AdamW) -> None:
    import torch._inductor.inductor_prims  # for computed_once

    with torch.no_grad():
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    complete_state(
                        optimizer.state[param], param, group["amsgrad"], optimizer.splits_masters(group)
                    )
                    for tensor in optimizer.state[param].values():
                        torch._dynamo.mark_static_address(tensor, guard=True)


# What torch.compiler.assume_constant_result sets, without importing the compiler: Dynamo calls the function
# and does not trace it.
prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]


def computed_once(grads: list[Tensor]) -> list[Tensor]:
    """Gradients that two ops read.

    Inductor would compute one that is elementwise (the float32 of a 16-bit product, under autocast) for each
    op anew, into storage of its own. This makes it a tensor, and leaves what is a tensor as it is.
    """
    return [torch.ops.prims.inductor_force_stride_order(grad, grad.stride()) for grad in grads]
