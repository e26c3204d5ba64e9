"""The Triton kernels through Triton's interpreter: the ops run on CPU tensors as they would on CUDA.

A launch is recorded as the host code fills it, and the kernel of its name, made for the interpreter, runs on
the recorded bytes, one program after another. Nothing of the package or of Triton is left changed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

import fused_adamw.triton_kernels
from cases import assert_same_bits
from fused_adamw import _C
from fused_adamw.cuda_kernels import StepVariant
from fused_adamw.torch_library import cuda, library

PACKAGE = "fused_adamw.triton_kernels"
MODULES = ("parameters", "formula", "low_precision", "adamw_step", "gradient_stats")
# Any count that no launch of a test exceeds.
COUNTERS = 4096


class Interpreter:
    """Runs recorded launches; ``finished_blocks`` must hold zeros between calls."""

    def __init__(self) -> None:
        self._modules = _interpreted_modules()
        self.finished_blocks = torch.zeros(COUNTERS, dtype=torch.int32)
        self.launches: list[tuple[str, int]] = []

    def run(
        self,
        recorder: _C.CudaRecorder,
        variant: StepVariant | None = None,
        programs: Sequence[int] | None = None,
    ) -> None:
        """Runs what was recorded; ``variant`` is that of a step.

        ``programs``: which programs of each launch run, in this order; all in ascending order by default.
        """
        constants = {} if variant is None else {k.upper(): v for k, v in variant._asdict().items()}
        for kernel, blocks, parameters in recorder.launches:
            order = range(blocks) if programs is None else programs
            self.launches.append((kernel, blocks))
            module = self._modules["adamw_step" if kernel == "adamw_step" else "gradient_stats"]
            struct = torch.frombuffer(bytearray(parameters), dtype=torch.uint8)
            with _interpreted_library(), _grid(blocks, order), np.errstate(all="ignore"):
                getattr(module, kernel)[(len(order),)](struct, self.finished_blocks, **constants)
        assert not self.finished_blocks.any(), "counters of finished programs were left behind"

    @contextlib.contextmanager
    def ops(self) -> Iterator[None]:
        """Inside, the ops take CPU tensors the way of CUDA tensors, up to the launch."""
        original = library.cpu, cuda.kernels
        pending: list[tuple[_C.CudaRecorder, StepVariant | None]] = []

        def recorder(variant: StepVariant | None = None) -> _C.CudaRecorder:
            pending.append((_C.CudaRecorder(), variant))
            return pending[-1][0]

        def through_the_interpreter(name: str) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                result = getattr(cuda, name)(*arguments, **options)
                while pending:
                    recorded, variant = pending.pop(0)
                    self.run(recorded, variant)
                return result

            return call

        names = [name for name in vars(original[0]) if callable(getattr(cuda, name, None))]
        backend = SimpleNamespace(**{name: through_the_interpreter(name) for name in names})
        setattr(library, "cpu", backend)  # noqa: B010 (for mypy, a module)
        kernels = SimpleNamespace(step=recorder, stats=lambda *_: (recorder(),) * 2)
        setattr(cuda, "kernels", lambda _: kernels)  # noqa: B010
        try:
            yield
        finally:
            library.cpu, cuda.kernels = original


def _interpreted_modules() -> dict[str, ModuleType]:
    """The kernels' modules once more, decorated for the interpreter; the ordinary ones stay in place."""
    package = fused_adamw.triton_kernels
    ordinary = {name: sys.modules.pop(f"{PACKAGE}.{name}", None) for name in MODULES}
    attributes = {name: getattr(package, name) for name in MODULES if hasattr(package, name)}
    interpret = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = True
    try:
        for name in ("adamw_step", "gradient_stats"):
            __import__(f"{PACKAGE}.{name}")
        return {name: sys.modules[f"{PACKAGE}.{name}"] for name in MODULES}
    finally:
        triton.knobs.runtime.interpret = interpret
        for name in MODULES:
            sys.modules.pop(f"{PACKAGE}.{name}", None)
            if (module := ordinary[name]) is not None:
                sys.modules[f"{PACKAGE}.{name}"] = module
            if name in attributes:
                setattr(package, name, attributes[name])
            elif hasattr(package, name):
                delattr(package, name)


@contextlib.contextmanager
def _grid(blocks: int, order: Sequence[int]) -> Iterator[None]:
    """Inside, a launch of ``len(order)`` programs is of these programs among so many blocks."""
    builder = interpreter.interpreter_builder
    set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx
    builder.set_grid_dim = lambda *_: set_dim(blocks, 1, 1)
    builder.set_grid_idx = lambda x, *_: set_idx(order[x], 0, 0)
    try:
        yield
    finally:
        del builder.set_grid_dim, builder.set_grid_idx


@contextlib.contextmanager
def _interpreted_library() -> Iterator[None]:
    """Inside, Triton's language is the interpreter's.

    Its functions that are kernels' code can be interpreted, too. The interpreter would patch the language in
    each call of a function, which takes most of its time, and put only the last patch back.
    """
    patch = interpreter._patch_lang
    patches: dict[int, Any] = {}

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in patches:
            patches[module] = patch(function)
        return SimpleNamespace(restore=lambda: None)

    compiled = {name: f for name, f in vars(tl).items() if isinstance(f, triton.JITFunction)}
    interpreter._patch_lang = patch_once
    try:
        for name, function in compiled.items():
            setattr(tl, name, interpreter.InterpretedFunction(function.fn))
        yield
    finally:
        for own in reversed(patches.values()):
            own.restore()
        interpreter._patch_lang = patch
        for name, function in compiled.items():
            setattr(tl, name, function)


def clones(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    """Copies of lists of tensors."""
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


def assert_same_lists(found: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> None:
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_bits(a, b, f"list {i}, tensor {k}")
