"""The statistics in Triton, interpreted: the bits of the CPU ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import GRAD_DTYPES, assert_same_bits, normal_sample, scalar, wide_sample
from fused_adamw import _C, StatsPlan
from fused_adamw.torch_library import library
from fused_adamw.torch_library.step_options import AmpTensors

pytest.importorskip("triton", reason="blocked: Triton is not installed")

from triton_interpreter import Interpreter, assert_same_lists

ops = torch.ops.fused_adamw

SIZES = (1, 31, 32, 33, 127, 255, 256, 257, 1023, 1024, 1025, 4097, 16383, 16384, 16385, 40000)
NO_AMP = AmpTensors(None, None)


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return Interpreter()


def analyze(grads: Sequence[Tensor], **options: Any) -> Tensor:
    rows = torch.full((sum(-(-grad.numel() // 16384) for grad in grads), 3), math.nan)
    ops.analyze_gradient(grads, rows, **options)
    return rows


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_rows_of_every_size(interpreter: Interpreter, dtype: torch.dtype) -> None:
    grads = [wide_sample(size, dtype, seed=size).grad for size in SIZES]
    grads += [grad.nan_to_num(0.0, 0.0, 0.0) for grad in grads]
    grads += [grad[1:] for grad in grads if grad.numel() > 1]
    with interpreter.ops():
        found = analyze(grads)
    assert_same_bits(found, analyze(grads))


@pytest.mark.parametrize("scale", [3.0, 2.0**-100, 1e38])
def test_rows_of_scaled_gradients(interpreter: Interpreter, scale: float) -> None:
    grads = [normal_sample(size).grad for size in (1, 1025, 16384, 20000)]
    options = {"grad_scale": scalar(scale, dtype=torch.float32)}
    with interpreter.ops():
        found = analyze(grads, **options)
    assert_same_bits(found, analyze(grads, **options))


@pytest.mark.parametrize("scale", [0.0, math.nan, math.inf, 1e-44])
def test_rows_of_a_bad_scale(interpreter: Interpreter, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the host does not see the scale."""
    monkeypatch.setattr(AmpTensors, "check_values", lambda *_: None)
    grads = [torch.full((5,), 1e-39), torch.zeros(5), normal_sample(1025).grad]
    options = {"grad_scale": scalar(scale, dtype=torch.float32)}
    with interpreter.ops():
        found = analyze(grads, **options)
    assert_same_bits(found, analyze(grads, **options))


def values_that_show_the_order(count: int, elements: int) -> Tensor:
    """Whose squares' sum in float64 decides the last bit of the float32 result.

    1 + 2^-24 is half-way between two float32 numbers. Some 2^-54 are lost one by one in 1, and move the sum
    to the upper number where enough of them were added together before.
    """
    generator = torch.Generator().manual_seed(elements)
    values = torch.zeros(count, elements)
    for row in values:
        near = torch.randint(elements // 16, (6,), generator=generator) * 16
        row[near + torch.randint(8, (6,), generator=generator)] = 2.0**-27
        first = int(near[0])
        row[first : first + int(torch.randint(9, (), generator=generator))] = 2.0**-27
        places = torch.randperm(elements, generator=generator)
        row[places[0]], row[places[1]] = 1.0, 2.0**-12
    return values


@pytest.mark.parametrize("elements", [1024, 16384])
def test_sums_within_a_row_have_the_promised_order(interpreter: Interpreter, elements: int) -> None:
    grads = list(values_that_show_the_order(100, elements))
    with interpreter.ops():
        found = analyze(grads)
    assert_same_bits(found, analyze(grads))
    assert len(found[:, 1].unique()) == 2


def test_sums_over_rows_have_the_promised_order(interpreter: Interpreter) -> None:
    sums = set()
    for values in values_that_show_the_order(60, 1024):
        rows = torch.stack([values, torch.ones_like(values), torch.zeros_like(values)], dim=1)
        with interpreter.ops():
            found = merge(rows)
        assert_same_lists([found], [merge(rows)])
        sums.add(found[1][1].item())
    assert len(sums) == 2


def random_rows(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    max_abs = torch.exp2(torch.rand(count, generator=generator) * 60 - 30)
    max_abs *= torch.rand(count, generator=generator) > 0.1
    squares = (1.0 + 16383 * torch.rand(count, generator=generator)) * (max_abs > 0)
    nonfinite = (torch.rand(count, generator=generator) > 0.999).float()
    return torch.stack([max_abs, squares, nonfinite], dim=1)


def merge(rows: Tensor, *, hierarchical: bool = True) -> tuple[Tensor, Tensor]:
    elements = StatsPlan(len(rows)).scratch_elements if hierarchical and len(rows) else 0
    scratch, report = torch.full((elements,), math.nan), torch.full((3,), math.nan)
    ops.merge_gradient_stats(rows, scratch, report, hierarchical=hierarchical)
    return scratch, report


@pytest.mark.parametrize("hierarchical", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 1024, 1025, 3000])
def test_merging_all_rows(interpreter: Interpreter, count: int, hierarchical: bool) -> None:
    rows = random_rows(count)
    with interpreter.ops():
        found = merge(rows, hierarchical=hierarchical)
    assert_same_lists([found], [merge(rows, hierarchical=hierarchical)])


def test_merging_in_three_stages(interpreter: Interpreter) -> None:
    """The last program merges 1025 rows of the first stage, by itself: the others are taken as done."""
    rows = random_rows(1024**2 + 1)
    scratch, report = merge(rows)
    found_scratch, found_report = torch.full_like(scratch, math.nan), torch.full_like(report, math.nan)
    found_scratch[: 3 * 1024] = scratch[: 3 * 1024]
    recorder = _C.CudaRecorder()
    table = _C.TensorTable("test", [[rows], [found_scratch], [found_report]], [False, True, True])
    _C.cuda_merge_all_rows(recorder, table, True)
    interpreter.finished_blocks[0] = 1024
    interpreter.run(recorder, programs=[1024])
    assert_same_lists([[found_scratch, found_report]], [[scratch, report]])


@pytest.mark.parametrize("order", [[2, 1, 0], [1, 0, 2], [0, 2, 1]])
def test_whichever_program_comes_last_merges(interpreter: Interpreter, order: list[int]) -> None:
    rows = random_rows(3000)
    scratch, report = torch.full((9,), math.nan), torch.full((3,), math.nan)
    recorder = _C.CudaRecorder()
    table = _C.TensorTable("test", [[rows], [scratch], [report]], [False, True, True])
    _C.cuda_merge_all_rows(recorder, table, True)
    interpreter.run(recorder, programs=order)
    assert_same_lists([[scratch, report]], [merge(rows)])


@pytest.mark.parametrize("count", [1, 1024, 1025, 3000])
def test_one_stage_of_merging(interpreter: Interpreter, count: int) -> None:
    rows = random_rows(count)
    found, expected = (torch.full((-(-count // 1024), 3), math.nan) for _ in range(2))
    with interpreter.ops():
        ops.merge_gradient_stats_chunks(rows, found)
    ops.merge_gradient_stats_chunks(rows, expected)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("hierarchical", [True, False])
def test_analysis_and_report_at_once(interpreter: Interpreter, hierarchical: bool) -> None:
    """Hierarchical: two launches of the analysis, and two groups of rows."""
    number = _C.CUDA_LAYOUT["AnalyzeParameters.capacity"] + 1 if hierarchical else 20
    grads = [wide_sample(40000).grad.nan_to_num(0.0)]
    grads += [normal_sample(1 + i % 4, seed=i).grad for i in range(1, number)]
    lists = [grads, grads, grads, grads, [], [torch.zeros(()) for _ in grads]]
    count = number + 2
    shapes = ((count, 3), (6 if hierarchical else 0,), (3,))
    found, expected = ([torch.full(shape, math.nan) for shape in shapes] for _ in range(2))

    def run(rows: Tensor, scratch: Tensor, report: Tensor) -> None:
        table = _C.TensorTable("test", lists, [False] * 6)
        stats = _C.TensorTable("test", [[rows], [scratch], [report]], [True] * 3)
        library.backend(torch.device("cpu")).analyze_and_merge([table], stats, NO_AMP, hierarchical)

    launches = len(interpreter.launches)
    with interpreter.ops():
        run(*found)
    run(*expected)
    assert_same_lists([found], [expected])
    analyses = [count - 1, 1] if hierarchical else [count]
    merging = ("merge_all_rows", 2) if hierarchical else ("merge_all_rows_serially", 1)
    assert interpreter.launches[launches:] == [*(("analyze_gradients", n) for n in analyses), merging]
