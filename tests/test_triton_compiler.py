"""The Triton kernels as machine code: its rounding, its accesses, its registers. Needs no GPU."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fused_adamw import errors, nvrtc
from fused_adamw._C import CUDA_LAYOUT
from fused_adamw.cuda_kernels import STEP_VARIANTS
from fused_adamw.triton_kernels import compiler

triton = pytest.importorskip("triton", reason="blocked: Triton is not installed")

# Ampere, Hopper and the two Blackwells, as for NVRTC.
ARCHITECTURES = (80, 90, 100, 120)

# Accesses of a thread to each array of a block: 256 threads of four elements.
PASSES = CUDA_LAYOUT["kElementsPerProgram"] // 1024

VARIANTS: dict[str, dict[str, Any]] = {
    **{
        "step " + " ".join(f"{name}={value}" for name, value in variant._asdict().items()): {
            "kernel": compiler.STEP,
            **variant._asdict(),
        }
        for variant in STEP_VARIANTS
    },
    **{kernel: {"kernel": kernel} for kernel in compiler.STATS},
}


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Triton keeps what it compiles; here it must compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@functools.cache
def compiled(variant: str, architecture: int) -> compiler.Compiled:
    return compiler.compile_to_cubin(architecture=architecture, **VARIANTS[variant])


def count(pattern: str, ptx: str) -> int:
    return len(re.findall(pattern, ptx))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_compiles_without_local_memory(variant: str, architecture: int, tmp_path: Path) -> None:
    kernel = compiled(variant, architecture)
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.entry == VARIANTS[variant]["kernel"]
    assert kernel.threads == (32 if variant == "merge_all_rows_serially" else 256)
    assert kernel.shared_bytes <= 4096
    assert kernel.pointers >= 2
    file = tmp_path / "kernel.cubin"
    file.write_bytes(kernel.cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run(
        [tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True
    ).stdout
    # Spilled registers lie on the stack.
    assert " STACK:0 " in usage
    assert " LOCAL:0 " in usage
    # Two blocks of 256 threads fit on a multiprocessor, which has 65,536 registers.
    assert int(re.search(r"REG:(\d+)", usage)[1]) <= 128  # type: ignore[index]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_operation_rounds_as_ieee_has_it(variant: str, architecture: int) -> None:
    ptx = compiled(variant, architecture).ptx
    assert count(r"\bfma\b|\bmad\.f|\.ftz\b|\.approx\b|\.full\b", ptx) == 0
    step = variant.startswith("step")
    assert (count(r"sqrt\.rn\.f32", ptx) > 0) is step
    assert (count(r"sqrt\.rn\.f64", ptx) > 0) is step
    assert (count(r"div\.rn\.f32", ptx) > 0) is (step or variant == "analyze_gradients")
    assert count(r"div\.rn\.f64", ptx) > 0
    # NaNs: a select for each result of each element, in both paths; for a master weight that is read, too.
    if step:
        results = (4 if "amsgrad=True" in variant else 3) + variant.endswith(("master", "stochastic"))
        assert count(r"selp\.[bf]32\s.*(0f7FC00000|2143289344)", ptx) == 2 * 4 * PASSES * results


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("step")])
def test_whole_blocks_of_a_step_take_wide_accesses(variant: str, architecture: int) -> None:
    ptx = compiled(variant, architecture).ptx
    # Arrays of float32 and of 16 bits besides the gradient, which may be either.
    floats = (3 if "amsgrad=True" in variant else 2) + (not variant.endswith("split"))
    halves = {"float32": 0, "split": 2}.get(variant.partition("weights=")[2], 1)
    for kind, wide_arrays, narrow_arrays in (("ld", floats + 1, halves + 1), ("st", floats, halves)):
        wide = count(rf"{kind}\.global\.v4\.b32", ptx)
        narrow = count(rf"{kind}\.global\.v2\.b32|{kind}\.global\.v4\.b16", ptx)
        # 16-bit elements of two passes may lie side by side.
        side_by_side = wide - wide_arrays * PASSES
        assert side_by_side >= 0
        assert 2 * side_by_side + narrow == narrow_arrays * PASSES


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_whole_rows_are_read_by_wide_accesses(architecture: int) -> None:
    """Eight under way together, for each type of gradient."""
    ptx = compiled("analyze_gradients", architecture).ptx
    assert count(r"ld\.global\.v4\.b32", ptx) == 8
    assert count(r"ld\.global\.v2\.b32|ld\.global\.v4\.b16", ptx) == 2 * 8


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_of_other_programs_are_read_after_they_were_written(architecture: int) -> None:
    ptx = compiled("merge_all_rows", architecture).ptx
    assert count(r"atom\.global\.gpu\.acq_rel\.add", ptx) == 1
    assert count(r"ld\.global\.cg\.b32", ptx) > 0


@pytest.mark.parametrize("architecture", [20, 60, 130])
def test_an_unknown_architecture_is_an_error(architecture: int) -> None:
    with pytest.raises(errors.CompilerError, match=rf"has no code for sm_{architecture}"):
        compiler.compile_to_cubin("merge_rows", architecture)


def test_a_refused_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiler._OPTIONS, "num_ctas", 3)
    with pytest.raises(errors.CompilerError, match="Triton could not compile merge_rows for sm_80"):
        compiler.compile_to_cubin("merge_rows", 80)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kernel": "merge_rows", "in_place": True, "amsgrad": True},
        {"kernel": "adamw_step"},
        {"kernel": "adamw_step", "in_place": True},
        {"kernel": "adamw_step", "in_place": True, "amsgrad": True},
    ],
)
def test_variants_are_of_the_step_alone(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"has the variant .* is required"):
        compiler.compile_to_cubin(architecture=90, **arguments)


def test_the_package_works_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import fused_adamw
from fused_adamw.triton_kernels import compiler
for call in (compiler.compile_to_cubin, compiler.cache_key):
    try:
        call("merge_rows", 90)
    except fused_adamw.errors.CompilerError as error:
        print(error)
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert output.stdout.splitlines()[0] == "Triton is not installed: pip install triton"


def test_no_version_of_triton_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(errors.CompilerError, match="pip install triton"):
        compiler.cache_key("merge_rows", 90)


def test_keys_of_the_cache_differ() -> None:
    variants = [compiler.cache_key(architecture=90, **variant) for variant in VARIANTS.values()]
    assert len({*variants, compiler.cache_key("merge_rows", 80)}) == len(VARIANTS) + 1


def test_interpreted_kernels_are_not_compiled() -> None:
    program = """
from fused_adamw import errors
from fused_adamw.triton_kernels import compiler
try:
    compiler.compile_to_cubin("merge_rows", 90)
except errors.CompilerError as error:
    print(error)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert "TRITON_INTERPRET is set" in output.stdout


def test_both_compilers_raise_one_error() -> None:
    assert nvrtc.CompilerError is errors.CompilerError
