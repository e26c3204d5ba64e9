"""The CUDA kernels through NVRTC, which needs no GPU, and the cache of what it makes."""

from __future__ import annotations

import functools
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from fused_adamw import cuda_kernels, kernel_cache, nvrtc

try:
    nvrtc.version()
except nvrtc.CompilerError as error:
    pytest.skip(f"blocked: {error}", allow_module_level=True)

# Ampere, Hopper and the two Blackwells; the first is the oldest that torch's CUDA 13 builds support well.
ARCHITECTURES = (80, 90, 100, 120)

VARIANTS = {
    **{
        "step " + " ".join(f"{name}={value}" for name, value in variant._asdict().items()): (
            cuda_kernels.STEP,
            variant.definitions(),
        )
        for variant in cuda_kernels.STEP_VARIANTS
    },
    "analysis": (cuda_kernels.ANALYSIS, ()),
    "merge": (cuda_kernels.MERGE, ()),
}


@functools.cache
def compile_variant(variant: str, architecture: int) -> tuple[bytes, str]:
    source, definitions = VARIANTS[variant]
    text, headers = cuda_kernels.texts(source)
    return nvrtc.compile_to_cubin(
        source, text, headers, architecture, (*definitions, *nvrtc.report_options())
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_compiles_without_local_memory(variant: str, architecture: int) -> None:
    cubin, log = compile_variant(variant, architecture)
    assert cubin.startswith(b"\x7fELF")
    local = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert local
    assert set(local) == {("0", "0", "0")}, log


def test_the_log_tells_of_code_that_was_compiled_before() -> None:
    """Where there is a driver, NVRTC keeps code in its cache, and the log of code from there is empty."""
    source = "__global__ void f() {}"
    logs = [nvrtc.compile_to_cubin("f.cu", source, {}, 90, nvrtc.report_options())[1] for _ in range(3)]
    assert all(re.search(r"Used \d+ registers", log) for log in logs), logs


def instructions(cubin: bytes, folder: Path) -> str:
    """The machine code as text; Triton brings the tool that NVRTC lacks."""
    triton = pytest.importorskip("triton", reason="blocked: no nvdisasm without Triton")
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = triton.knobs.nvidia.nvdisasm.path
    return subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "merge"])
def test_whole_quads_are_accessed_at_once(variant: str, architecture: int, tmp_path: Path) -> None:
    """16 bytes for float32, 8 for the two 16-bit types of gradients, in code of their own for each type."""
    text = instructions(compile_variant(variant, architecture)[0], tmp_path)
    wide_loads, wide_stores = len(re.findall(r"LDG\.E\.128", text)), len(re.findall(r"STG\.E\.128", text))
    narrow_loads = len(re.findall(r"LDG\.E\.64\b", text))
    if variant == "analysis":
        # Batches of four: before the loop over a whole row, two in it, after it; and in the loop over less.
        assert wide_loads == 5 * 4
        assert narrow_loads >= 2 * wide_loads  # and scalars in float64
        return
    # Arrays of float32 besides the gradient, and of 16 bits: the code is there for each dtype of gradients.
    wide = (3 if "amsgrad=True" in variant else 2) + ("split" not in variant)
    narrow = {"float32": 0, "split": 2}.get(variant.partition("weights=")[2], 1)
    assert wide_loads == 3 * wide + 1
    assert wide_stores >= 3 * wide
    assert narrow_loads >= 3 * narrow + 2
    assert len(re.findall(r"STG\.E\.64\b", text)) >= 3 * narrow


def test_a_refused_source_is_an_error_with_the_log() -> None:
    with pytest.raises(nvrtc.CompilerError, match=r"could not compile wrong.cu for sm_90:\n(.|\n)*undefined"):
        nvrtc.compile_to_cubin("wrong.cu", "__global__ void f() { undefined(); }", {}, 90)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(kernel_cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(key: str, contents: bytes) -> tuple[bytes, int]:
    """What the cache gives, and how often it had to be made."""
    calls = []

    def make() -> bytes:
        calls.append(key)
        return contents

    return kernel_cache.get_or_make(key, make), len(calls)


def test_an_entry_is_made_once(cache: Path) -> None:
    assert made("a", b"first") == (b"first", 1)
    assert made("a", b"other") == (b"first", 0)
    assert made("b", b"other") == (b"other", 1)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 32, b"x" * 1000])
def test_a_damaged_or_foreign_entry_is_made_anew(cache: Path, damage: bytes) -> None:
    made("a", b"right")
    (entry,) = cache.iterdir()
    entry.write_bytes(damage)
    assert made("a", b"right") == (b"right", 1)
    assert made("a", b"wrong") == (b"right", 0)


def test_without_a_place_to_write_kernels_are_made_each_time(cache: Path) -> None:
    cache.write_bytes(b"a file where the folder should be")
    assert made("a", b"first") == (b"first", 1)
    assert made("a", b"second") == (b"second", 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_cache_is_read(cache: Path) -> None:
    made("a", b"first")
    cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert made("a", b"other") == (b"first", 0)
    assert made("b", b"second") == (b"second", 1)


def test_the_place_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel_cache.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache.directory() == tmp_path / "fused_adamw"
    monkeypatch.setenv(kernel_cache.ENVIRONMENT_VARIABLE, str(tmp_path / "mine"))
    assert kernel_cache.directory() == tmp_path / "mine"


def test_kernels_come_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definitions = cuda_kernels.STEP_VARIANTS[0].definitions()
    first = cuda_kernels.cubin(cuda_kernels.STEP, 90, definitions)
    monkeypatch.setattr(nvrtc, "compile_to_cubin", lambda *_: pytest.fail("compiled again"))
    assert cuda_kernels.cubin(cuda_kernels.STEP, 90, definitions) == first
