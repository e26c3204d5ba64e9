"""Machine code of the Triton kernels. Needs no GPU; Triton is imported when it is first asked for."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_adamw._C import CUDA_LAYOUT
from fused_adamw.errors import CompilerError

STEP = "adamw_step"
ANALYSIS = "analyze_gradients"
MERGES = ("merge_rows", "merge_all_rows", "merge_all_rows_serially")
STATS = (ANALYSIS, *MERGES)

# 256 threads of four elements, as the blocks of csrc/cuda; the serial sum is one thread's work.
_WARPS = 8
_WARPS_OF_ONE = {"merge_all_rows_serially": 1}

# What the bits depend on: no contraction.
_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}

# acq_rel atomics came with Volta.
_OLDEST = 70

_SIGNATURE = {"parameters": "*u8", "finished_blocks": "*i32"}


@dataclass(frozen=True)
class Compiled:
    """A kernel as a driver loads it."""

    cubin: bytes
    entry: str
    threads: int  # of a block
    shared_bytes: int  # of dynamic shared memory
    pointers: int  # arguments: ``parameters``, ``finished_blocks``, then scratch that may be null
    ptx: str


def compile_to_cubin(kernel: str, architecture: int, **variant: bool | str) -> Compiled:
    """Machine code for a compute capability (90 for 9.0).

    Args:
        kernel: ``STEP``, or one of ``STATS``.
        architecture: Compute capability as major * 10 + minor.
        variant: Of the step alone, a ``cuda_kernels.StepVariant`` by its names.

    Raises:
        CompilerError: Triton is missing, does not know the architecture, or refuses the kernel.
    """
    constants = _constants(kernel, variant)
    triton = _triton()
    function = _function(kernel)
    if not isinstance(function, triton.JITFunction):
        raise CompilerError(f"Triton interprets {kernel} instead of compiling it: TRITON_INTERPRET is set")
    _refuse_unknown(triton, architecture)
    source = triton.compiler.ASTSource(
        fn=function, signature={**_SIGNATURE, **dict.fromkeys(constants, "constexpr")}, constexprs=constants
    )
    target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
    options = {**_OPTIONS, "num_warps": _WARPS_OF_ONE.get(kernel, _WARPS)}
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:
        # Triton raises errors of many classes: its own, LLVM's as RuntimeError, ptxas's.
        raise CompilerError(f"Triton could not compile {kernel} for sm_{architecture}:\n{error}") from error
    metadata = compiled.metadata
    for scratch in ("global_scratch_size", "profile_scratch_size"):
        if getattr(metadata, scratch, 0) != 0:
            raise CompilerError(f"{kernel} for sm_{architecture} needs a {scratch}, which it is not given")
    ptx = compiled.asm["ptx"]
    return Compiled(
        cubin=compiled.asm["cubin"],
        entry=metadata.name,
        threads=metadata.num_warps * metadata.warp_size,
        shared_bytes=metadata.shared,
        pointers=_count_pointers(ptx, metadata.name),
        ptx=ptx,
    )


def cache_key(kernel: str, architecture: int, **variant: bool | str) -> str:
    """All that ``compile_to_cubin`` depends on; does not import Triton.

    Raises:
        CompilerError: Triton is missing.
    """
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError as error:
        raise _missing() from error
    sources = {path.name: path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))}
    constants = _constants(kernel, variant)
    return repr((kernel, architecture, constants, version, sources, sorted(CUDA_LAYOUT.items())))


def _constants(kernel: str, variant: dict[str, bool | str]) -> dict[str, bool | str]:
    """The compile-time arguments of a kernel: those of the step are written in capitals."""
    required = ("in_place", "amsgrad", "weights") if kernel == STEP else ()
    if tuple(variant) != required:
        raise ValueError(f"{kernel} has the variant {tuple(variant)}; {required} is required")
    return {name.upper(): value for name, value in variant.items()}


@functools.cache
def _triton() -> Any:
    try:
        import triton
        import triton.backends.compiler
        import triton.compiler
    except ImportError as error:
        raise _missing() from error
    return triton


def _refuse_unknown(triton: Any, architecture: int) -> None:
    """LLVM ends the process where it does not know an architecture; ptxas, of the same release, says so."""
    tools = triton.knobs.nvidia
    blackwell = getattr(tools, "ptxas_blackwell", None)
    tool = blackwell if architecture >= 100 and blackwell is not None else tools.ptxas
    known = _architectures(tool.path)
    if architecture < _OLDEST or architecture not in known:
        raise CompilerError(f"Triton {triton.__version__} has no code for sm_{architecture}")


@functools.cache
def _architectures(ptxas: str) -> frozenset[int]:
    """The compute capabilities that a ptxas compiles for."""
    text = subprocess.run([ptxas, "--help"], capture_output=True, text=True, check=True).stdout
    return frozenset(int(number) for number in re.findall(r"\bsm_(\d+)\b", text))


def _missing() -> CompilerError:
    return CompilerError("Triton is not installed: pip install triton")


def _function(kernel: str) -> Any:
    from fused_adamw.triton_kernels import adamw_step, gradient_stats

    return getattr(adamw_step if kernel == STEP else gradient_stats, kernel)


def _count_pointers(ptx: str, entry: str) -> int:
    """The parameters of an entry, all of which must be pointers."""
    signature = re.search(rf"\.entry\s+{entry}\s*\(([^)]*)\)", ptx)
    parameters = [] if signature is None else signature[1].split(",")
    if len(parameters) < len(_SIGNATURE) or not all(re.search(r"\.u64\s+\.ptr\b", p) for p in parameters):
        raise CompilerError(f"{entry} does not take the pointers that it is launched with:\n{parameters}")
    return len(parameters)
