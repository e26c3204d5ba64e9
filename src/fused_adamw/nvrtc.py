"""NVRTC, the run-time compiler of CUDA: found as torch ships it, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from fused_adamw.errors import CompilerError as CompilerError

# What the bits depend on: no contraction; division, square roots and subnormals as IEEE has them (the
# default, written down so that no other default can change them).
OPTIONS = ("--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")


def compile_to_cubin(
    name: str, source: str, headers: Mapping[str, str], architecture: int, options: Sequence[str] = ()
) -> tuple[bytes, str]:
    """Machine code for a compute capability (90 for 9.0), and the compiler's log.

    Args:
        name: What the log calls the source.
        source: CUDA C++.
        headers: Sources by the names that they are included by.
        architecture: Compute capability as major * 10 + minor.
        options: Besides ``OPTIONS``.

    Raises:
        CompilerError: NVRTC is missing, does not know the architecture, or refuses the source.
    """
    library = _library()
    program = ctypes.c_void_p()
    contents = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(header.encode() for header in headers))
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), len(headers), contents, names
        )
    )
    try:
        flags = [f"--gpu-architecture=sm_{architecture}", *OPTIONS, *options]
        encoded = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        result = library.nvrtcCompileProgram(program, len(flags), encoded)
        log = _text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
        log_text = log.rstrip(b"\0").decode(errors="replace").strip()
        if result != 0:
            raise CompilerError(f"NVRTC could not compile {name} for sm_{architecture}:\n{log_text}")
        return _text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program), log_text
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def version() -> tuple[int, int]:
    """The compiler's version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def report_options() -> tuple[str, ...]:
    """Options with which the log tells of registers and local memory.

    NVRTC takes code from the driver's cache since CUDA 12.9, and then has nothing to tell.
    """
    anew = ("--no-cache",) if version() >= (12, 9) else ()
    return ("--ptxas-options=-v", *anew)


def location() -> str:
    """The file of the library, or the name that the dynamic linker found it by."""
    return _library()._name


@functools.cache
def _library() -> ctypes.CDLL:
    for directory in _directories():
        for path in sorted(directory.glob("libnvrtc.so.*")):
            # NVRTC looks its builtins up by name; loading them first spares it a search path.
            for builtins in sorted(directory.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return _declared(ctypes.CDLL(str(path)))
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return _declared(ctypes.CDLL(name))
        except OSError:
            continue
    raise CompilerError(
        "NVRTC (libnvrtc) was not found; it comes with CUDA builds of torch, or with the package "
        "nvidia-cuda-nvrtc"
    )


def _directories() -> list[Path]:
    """Where the packages that torch depends on put libraries."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else [Path(root) for root in spec.submodule_search_locations or ()]
    return [directory for root in roots for directory in sorted(root.glob("*/lib"))]


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _check(result: int) -> None:
    if result != 0:
        raise CompilerError(f"NVRTC: {_library().nvrtcGetErrorString(result).decode()}")


def _text(
    get_size: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, program: ctypes.c_void_p
) -> bytes:
    size = ctypes.c_size_t()
    _check(get_size(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer))
    return buffer.raw
