"""The Triton kernels: interpreted, they have the bits of the CPU ops; compiled, the code that gives them.

Neither needs a GPU. What only one can show (timing, programs that run at once) is tested on CUDA.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import (
    GRAD_DTYPES,
    Sample,
    Snapshot,
    assert_same_bits,
    assert_same_state,
    call_step,
    call_step_,
    first_sample,
    lists_of,
    normal_sample,
    scalar,
    wide_sample,
)
from fused_adamw import _C, StatsPlan, errors, nvrtc
from fused_adamw.torch_library import checks, library, step, step_inplace
from fused_adamw.torch_library.step_inplace import StepGroup
from fused_adamw.torch_library.step_options import AmpTensors, StepOptions
from fused_adamw.triton_kernels import compiler

try:
    import triton
except ImportError:
    pytest.skip("blocked: Triton is not installed", allow_module_level=True)

from triton_interpreter import Interpreter, clones

ops = torch.ops.fused_adamw

SIZES = (1, 31, 32, 33, 127, 255, 256, 257, 1023, 1024, 1025, 4097, 16385)
NO_AMP = AmpTensors(None, None)


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Triton keeps what it compiles; here it must compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return Interpreter()


def compare(interpreter: Interpreter, lists: list[list[Tensor]], **options: Any) -> None:
    """An update in place by the kernel and by the CPU: the same bits in all tensors, counters too."""
    found, expected = clones(lists), clones(lists)
    with interpreter.ops():
        call_step_(found, **options)
    call_step_(expected, **options)
    assert_same_lists(found, expected)


def assert_same_lists(found: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> None:
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_bits(a, b, f"list {i}, tensor {k}")


# The step in place.


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_every_size(interpreter: Interpreter, dtype: torch.dtype, amsgrad: bool) -> None:
    """All in one launch, so the search for a program's tensor is tested with them."""
    samples = [wide_sample(size, dtype, amsgrad=amsgrad, seed=size) for size in SIZES]
    launches = len(interpreter.launches)
    compare(interpreter, lists_of(samples))
    blocks = sum(-(-size // 1024) for size in SIZES)
    assert interpreter.launches[launches:] == [("adamw_step", blocks)]


OPTIONS: dict[str, dict[str, Any]] = {
    "maximize": {"maximize": True, "lr": 0.1, "weight_decay": 0.3},
    "betas_0": {"beta1": 0.0, "beta2": 0.0},
    "long_memory": {"beta1": 0.99, "beta2": 0.99999, "eps": 0.1},
    "lr_0": {"lr": 0.0, "weight_decay": 0.0},
    "lr_tiny": {"lr": 1e-12},
}


@pytest.mark.parametrize("scalars", ["numbers", "tensors"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option(interpreter: Interpreter, options: dict[str, Any], scalars: str) -> None:
    samples = [wide_sample(1500, seed=1), normal_sample(300, seed=2)]
    compare(interpreter, lists_of(samples), scalars=scalars, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_options_in_tensors_of_each_dtype(interpreter: Interpreter, dtype: torch.dtype) -> None:
    lists = lists_of([normal_sample(100)])
    found, expected = clones(lists), clones(lists)
    options = {
        "lr": scalar(0.01, dtype=dtype),
        "beta1": scalar(0.8, dtype=dtype, shape=(1,)),
        "beta2": scalar(0.99, dtype=dtype),
        "grad_scale": scalar(3.0, dtype=dtype),
    }
    with interpreter.ops():
        ops.step_.tensor(*found, **options)
    ops.step_.tensor(*expected, **options)
    assert_same_lists(found, expected)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000, 65535, 2**24 - 1, 2**24])
def test_bias_corrections_of_every_count(interpreter: Interpreter, count: int) -> None:
    compare(interpreter, lists_of([replace(normal_sample(40), step=count)]))


def test_counters_go_on_by_one_each_update(interpreter: Interpreter) -> None:
    lists = lists_of([normal_sample(size, step=size) for size in (3000, 5, 0)])
    expected = clones(lists)
    with interpreter.ops():
        for _ in range(3):
            call_step_(lists)
    for _ in range(3):
        call_step_(expected)
    assert_same_lists(lists, expected)
    assert [step.item() for step in lists[5]] == [3003.0, 8.0, 0.0]


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_odd_alignments(interpreter: Interpreter, dtype: torch.dtype) -> None:
    """Every tensor in turn begins between two vectors; the masked accesses must go no further than it."""
    samples = []
    for name in ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        for offset in (1, 2, 3):
            whole = wide_sample(1030, dtype, amsgrad=True, seed=offset)
            own = replace(whole, **{name: torch.cat([getattr(whole, name), torch.zeros(offset)])[offset:]})
            samples.append(own.map(lambda tensor: tensor))
    assert any(sample.param.data_ptr() % 16 for sample in samples)
    lists = lists_of(samples)
    guards = [tensor.untyped_storage() for tensor in lists[0]]
    expected = clones(lists)
    before = [bytes(guard[:4]) for guard in guards]
    with interpreter.ops():
        call_step_(lists)
    call_step_(expected)
    assert_same_lists(lists, expected)
    for sample_param, guard, old in zip(lists[0], guards, before, strict=True):
        if sample_param.storage_offset():
            assert bytes(guard[:4]) == old


def test_many_tensors_take_several_launches(interpreter: Interpreter) -> None:
    capacity = _C.CUDA_LAYOUT["InPlaceParameters.capacity"]
    samples = [normal_sample(1 + i % 3, seed=i, step=i) for i in range(capacity + 2)]
    launches = len(interpreter.launches)
    compare(interpreter, lists_of(samples))
    assert [blocks for _, blocks in interpreter.launches[launches:]] == [capacity, 2]


def test_groups_of_different_options_share_a_launch(interpreter: Interpreter) -> None:
    groups = [
        StepOptions(0.1, 0.9, 0.999, 0.01, 1e-8, False),
        StepOptions(scalar(0.2), scalar(0.8), scalar(0.99), 0.0, 1e-3, True),
        StepOptions(scalar(0.3, dtype=torch.float32), 0.5, 0.6, 0.5, 1e-8, False),
    ]
    lists = [lists_of([normal_sample(600 * (i + 1), seed=i, step=i) for i in range(2)]) for _ in groups]
    found, expected = [clones(own) for own in lists], [clones(own) for own in lists]

    def update(all_lists: Sequence[list[list[Tensor]]]) -> None:
        step_inplace.update(
            [
                StepGroup(checks.StepLists(*own), options)
                for own, options in zip(all_lists, groups, strict=True)
            ],
            NO_AMP,
        )

    launches = len(interpreter.launches)
    with interpreter.ops():
        update(found)
    update(expected)
    assert len(interpreter.launches) == launches + 1
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_lists(ours, theirs)


# Skipping and clipping.

SKIPS: dict[str, dict[str, Tensor]] = {
    "found_inf": {"found_inf": scalar(1.0, dtype=torch.float32)},
    "found_inf_bool": {"found_inf": torch.tensor(True)},
    "scale_0": {"grad_scale": scalar(0.0, dtype=torch.float32)},
    "scale_negative": {"grad_scale": scalar(-2.0)},
    "scale_infinite": {"grad_scale": scalar(math.inf)},
    "scale_nan": {"grad_scale": scalar(math.nan)},
    "scale_too_small": {"grad_scale": scalar(1e-320)},
}


@pytest.mark.parametrize("skip", SKIPS.values(), ids=SKIPS)
def test_a_skipped_update_leaves_everything(
    interpreter: Interpreter, skip: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On CUDA the host sees no value, and the kernel is what skips.
    monkeypatch.setattr(AmpTensors, "check_values", lambda *_: None)
    lists = lists_of([wide_sample(1500, amsgrad=True), normal_sample(20, amsgrad=True)])
    before = Snapshot(tensor for tensors in lists for tensor in tensors)
    with interpreter.ops():
        ops.step_(*lists, **skip)
    before.assert_bits_unchanged()


def test_found_inf_0_skips_nothing(interpreter: Interpreter) -> None:
    lists = lists_of([wide_sample(100)])
    compare(interpreter, lists, found_inf=scalar(0.0, dtype=torch.float32), grad_scale=scalar(1024.0))
    compare(interpreter, lists, found_inf=torch.tensor(False), grad_scale=scalar(2.0**-100))


def report_of(max_abs: float, scaled_sum_of_squares: float, nonfinite: float = 0.0) -> Tensor:
    return torch.tensor([max_abs, scaled_sum_of_squares, nonfinite])


REPORTS = {
    "clips": (report_of(3.0, 7.0), 1.0, 1e-6),
    "clips_nothing": (report_of(0.01, 2.0), 1.0, 1e-6),
    "no_clipping": (report_of(3.0, 7.0), None, 1e-6),
    "max_norm_0": (report_of(3.0, 7.0), 0.0, 1e-6),
    "tiny": (report_of(1.0, 1.0), 1e-42, 0.0),
    "smallest_normal": (report_of(1.0, 1.0), 2.0**-126, 0.0),
    "norm_0": (report_of(0.0, 0.0), 1.0, 0.0),
    "norm_0_max_0": (report_of(0.0, 0.0), 0.0, 0.0),
    "norm_beyond_float32": (report_of(3e38, 1e30), 5.0, 1e-6),
    "nonfinite": (report_of(3.0, 7.0, 1.0), 1.0, 1e-6),
    "nonfinite_without_clipping": (report_of(3.0, 7.0, 1.0), None, 1e-6),
}


@pytest.mark.parametrize(("report", "max_norm", "epsilon"), REPORTS.values(), ids=REPORTS)
def test_clipping_by_a_report(
    interpreter: Interpreter, report: Tensor, max_norm: float | None, epsilon: float
) -> None:
    lists = lists_of([wide_sample(1100, amsgrad=True), normal_sample(20, torch.float16, amsgrad=True)])
    found, expected = clones(lists), clones(lists)
    options = {"max_norm": max_norm, "norm_epsilon": epsilon, "grad_scale": scalar(0.5)}
    before = report.clone()
    with interpreter.ops():
        ops.adamw_scaled(*found, report, **options)
    ops.adamw_scaled(*expected, report, **options)
    assert_same_lists(found, expected)
    assert_same_bits(report, before)


# The step out of place.


def compare_out_of_place(interpreter: Interpreter, sample: Sample, **options: Any) -> None:
    with interpreter.ops():
        found = call_step(sample, **options)
    assert_same_state(found, call_step(sample, **options))


@pytest.mark.parametrize("make", [wide_sample, first_sample])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_out_of_place(interpreter: Interpreter, dtype: torch.dtype, amsgrad: bool, make: Any) -> None:
    for size in (1, 1024, 1027, 3000):
        compare_out_of_place(interpreter, make(size, dtype, amsgrad=amsgrad))
        compare_out_of_place(interpreter, make(size, dtype, amsgrad=amsgrad), scalars="tensors", lr=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_out_of_place_with_the_count_in_a_tensor(interpreter: Interpreter, dtype: torch.dtype) -> None:
    sample = normal_sample(50)
    arguments = (sample.param, sample.grad, sample.exp_avg, sample.exp_avg_sq, scalar(16777217, dtype=dtype))
    options = {"lr": scalar(0.1), "beta1": scalar(0.9), "beta2": scalar(0.999)}
    with interpreter.ops():
        found = ops.step.tensor(*arguments, **options)
    for ours, theirs in zip(found, ops.step.tensor(*arguments, **options), strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("make", [wide_sample, first_sample])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_skipped_update_out_of_place_copies(interpreter: Interpreter, amsgrad: bool, make: Any) -> None:
    compare_out_of_place(interpreter, make(1500, amsgrad=amsgrad), found_inf=scalar(1.0, dtype=torch.float32))


@pytest.mark.parametrize("clip", [1.0, 0.25, 0.0, 1e-42])
def test_out_of_place_with_a_clip_from_the_host(interpreter: Interpreter, clip: float) -> None:
    options = StepOptions(0.1, 0.9, 0.999, 0.01, 1e-8, False)
    inputs = [
        step.StepInput(
            sample.param,
            sample.grad,
            {"exp_avg": sample.exp_avg, "exp_avg_sq": sample.exp_avg_sq},
            sample.step,
            options,
            NO_AMP,
        )
        for sample in (wide_sample(1025), first_sample(10), normal_sample(2000, torch.bfloat16))
    ]
    with interpreter.ops():
        found = step.update_all(inputs, clip)
    assert_same_lists(found, step.update_all(inputs, clip))


# Statistics.


def analyze(grads: Sequence[Tensor], **options: Any) -> Tensor:
    rows = torch.full((sum(-(-grad.numel() // 16384) for grad in grads), 3), math.nan)
    ops.analyze_gradient(grads, rows, **options)
    return rows


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_rows_of_every_size(interpreter: Interpreter, dtype: torch.dtype) -> None:
    grads = [wide_sample(size, dtype, seed=size).grad for size in (*SIZES, 16383, 16384, 40000)]
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
    interpreter.run(recorder, [1024])
    assert_same_lists([[found_scratch, found_report]], [[scratch, report]])


@pytest.mark.parametrize("order", [[2, 1, 0], [1, 0, 2], [0, 2, 1]])
def test_whichever_program_comes_last_merges(interpreter: Interpreter, order: list[int]) -> None:
    rows = random_rows(3000)
    scratch, report = torch.full((9,), math.nan), torch.full((3,), math.nan)
    recorder = _C.CudaRecorder()
    table = _C.TensorTable("test", [[rows], [scratch], [report]], [False, True, True])
    _C.cuda_merge_all_rows(recorder, table, True)
    interpreter.run(recorder, order)
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
    """Hierarchical: in two launches, whose programs merge two groups of rows, and one of them the groups."""
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
    second = ("analyze_gradients", 1) if hierarchical else ("merge_all_rows_serially", 1)
    first = ("analyze_gradients", count - 1 if hierarchical else count)
    assert interpreter.launches[launches:] == [first, second]


# Machine code.

# Ampere, Hopper and the two Blackwells, as for NVRTC.
ARCHITECTURES = (80, 90, 100, 120)

VARIANTS: dict[str, dict[str, Any]] = {
    **{
        f"step in_place={in_place} amsgrad={amsgrad}": {
            "kernel": compiler.STEP,
            "in_place": in_place,
            "amsgrad": amsgrad,
        }
        for in_place in (True, False)
        for amsgrad in (True, False)
    },
    **{kernel: {"kernel": kernel} for kernel in compiler.STATS},
}


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
    # Four blocks of 256 threads fit on a multiprocessor, which has 65,536 registers.
    if variant.startswith("step"):
        assert int(re.search(r"REG:(\d+)", usage)[1]) <= 64  # type: ignore[index]


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
    # NaNs: a select for each result of each element, in both paths.
    if step:
        results = 4 if "amsgrad=True" in variant else 3
        assert count(r"selp\.[bf]32\s.*(0f7FC00000|2143289344)", ptx) == 2 * 4 * results


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("step")])
def test_whole_blocks_of_a_step_take_wide_accesses(variant: str, architecture: int) -> None:
    ptx = compiled(variant, architecture).ptx
    amsgrad = "amsgrad=True" in variant
    assert count(r"ld\.global\.v4\.b32", ptx) == 4 + amsgrad
    assert count(r"ld\.global\.v2\.b32|ld\.global\.v4\.b16", ptx) == 1
    assert count(r"st\.global\.v4\.b32", ptx) == 3 + amsgrad


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
    ],
)
def test_variants_are_of_the_step_alone(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="only adamw_step has variants"):
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
