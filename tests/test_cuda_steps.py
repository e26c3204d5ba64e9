"""The steps that ``benchmarks/cuda_steps.py`` times come to the same, also without a card."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import fused_adamw

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SIZES = (1, 2052, 5000)


@pytest.fixture
def cuda_steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, with the CPU in place of CUDA."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("cuda_steps")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    return module


def test_contenders_come_to_the_same(cuda_steps: Any) -> None:
    assert len({str(case) for case in cuda_steps.CASES}) == len(cuda_steps.CASES)
    for case in cuda_steps.CASES:
        racers = cuda_steps.contenders(SIZES, case)
        for racer in racers.values():
            for _ in range(20):
                racer.step()
        *others, reference = racers.values()
        before = cuda_steps.parameters(SIZES, case)
        for param, old in zip(reference.params, before, strict=True):
            assert (param != old).float().mean() > 0.5
            assert param.dtype == case.params
        assert {weight.dtype for weight in reference.weights()} == {torch.float32}
        for racer in others:
            cuda_steps.compare(racer, reference)


def test_a_wrong_weight_is_seen(cuda_steps: Any) -> None:
    case = cuda_steps.Case(dtype=torch.bfloat16, params=torch.bfloat16)
    right, wrong = (cuda_steps.contenders(SIZES, case)["fused_adamw"] for _ in range(2))
    for racer in (right, wrong):
        racer.step()
    cuda_steps.compare(wrong, right)
    optimizer = wrong.step.__self__
    assert isinstance(optimizer, fused_adamw.AdamW)
    optimizer.state[wrong.params[1]]["master_remainder"] ^= 0x3FFF  # less than the parameter shows
    with pytest.raises(AssertionError):
        cuda_steps.compare(wrong, right)
