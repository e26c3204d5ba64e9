"""The namespace of the ops, and how an op is registered in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fused_adamw import _C
from fused_adamw.torch_library import checks, cpu, cuda

NAMESPACE = "fused_adamw"

_library = torch.library.Library(NAMESPACE, "DEF")

_C.initialize(torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, torch.nn.Parameter)


def register(schema: str, *, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Defines an op with its implementation and its fake.

    ``torch.library.Library`` rather than ``torch.library.custom_op``: a call with hundreds of tensors costs a
    fifth. What ``custom_op`` would do on top is done here and in ``checks.py``: implementations bump the
    version counters of what they write, and refuse tensors that autograd would have to follow.

    The kernels read tensors of one call at equal strides, so a compiler must keep those that it traced with.

    The implementation stands for every backend: empty lists, which have none, reach it, and so do sparse
    tensors and devices without kernels, which the checks refuse in a sentence.
    """
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    name = schema.partition("(")[0]
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    op = f"{NAMESPACE}::{name.partition('.')[0]}"
    _library.impl(name, lambda *_, **__: checks.refuse_vmap(op), "FuncTorchBatched")


def backend(device: torch.device) -> ModuleType:
    """The module that runs the ops on a device."""
    return cuda if device.type == "cuda" else cpu


def read_table(
    op: str,
    names: Sequence[str],
    lists: Sequence[Sequence[Tensor]],
    written: Sequence[bool],
    check: Callable[[], None],
    rounding_seeds: Sequence[int] = (),
) -> _C.TensorTable:
    """Reads the tensors of a call; runs ``check`` where tensors laid out like these never passed it."""
    try:
        table = _C.TensorTable(op, lists, written, rounding_seeds)
    except Exception:
        check()  # what cannot be read is refused there, in a sentence
        checks.refuse_missing_storage(op.partition(" ")[0], dict(zip(names, lists, strict=True)))
        raise
    if not table.layout_known():
        check()
        table.remember_layout()
    return table


def refuse_overlap(
    op: str,
    tables: Sequence[_C.TensorTable],
    names: Sequence[str],
    *,
    elementwise: bool = False,
    scalars: Mapping[str, object] | None = None,
) -> None:
    """Refuses a written tensor that shares memory with another; ``names`` are those of a table's lists.

    ``elementwise``: a tensor that is read may be exactly one that is written, at the same index. ``scalars``:
    other arguments by their names; those that are tensors are read.
    """
    tensors = {name: value for name, value in (scalars or {}).items() if isinstance(value, Tensor)}
    all_tables = list(tables)
    if tensors:
        all_tables.append(
            _C.TensorTable(op, [[tensor] for tensor in tensors.values()], [False] * len(tensors))
        )
    overlap = _C.find_overlap(all_tables, elementwise)
    if overlap is not None:
        written, other = (
            list(tensors)[field]
            if table == len(tables)
            else f"{names[field]}[{i}]" + (f" of group {table}" if len(tables) > 1 else "")
            for table, field, i in overlap
        )
        raise checks.overlap_error(op, written, other)


def bump_versions(written: Iterable[Sequence[Tensor]]) -> None:
    """Tells autograd that these change; ops of ``Library.impl`` have to do so themselves."""
    torch.autograd.graph.increment_version(itertools.chain.from_iterable(written))


def is_intercepted() -> bool:
    """Whether something watches or replaces op calls, so that they must go through the dispatcher.

    That is: a tracing compiler, a dispatch or function mode (FakeTensorMode for one), a functorch transform.
    Where nothing does, an optimizer calls an op's implementation itself: passing 2,000 tensors through the
    dispatcher and back costs more than reading them.
    """
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
