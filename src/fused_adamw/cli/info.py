"""``fused-adamw info``: what a bug report needs to say about a machine and its packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
import typer

import fused_adamw
from fused_adamw import _C, cuda_kernels, kernel_cache, nvrtc

Facts: TypeAlias = dict[str, dict[str, object]]
"""What was found, by section and name. What is missing says why; nothing is left out."""


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Print versions, devices, compilers, the cache and the instruction set, for a bug report."""
    facts = gather()
    typer.echo(json.dumps(facts, indent=2) if as_json else text_of(facts))


def gather() -> Facts:
    """All facts; loads the compilers' libraries, compiles nothing."""
    return {
        "versions": _versions(),
        "cpu": _cpu(),
        "cuda": _cuda(),
        "compilers": _compilers(),
        "cache": _cache(),
    }


def text_of(facts: Facts) -> str:
    """The facts as lines that can be pasted anywhere."""
    lines: list[str] = []
    for section, own in facts.items():
        lines.append(f"{section}:")
        for name, value in own.items():
            items = ", ".join(map(str, value)) if isinstance(value, list) else value
            lines.append(f"  {name}: {items}")
    return "\n".join(lines)


def _versions() -> dict[str, object]:
    return {
        "fused_adamw": fused_adamw.__version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> dict[str, object]:
    openmp = _C.has_openmp_runtime()
    return {
        "instruction set": _C.cpu_capability(),
        "available": _C.cpu_capabilities(),
        "threads": torch.get_num_threads(),
        "OpenMP runtime of torch": "found" if openmp else "not found: kernels use one thread",
    }


def _cuda() -> dict[str, object]:
    try:
        version = _C.cuda_driver_version()
    except _C.CudaDriverError as error:
        return {"driver": str(error)}
    facts: dict[str, object] = {"driver": f"CUDA {version // 1000}.{version % 1000 // 10}"}
    if not torch.cuda.is_available():
        return {**facts, "devices": f"torch {torch.__version__} sees none"}
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        facts[f"device {i}"] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    return facts


def _compilers() -> dict[str, object]:
    try:
        chosen = fused_adamw.cuda_compiler()
    except ValueError as error:
        chosen = str(error)
    try:
        major, minor = nvrtc.version()
        found = f"{major}.{minor}, {nvrtc.location()}"
    except fused_adamw.CompilerError as error:
        found = str(error)
    spec = importlib.util.find_spec("triton")
    return {
        "chosen": chosen,
        cuda_kernels.ENVIRONMENT_VARIABLE: os.environ.get(cuda_kernels.ENVIRONMENT_VARIABLE, "not set"),
        "nvrtc": found,
        "ptx": "Triton is not installed" if spec is None else f"Triton {_version('triton')}, {spec.origin}",
    }


def _cache() -> dict[str, object]:
    directory = kernel_cache.directory()
    facts: dict[str, object] = {
        kernel_cache.ENVIRONMENT_VARIABLE: os.environ.get(kernel_cache.ENVIRONMENT_VARIABLE, "not set")
    }
    if directory is None:
        return {**facts, "folder": "none: there is no home; kernels are compiled in each process"}
    entries = list(directory.glob("*.cubin")) if directory.is_dir() else []
    return {
        **facts,
        "folder": str(directory),
        "state": _state(directory),
        "entries": len(entries),
        "bytes": sum(entry.stat().st_size for entry in entries),
    }


def _state(directory: Path) -> str:
    if directory.is_dir():
        return "writable" if os.access(directory, os.W_OK | os.X_OK) else "read-only"
    if directory.exists():
        return "no folder: kernels are compiled in each process"
    return "not made yet"
