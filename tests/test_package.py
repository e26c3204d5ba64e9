"""The package: what it needs, what it brings, what it links, and how it behaves in a process."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import platform
import re
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

import fused_adamw
from fused_adamw import _C, _requirements


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


# --- requirements -------------------------------------------------------------------------------------------


def import_error() -> str:
    with pytest.raises(ImportError) as caught:
        _requirements.check_requirements()
    return str(caught.value)


def test_without_torch_the_import_says_so() -> None:
    message = run_python(
        "import sys; sys.modules['torch'] = None\n"
        "try: import fused_adamw\n"
        "except ImportError as error: print(str(error).replace(sys.executable, 'PYTHON'))"
    )
    assert_expected_inline(message, """fused_adamw needs torch 2.11 or later, and PYTHON has no torch.""")


def test_a_module_that_torch_lacks_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that is there and broken: its own error."""

    def broken_import(name: str, *args: object) -> types.ModuleType:
        raise ModuleNotFoundError("No module named 'sympy'", name="sympy")

    monkeypatch.setattr("builtins.__import__", broken_import)
    with pytest.raises(ModuleNotFoundError, match="sympy"):
        _requirements.check_requirements()


@pytest.mark.parametrize("version", ["1.13.1", "2.9.0", "2.10.1+cu128", "2.1.0", "unknown"])
def test_an_old_torch_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert import_error() == f"fused_adamw needs torch 2.11 or later, and found torch {version}."


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git1234", "2.13.0+cpu", "2.100", "3.0.0"])
def test_a_later_torch_is_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    _requirements.check_requirements()


@pytest.mark.parametrize(
    ("system", "machine"), [("Windows", "AMD64"), ("Darwin", "arm64"), ("Linux", "riscv64")]
)
def test_another_platform_is_refused(system: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    expected = f"fused_adamw runs on Linux on x86-64 or AArch64, and this is {system} on {machine}."
    assert import_error() == expected


def test_the_metadata_asks_for_the_same_torch() -> None:
    least = ".".join(map(str, _requirements.MINIMUM_TORCH))
    requirements = importlib.metadata.requires("fused_adamw")
    assert [r for r in requirements if re.match(r"torch\b", r)] == [f"torch>={least}"]


# --- what it brings -----------------------------------------------------------------------------------------


def test_all_is_complete() -> None:
    public = {
        name
        for name, value in vars(fused_adamw).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    public -= {"check_requirements", "version"}  # used by the import itself
    assert set(fused_adamw.__all__) == public | {"__version__"}
    assert fused_adamw.__all__ == sorted(fused_adamw.__all__)


def test_every_public_object_is_documented() -> None:
    for name in fused_adamw.__all__:
        value = getattr(fused_adamw, name)
        if callable(value):
            assert value.__doc__, name


def test_the_version_is_that_of_the_distribution() -> None:
    assert fused_adamw.__version__ == importlib.metadata.version("fused_adamw")


def test_types_are_installed() -> None:
    files = importlib.resources.files(fused_adamw)
    assert (files / "py.typed").is_file()
    assert (files / "_C.pyi").is_file()


def test_the_import_is_light() -> None:
    """None of what only some users need; not the compiler, DTensor or the command line's packages."""
    code = (
        "import sys, torch; before = set(sys.modules); import fused_adamw; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}), "
        "*(m for m in ('torch._inductor', 'torch.distributed.tensor') if m in set(sys.modules) - before))"
    )
    third_party = set(run_python(code).split()) - sys.stdlib_module_names
    assert third_party <= {"fused_adamw", "torch"}


# --- what it links ------------------------------------------------------------------------------------------


def needed_libraries(path: Path) -> set[str]:
    """The DT_NEEDED entries of a 64-bit little-endian ELF file."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    section_offset = struct.unpack_from("<Q", data, 0x28)[0]
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQII", data, section_offset + i * entry_size) for i in range(count)]
    [dynamic] = [section for section in sections if section[1] == 6]  # SHT_DYNAMIC
    strings = sections[dynamic[6]][4]
    entries = struct.iter_unpack("<qQ", data[dynamic[4] : dynamic[4] + dynamic[5]])
    starts = [strings + value for tag, value in entries if tag == 1]  # DT_NEEDED
    return {data[start : data.index(b"\0", start)].decode() for start in starts}


def test_the_module_links_the_c_and_cpp_runtimes_only() -> None:
    """Neither libtorch nor Python nor an OpenMP runtime: one wheel fits every torch."""
    needed = needed_libraries(Path(_C.__file__))
    assert "libc.so.6" in needed
    allowed = r"(libstdc\+\+|libgcc_s|libc|libm|libdl|libpthread|ld-linux-[a-z0-9-]+)\.so\.\d+"
    assert {name for name in needed if not re.fullmatch(allowed, name)} == set()


# --- in a process -------------------------------------------------------------------------------------------

TRAIN = """
import os, torch, fused_adamw
def train():
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(300_000))
    optimizer = fused_adamw.AdamW([param])
    param.grad = torch.randn(300_000)
    for _ in range(3):
        optimizer.step()
    return param.detach()
"""


def test_the_number_of_threads_is_torchs() -> None:
    """Threads of the process after training with one, then with three."""
    code = TRAIN + (
        "param = torch.randn(300_000)\n"
        "threads = lambda: len(os.listdir('/proc/self/task'))\n"
        "torch.set_num_threads(1); before = threads(); train(); one = threads() - before\n"
        "torch.set_num_threads(3); train(); print(one, threads() - before)"
    )
    assert run_python(code) == "0 2"


def test_works_in_a_forked_child_with_one_thread() -> None:
    """The parent has trained with two threads before; the bits are equal."""
    code = TRAIN + (
        "torch.set_num_threads(2); expected = train()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    torch.set_num_threads(1)\n"
        "    os._exit(0 if torch.equal(train(), expected) else 7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert run_python(code) == "0"


def test_other_threads_run_while_a_kernel_does(set_threads: Callable[[int], None]) -> None:
    """Another thread sees the first element updated and the last not yet, in one of some attempts.

    Were the interpreter's lock held, it could only see both or neither.
    """
    set_threads(1)
    param = torch.nn.Parameter(torch.ones(2_000_000))
    param.grad = torch.ones_like(param)
    optimizer = fused_adamw.AdamW([param])
    first, last = param.detach()[0], param.detach()[-1]
    seen, stop = threading.Event(), threading.Event()

    def watch() -> None:
        while not stop.is_set():
            updated = first.item()  # read before the last one
            if updated < last.item():
                seen.set()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for _ in range(200):
            optimizer.step()
            if seen.is_set():
                break
    finally:
        stop.set()
        thread.join()
    assert seen.is_set()
