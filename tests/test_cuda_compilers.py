"""Which compiler makes the CUDA kernels, and how that is chosen."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import fused_adamw
from fused_adamw import _C, cuda_kernels, kernel_cache, nvrtc
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


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What NVRTC was asked to compile, on a device that is not there."""
    sources: list[str] = []
    monkeypatch.setattr(_C, "cuda_compute_capability", lambda device: 90)
    monkeypatch.setattr(_C, "CudaModule", lambda device, code: (device, code))

    def cubin(source: str, architecture: int, definitions: tuple[str, ...]) -> str:
        sources.append(source)
        return " ".join((source, *definitions))

    monkeypatch.setattr(cuda_kernels, "cubin", cubin)
    return sources


STEP, OTHER_STEP = (cuda_kernels.StepVariant(True, amsgrad, "float32") for amsgrad in (False, True))


def test_each_part_is_compiled_once(compiled: list[str]) -> None:
    kernels = cuda_kernels.Kernels(0)
    step = kernels.step(STEP)
    assert kernels.step(STEP) is step
    assert compiled == ["cuda/adamw_step.cu"]
    analysis, merge = kernels.stats(lambda: [STEP])
    assert analysis == (0, "cuda/analyze_gradients.cu")
    assert merge == (0, "cuda/merge_rows.cu")
    assert kernels.stats(lambda: pytest.fail("asked again")) == (analysis, merge)
    assert kernels.step(STEP) is step
    assert kernels.step(OTHER_STEP) != step
    assert sorted(compiled) == ["cuda/adamw_step.cu"] * 2 + [cuda_kernels.ANALYSIS, cuda_kernels.MERGE]


def test_all_that_a_guarded_step_needs_is_compiled_at_once(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_at_work = threading.Barrier(4)
    cubin = cuda_kernels.cubin

    def together(*arguments: object) -> bytes:
        all_at_work.wait(timeout=60)
        return cubin(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cuda_kernels, "cubin", together)
    kernels = cuda_kernels.Kernels(0)
    kernels.stats(lambda: [STEP, OTHER_STEP])
    assert len(compiled) == 4
    steps = kernels.step(STEP), kernels.step(OTHER_STEP)
    assert steps[0] != steps[1]
    assert len(compiled) == 4


def test_what_one_thread_fails_to_compile_is_asked_for_again(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = cuda_kernels.cubin

    def fails(source: str, *arguments: object) -> bytes:
        if source == cuda_kernels.MERGE:
            raise nvrtc.CompilerError("NVRTC was not found")
        return cubin(source, *arguments)  # type: ignore[arg-type]

    kernels = cuda_kernels.Kernels(0)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_kernels, "cubin", fails)
        with pytest.raises(nvrtc.CompilerError, match="not found"):
            kernels.stats(lambda: [STEP])
    assert len(kernels.stats(lambda: [STEP])) == 2


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
