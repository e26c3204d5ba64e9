"""The CUDA kernels of a device: compiled at first use, by NVRTC or by Triton, or taken from the cache."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from fused_adamw import _C, kernel_cache, nvrtc
from fused_adamw.triton_kernels import compiler as triton_compiler

CudaCompiler: TypeAlias = Literal["nvrtc", "ptx"]
COMPILERS: tuple[str, ...] = get_args(CudaCompiler)
ENVIRONMENT_VARIABLE = "FUSED_ADAMW_CUDA_COMPILER"

# Beside the compiled module, which an editable install keeps apart from this file.
SOURCES = Path(_C.__file__).parent / "csrc"
HEADERS = (
    "adamw_update.h",
    "update_scalars.h",
    "low_precision.h",
    "philox.h",
    "gradient_stats.h",
    "cuda/launch_parameters.h",
    "cuda/device_support.cuh",
    "cuda/block_row.cuh",
)
STEP = "cuda/adamw_step.cu"
ANALYSIS = "cuda/analyze_gradients.cu"
MERGE = "cuda/merge_rows.cu"
STATS = (ANALYSIS, MERGE)

_chosen: str | None = None


def set_cuda_compiler(name: CudaCompiler | None) -> None:
    """Chooses what compiles the CUDA kernels of later calls.

    Args:
        name: "nvrtc", CUDA's run-time compiler, which comes with torch: the faster kernels. "ptx": Triton,
            which emits PTX and must be installed; each launch needs one more that writes its parameters. Both
            give the same bits. None: what ``FUSED_ADAMW_CUDA_COMPILER`` says, else "nvrtc".

    Raises:
        ValueError: There is no such compiler.
    """
    global _chosen
    if name is not None:
        _check(name, "the CUDA compiler")
    _chosen = name


def cuda_compiler() -> str:
    """What compiles the CUDA kernels: "nvrtc" or "ptx".

    Raises:
        ValueError: ``FUSED_ADAMW_CUDA_COMPILER`` names no compiler.
    """
    if _chosen is not None:
        return _chosen
    name = os.environ.get(ENVIRONMENT_VARIABLE) or COMPILERS[0]
    _check(name, ENVIRONMENT_VARIABLE)
    return name


def _check(name: str, what: str) -> None:
    if name not in COMPILERS:
        raise ValueError(f"{what} is {name!r}; {' or '.join(map(repr, COMPILERS))} is required")


class StepVariant(NamedTuple):
    """What a kernel of the step is compiled for.

    ``weights`` is a form of ``csrc/low_precision.h``, as ``_C.TensorTable.weights`` names it.
    """

    in_place: bool
    amsgrad: bool
    weights: str

    def definitions(self) -> tuple[str, ...]:
        """The options of NVRTC that choose it."""
        return (
            f"-DFUSED_ADAMW_IN_PLACE={str(self.in_place).lower()}",
            f"-DFUSED_ADAMW_AMSGRAD={str(self.amsgrad).lower()}",
            f"-DFUSED_ADAMW_WEIGHTS=k{self.weights.capitalize()}Weights",
        )


STEP_VARIANTS = tuple(
    StepVariant(in_place, amsgrad, weights)
    for weights in _C.WEIGHT_FORMS
    for in_place in (True, False)
    for amsgrad in (False, True)
)


def texts(source: str) -> tuple[str, dict[str, str]]:
    """What NVRTC compiles: the text of a source file, and the headers by the names they are included by."""
    headers = {Path(name).name: (SOURCES / name).read_text() for name in HEADERS}
    return (SOURCES / source).read_text(), headers


def cubin(source: str, architecture: int, definitions: tuple[str, ...] = ()) -> bytes:
    """NVRTC's machine code of a source file for a compute capability (90 for 9.0), through the cache."""
    text, headers = texts(source)
    key = repr((text, headers, definitions, nvrtc.OPTIONS, architecture, nvrtc.version()))

    def compiled() -> bytes:
        return nvrtc.compile_to_cubin(source, text, headers, architecture, definitions)[0]

    return kernel_cache.get_or_make(key, compiled)


# What is compiled into one module: a source file, and of the step the variant.
_Part: TypeAlias = tuple[str, StepVariant | None]


class Kernels:
    """The kernels of one device; each is compiled and loaded when it is first asked for."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._loaded: dict[_Part, _C.CudaLauncher] = {}

    def step(self, variant: StepVariant) -> _C.CudaLauncher:
        """What launches a step."""
        part = (STEP, variant)
        if part not in self._loaded:
            self._load([part])
        return self._loaded[part]

    def stats(
        self, steps: Callable[[], Iterable[StepVariant]] = tuple
    ) -> tuple[_C.CudaLauncher, _C.CudaLauncher]:
        """What launches the analysis of gradients, and what launches the merging of rows.

        ``steps``: the variants of the step that will be asked for next, to be compiled at the same time.
        """
        analysis, merge = ((source, None) for source in STATS)
        if analysis not in self._loaded or merge not in self._loaded:
            self._load([analysis, merge, *((STEP, variant) for variant in steps())])
        return self._loaded[analysis], self._loaded[merge]

    def _load(self, parts: Sequence[_Part]) -> None:
        missing = [part for part in parts if part not in self._loaded]
        architecture = _C.cuda_compute_capability(self._device)
        self._loaded.update(zip(missing, self._modules(missing, architecture), strict=True))

    def _modules(self, parts: Sequence[_Part], architecture: int) -> Iterable[_C.CudaLauncher]:
        def compiled(part: _Part) -> bytes:
            source, variant = part
            return cubin(source, architecture, () if variant is None else variant.definitions())

        # NVRTC takes most of half a second for each, but compiles in several threads at once.
        with ThreadPoolExecutor(len(parts)) as pool:
            codes = list(pool.map(compiled, parts))
        return [_C.CudaModule(self._device, code) for code in codes]


_TRITON_KERNELS = {
    STEP: (triton_compiler.STEP,),
    ANALYSIS: (triton_compiler.ANALYSIS,),
    MERGE: triton_compiler.MERGES,
}


class TritonKernels(Kernels):
    """The same from Triton."""

    def _modules(self, parts: Sequence[_Part], architecture: int) -> Iterable[_C.CudaLauncher]:
        for source, variant in parts:
            module = _C.CudaUploadingModule(self._device, self._allocate)
            for name in _TRITON_KERNELS[source]:
                module.add(name, *triton_code(name, architecture, variant))
            yield module

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", self._device))


def triton_code(
    kernel: str, architecture: int, variant: StepVariant | None = None
) -> tuple[bytes, str, int, int]:
    """Machine code, entry point, threads of a block and bytes of shared memory, through the cache."""
    constants = {} if variant is None else variant._asdict()

    def compiled() -> bytes:
        found = triton_compiler.compile_to_cubin(kernel, architecture, **constants)
        header = json.dumps([found.entry, found.threads, found.shared_bytes])
        return header.encode() + b"\n" + found.cubin

    header, _, code = kernel_cache.get_or_make(
        triton_compiler.cache_key(kernel, architecture, **constants), compiled
    ).partition(b"\n")
    entry, threads, shared_bytes = json.loads(header)
    return code, entry, threads, shared_bytes


def kernels(device: int) -> Kernels:
    """The kernels of the CUDA device with this index, from the compiler that is chosen now."""
    return _kernels(device, cuda_compiler())


@functools.cache
def _kernels(device: int, compiler: str) -> Kernels:
    return TritonKernels(device) if compiler == "ptx" else Kernels(device)
