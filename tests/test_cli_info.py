"""``fused-adamw info``: facts that are there, and sentences for those that are not."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from typer.testing import CliRunner

import fused_adamw
from fused_adamw import cuda_kernels, kernel_cache, nvrtc
from fused_adamw.cli import info
from fused_adamw.cli.app import app


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["info", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def facts() -> dict[str, Any]:
    return json.loads(run("--json"))


def test_versions_and_processor_are_those_of_the_packages() -> None:
    found = facts()
    assert found["versions"]["fused_adamw"] == importlib.metadata.version("fused_adamw")
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu"]["instruction set"] == fused_adamw.cpu_capability()
    assert found["cpu"]["available"] == fused_adamw.cpu_capabilities()
    assert found["cpu"]["threads"] == torch.get_num_threads()


def test_text_holds_every_fact_of_the_json() -> None:
    text = run()
    for section, own in facts().items():
        assert f"{section}:\n" in text
        for name, value in own.items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            assert f"  {name}: {shown}\n" in text


def test_the_layout_of_the_text() -> None:
    found: info.Facts = {"cpu": {"available": ["baseline", "avx2"], "threads": 2}, "cuda": {"driver": "none"}}
    assert_expected_inline(
        info.text_of(found),
        """\
cpu:
  available: baseline, avx2
  threads: 2
cuda:
  driver: none""",
    )


def test_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv(kernel_cache.ENVIRONMENT_VARIABLE, str(folder))
    assert facts()["cache"] == {
        kernel_cache.ENVIRONMENT_VARIABLE: str(folder),
        "folder": str(folder),
        "state": "not made yet",
        "entries": 0,
        "bytes": 0,
    }
    kernel_cache.get_or_make("a kernel", lambda: b"code")
    (entry,) = folder.iterdir()
    found = facts()["cache"]
    assert (found["state"], found["entries"], found["bytes"]) == ("writable", 1, entry.stat().st_size)


def test_a_cache_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv(kernel_cache.ENVIRONMENT_VARIABLE, str(file))
    assert facts()["cache"]["state"] == "no folder: kernels are compiled in each process"
    monkeypatch.setattr(kernel_cache, "directory", lambda: None)
    assert facts()["cache"]["folder"] == "none: there is no home; kernels are compiled in each process"


def test_the_compiler_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda_kernels.ENVIRONMENT_VARIABLE, "ptx")
    assert facts()["compilers"]["chosen"] == "ptx"
    monkeypatch.setenv(cuda_kernels.ENVIRONMENT_VARIABLE, "gcc")
    assert facts()["compilers"]["chosen"].startswith("FUSED_ADAMW_CUDA_COMPILER is 'gcc'; ")


def test_nvrtc_is_found_where_it_is() -> None:
    try:
        major, minor = nvrtc.version()
    except fused_adamw.CompilerError as error:
        pytest.skip(f"blocked: {error}")
    assert facts()["compilers"]["nvrtc"] == f"{major}.{minor}, {nvrtc.location()}"


def test_what_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise fused_adamw.CompilerError("NVRTC was not found")

    def no_package(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(nvrtc, "version", missing)
    monkeypatch.setattr(importlib.metadata, "version", no_package)
    monkeypatch.setattr(info.importlib.util, "find_spec", lambda name: None)
    found = facts()
    assert found["compilers"]["nvrtc"] == "NVRTC was not found"
    assert found["compilers"]["ptx"] == "Triton is not installed"
    assert found["versions"]["triton"] == "not installed"


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise info._C.CudaDriverError("no CUDA driver: libcuda.so.1 was not found")

    monkeypatch.setattr(info._C, "cuda_driver_version", missing)
    assert facts()["cuda"] == {"driver": "no CUDA driver: libcuda.so.1 was not found"}


def test_a_driver_without_a_device_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info._C, "cuda_driver_version", lambda: 12040)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert facts()["cuda"] == {"driver": "CUDA 12.4", "devices": f"torch {torch.__version__} sees none"}
