"""All CUDA kernels through both compilers; needs no GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fused_adamw import cuda_kernels, nvrtc
from fused_adamw.cli.suites.check import BlockedError, Check, Suite, require
from fused_adamw.errors import CompilerError
from fused_adamw.triton_kernels import compiler as triton_compiler

# Ampere, Hopper and the two Blackwells.
ARCHITECTURES = (80, 90, 100, 120)

# What an operation that is rounded otherwise than IEEE has it looks like in PTX.
_INEXACT = re.compile(r"\bfma\b|\bmad\.f|\.ftz\b|\.approx\b|\.full\b")


def missing(compiler: str) -> str | None:
    """Why a compiler cannot be used."""
    if compiler == "ptx":
        found = importlib.util.find_spec("triton") is not None
        return None if found else "Triton is not installed: pip install triton"
    try:
        nvrtc.version()
    except CompilerError as error:
        return str(error)
    return None


def through_nvrtc(architecture: int) -> str:
    """Each source in each variant, compiled anew."""
    kernels: list[tuple[str, tuple[str, ...]]] = [(source, ()) for source in cuda_kernels.STATS]
    kernels += [(cuda_kernels.STEP, variant.definitions()) for variant in cuda_kernels.STEP_VARIANTS]
    frames: list[tuple[str, ...]] = []
    registers: list[int] = []
    for source, definitions in kernels:
        text, headers = cuda_kernels.texts(source)
        try:
            cubin, log = nvrtc.compile_to_cubin(
                source, text, headers, architecture, (*definitions, *nvrtc.report_options())
            )
        except CompilerError as error:
            if "gpu-architecture" in str(error):
                version = ".".join(map(str, nvrtc.version()))
                raise BlockedError(f"NVRTC {version} does not know sm_{architecture}") from None
            raise
        require(cubin.startswith(b"\x7fELF"), f"{source} became no machine code")
        own = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
        require(bool(own), f"the compiler does not tell of local memory in {source}: {log}")
        frames += own
        registers += [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    require(set(frames) == {("0", "0", "0")}, f"kernels use local memory: {frames}")
    return f"{len(frames)} kernels without local memory, up to {max(registers)} registers"


def through_triton(architecture: int) -> str:
    """Each kernel in each variant, compiled anew."""
    kernels: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in triton_compiler.STATS]
    kernels += [(triton_compiler.STEP, variant._asdict()) for variant in cuda_kernels.STEP_VARIANTS]
    registers = 0
    with _empty_triton_cache() as folder:
        for name, variant in kernels:
            try:
                kernel = triton_compiler.compile_to_cubin(name, architecture, **variant)
            except CompilerError as error:
                if "has no code for" in str(error):
                    raise BlockedError(str(error)) from None
                raise
            inexact = _INEXACT.findall(kernel.ptx)
            require(not inexact, f"{name} {variant} does not round as IEEE has it: {sorted(set(inexact))}")
            usage = _resource_usage(kernel.cubin, folder / "kernel.cubin")
            require(
                " STACK:0 " in usage and " LOCAL:0 " in usage, f"{name} {variant} uses local memory: {usage}"
            )
            registers = max(registers, *(int(number) for number in re.findall(r"REG:(\d+)", usage)))
    return f"{len(kernels)} kernels without local memory, up to {registers} registers"


def _resource_usage(cubin: bytes, file: Path) -> str:
    import triton

    file.write_bytes(cubin)
    command: list[Any] = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def _empty_triton_cache() -> Iterator[Path]:
    """Triton keeps what it compiles; here it must compile."""
    name = "TRITON_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory(prefix="fused-adamw-") as folder:
        os.environ[name] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


def checks(compilers: Sequence[str]) -> list[Check]:
    """One for each compiler and architecture."""
    ways = {"nvrtc": through_nvrtc, "ptx": through_triton}
    return [
        Check(
            f"{compiler}: sm_{architecture}",
            functools.partial(ways[compiler], architecture),
            functools.partial(missing, compiler),
        )
        for compiler in compilers
        for architecture in ARCHITECTURES
    ]


SUITE = Suite(
    "build",
    proves="All CUDA kernels compile here for Ampere, Hopper and Blackwell, and keep all in registers.",
    leaves_open="Whether they compute the right thing: nothing runs.",
    checks=checks,
)
