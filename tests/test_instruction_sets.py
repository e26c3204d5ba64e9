"""The bits of the CPU kernels depend on no instruction set, thread count or floating-point setting."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import fused_adamw
from cases import (
    GRAD_DTYPES,
    Sample,
    assert_same_state,
    call_step,
    call_step_,
    first_sample,
    lists_of,
    normal_sample,
    wide_sample,
)

# A vector loop and its remainders; more than one thread's part; none of a multiple of 16.
SIZES = (1, 7, 15, 17, 33, 1031, 20011)


def make_samples(dtype: torch.dtype, amsgrad: bool) -> list[Sample]:
    return [
        make_sample(size, dtype, amsgrad=amsgrad, seed=size)
        for make_sample in (wide_sample, normal_sample)
        for size in SIZES
    ]


def results(samples: list[Sample], **options: Any) -> list[Sample]:
    """What both ops make of samples, and of the same before their first update."""
    first = [
        replace(sample, exp_avg=None, exp_avg_sq=None, max_exp_avg_sq=None, step=0) for sample in samples
    ]
    out_of_place = [call_step(sample, **options) for sample in (*samples, *first)]
    in_place = [sample.clone() for sample in samples]
    call_step_(lists_of(in_place), **options)
    return [*in_place, *out_of_place]


def assert_same_results(found: list[Sample], expected: list[Sample]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_same_state(one, other)


OPTIONS = [{}, {"maximize": True, "eps": 1e-40}, {"lr": 1e-42}, {"beta1": 0.0, "beta2": 0.0}]


@pytest.mark.parametrize("capability", fused_adamw.cpu_capabilities())
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_every_instruction_set_gives_the_same_bits(
    dtype: torch.dtype, amsgrad: bool, capability: str, set_capability: Callable[[str], None]
) -> None:
    samples = make_samples(dtype, amsgrad)
    for options in OPTIONS:
        set_capability("baseline")
        expected = results(samples, **options)
        set_capability(capability)
        assert fused_adamw.cpu_capability() == capability
        assert_same_results(results(samples, **options), expected)


@pytest.mark.parametrize("capability", fused_adamw.cpu_capabilities())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_instruction_set_converts_every_16_bit_gradient(
    dtype: torch.dtype, capability: str, set_capability: Callable[[str], None]
) -> None:
    set_capability(capability)
    gradients = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    sample = first_sample(2**16, amsgrad=True)
    narrow = call_step(replace(sample, grad=gradients), beta1=0.0, eps=0.0)
    wide = call_step(replace(sample, grad=gradients.float()), beta1=0.0, eps=0.0)
    assert_same_state(narrow, wide)
    # With beta1 = 0 the first moment is the gradient, as torch converts it (-0 is 0 + -0 = 0 there).
    torch.testing.assert_close(narrow.exp_avg, gradients.float(), rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_number_of_threads_gives_the_same_bits(
    threads: int, set_threads: Callable[[int], None]
) -> None:
    samples = make_samples(torch.bfloat16, amsgrad=True)
    set_threads(1)
    expected = results(samples)
    set_threads(threads)
    assert_same_results(results(samples), expected)
    # One large tensor among small ones, so that the cuts fall inside and between tensors.
    samples = [normal_sample(size, seed=size) for size in (5, 100003, 1, 0, 64, 30000, 63, 9)]
    expected = [call_step(sample) for sample in samples]
    call_step_(lists_of(samples))
    assert_same_results(samples, expected)


# Where flushing would show: subnormal values (in `results`), and subnormal scalars.
FLUSHED_SCALARS: dict[str, tuple[Callable[[], Sample], dict[str, Any]]] = {
    "step_size": (
        lambda: replace(
            normal_sample(257), param=torch.zeros(257), exp_avg=torch.ones(257), exp_avg_sq=torch.zeros(257)
        ),
        {"lr": 1e-42, "eps": 1e-30, "beta2": 0.0},
    ),
    "eps": (
        lambda: replace(normal_sample(257), grad=torch.zeros(257), exp_avg_sq=torch.zeros(257)),
        {"lr": 1e-40, "eps": 1e-40},
    ),
    "inverse_scale": (lambda: first_sample(257), {"grad_scale": torch.tensor(2.0**127)}),
    "beta2": (
        lambda: replace(normal_sample(257), exp_avg_sq=torch.full((257,), 1e38), grad=torch.zeros(257)),
        {"beta2": 1e-40},
    ),
}


@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_flushing_subnormals_elsewhere_changes_nothing(
    dtype: torch.dtype,
    amsgrad: bool,
    threads: int,
    set_threads: Callable[[int], None],
    flush_denormals: Callable[[], None],
) -> None:
    set_threads(threads)
    samples = make_samples(dtype, amsgrad)
    tiny = torch.tensor([2.0**-140])
    expected = results(samples)
    flush_denormals()
    found = results(samples)
    assert tiny.mul(1.0).sum().item() == 0.0, "the thread's own setting must outlast the call"
    torch.set_flush_denormal(False)  # for comparing
    assert_same_results(found, expected)


@pytest.mark.parametrize(("make_sample", "options"), FLUSHED_SCALARS.values(), ids=FLUSHED_SCALARS.keys())
def test_flushing_subnormals_elsewhere_changes_no_scalar(
    make_sample: Callable[[], Sample], options: dict[str, Any], flush_denormals: Callable[[], None]
) -> None:
    sample = make_sample()
    expected = call_step(sample, **options)
    assert any(not torch.equal(tensor, torch.zeros(257)) for tensor in expected.state)
    flush_denormals()
    found = call_step(sample, **options)
    in_place = sample if sample.exp_avg is not None else sample.with_zero_moments()
    in_place = in_place.clone()
    call_step_(lists_of([in_place]), **options)
    torch.set_flush_denormal(False)
    assert_same_state(found, expected)
    assert_same_state(in_place, expected)


def test_the_choice_of_an_instruction_set(set_capability: Callable[[str], None]) -> None:
    capabilities = fused_adamw.cpu_capabilities()
    assert capabilities[0] == "baseline"
    for name in capabilities:
        set_capability(name)
        assert fused_adamw.cpu_capability() == name
    with pytest.raises(ValueError, match="no instruction set") as error:
        fused_adamw.set_cpu_capability("mmx")
    assert fused_adamw.cpu_capability() == capabilities[-1]
    assert_expected_inline(
        str(error.value).replace(", ".join(capabilities), "(all)"),
        """\
set_cpu_capability: this build and processor have no instruction set 'mmx'; they have (all)""",
    )


def test_processor_flags_agree() -> None:
    flags = set()
    with open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("flags"):
                flags = set(line.split(":")[1].split())
    if not flags:
        pytest.skip("no x86 processor")
    levels = {
        "avx2": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
        "avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    }
    expected = ["baseline"]
    for name, needed in levels.items():
        if needed <= flags:
            expected.append(name)
    assert fused_adamw.cpu_capabilities() == expected


def test_the_environment_variable() -> None:
    program = """
import os, fused_adamw
for wanted in ("mmx", "baseline"):
    os.environ["FUSED_ADAMW_CPU_CAPABILITY"] = wanted
    try:
        print(fused_adamw.cpu_capability())
    except ValueError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    refused, accepted = run.stdout.splitlines()
    assert refused.startswith(
        "FUSED_ADAMW_CPU_CAPABILITY: this build and processor have no instruction set 'mmx';"
    )
    assert accepted == "baseline"
