"""Which compiler makes the CUDA kernels, and how that is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

import fused_adamw
from fused_adamw import cuda_kernels, kernel_cache
from fused_adamw.triton_kernels import compiler as triton_compiler


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cuda_kernels.ENVIRONMENT_VARIABLE, raising=False)


def test_nvrtc_unless_told_otherwise() -> None:
    assert fused_adamw.cuda_compiler() == "nvrtc"


@pytest.mark.parametrize("name", ["nvrtc", "ptx"])
def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(cuda_kernels.ENVIRONMENT_VARIABLE, name)
    assert fused_adamw.cuda_compiler() == name


def test_a_call_chooses_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda_kernels.ENVIRONMENT_VARIABLE, "nvrtc")
    fused_adamw.set_cuda_compiler("ptx")
    assert fused_adamw.cuda_compiler() == "ptx"
    fused_adamw.set_cuda_compiler(None)
    assert fused_adamw.cuda_compiler() == "nvrtc"


def test_what_is_no_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the CUDA compiler is 'gcc'; 'nvrtc' or 'ptx' is required"):
        fused_adamw.set_cuda_compiler("gcc")  # type: ignore[arg-type]
    assert fused_adamw.cuda_compiler() == "nvrtc"
    monkeypatch.setenv(cuda_kernels.ENVIRONMENT_VARIABLE, "gcc")
    with pytest.raises(ValueError, match="FUSED_ADAMW_CUDA_COMPILER is 'gcc'"):
        fused_adamw.cuda_compiler()


def test_each_compiler_has_kernels_of_its_own() -> None:
    fused_adamw.set_cuda_compiler("ptx")
    triton_kernels = cuda_kernels.kernels(0)
    assert isinstance(triton_kernels, cuda_kernels.TritonKernels)
    fused_adamw.set_cuda_compiler("nvrtc")
    assert not isinstance(cuda_kernels.kernels(0), cuda_kernels.TritonKernels)
    fused_adamw.set_cuda_compiler("ptx")
    assert cuda_kernels.kernels(0) is triton_kernels


def test_code_of_triton_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="blocked: Triton is not installed")
    monkeypatch.setenv(kernel_cache.ENVIRONMENT_VARIABLE, str(tmp_path))
    expected = triton_compiler.compile_to_cubin("merge_rows", 90)
    first = cuda_kernels.triton_code("merge_rows", 90)
    assert first == (expected.cubin, expected.entry, expected.threads, expected.shared_bytes)
    monkeypatch.setattr(triton_compiler, "compile_to_cubin", lambda *_: pytest.fail("compiled again"))
    assert cuda_kernels.triton_code("merge_rows", 90) == first
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        cuda_kernels.triton_code("merge_rows", 80)
