"""Fixtures for all tests: the devices to run on, and settings of torch that a test may change."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

import fused_adamw
from fused_adamw import cuda_kernels
from fused_adamw.cuda_kernels import COMPILERS
from fused_adamw.torch_library import checks

# The same examples in every run: a failure is a change of the code, and nothing is kept between runs.
hypothesis.settings.register_profile(
    "fused_adamw", derandomize=True, database=None, deadline=None, print_blob=False
)
hypothesis.settings.load_profile("fused_adamw")


@pytest.fixture(scope="session", params=["cpu", *(f"cuda-{name}" for name in COMPILERS)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each device that this version has kernels for, a CUDA device once with each compiler."""
    kind, _, compiler = request.param.partition("-")
    assert kind in checks.BACKENDS
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if compiler == "ptx" and importlib.util.find_spec("triton") is None:
        pytest.skip("blocked: Triton is not installed")
    fused_adamw.set_cuda_compiler(compiler or None)
    yield torch.empty(0, device=kind).device
    fused_adamw.set_cuda_compiler(None)


@pytest.fixture(autouse=True)
def no_compiler_of_other_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """``device``, and what it chose, outlasts the tests that use it; the others must not see its choice."""
    if "device" not in request.fixturenames:
        monkeypatch.setattr(cuda_kernels, "_chosen", None)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """A CUDA device, with each compiler."""
    if device.type != "cuda":
        pytest.skip("of CUDA alone")
    return device


@pytest.fixture
def readable_device(device: torch.device) -> torch.device:
    """A device whose tensors the host reads without waiting, so that values in them are checked, too."""
    if device.type != "cpu":
        pytest.skip(f"the host reads no value of a tensor on {device.type}, so it refuses none")
    return device


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of torch's threads for one test."""
    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)


@pytest.fixture
def set_capability() -> Iterator[Callable[[str], None]]:
    """Sets the instruction set of the CPU kernels for one test."""
    capability = fused_adamw.cpu_capability()
    yield fused_adamw.set_cpu_capability
    fused_adamw.set_cpu_capability(capability)


@pytest.fixture
def flush_denormals() -> Iterator[Callable[[], None]]:
    """Makes this thread's arithmetic flush subnormal numbers to zero for one test."""

    def flush() -> None:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush subnormal numbers")

    yield flush
    torch.set_flush_denormal(False)
