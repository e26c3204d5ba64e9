"""The step in Triton, interpreted: the bits of the CPU ops.

The interpreter runs programs one after another; programs at once are tested on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
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
from fused_adamw import _C
from fused_adamw._C import CUDA_LAYOUT
from fused_adamw.rounding import split_master
from fused_adamw.torch_library import checks, step, step_inplace
from fused_adamw.torch_library.step_inplace import StepGroup
from fused_adamw.torch_library.step_options import AmpTensors, StepOptions

pytest.importorskip("triton", reason="blocked: Triton is not installed")

from triton_interpreter import Interpreter, assert_same_lists, clones

ops = torch.ops.fused_adamw

BLOCK = CUDA_LAYOUT["kElementsPerProgram"]
SIZES = (1, 31, 32, 33, 127, 255, 256, 257, 1023, 1024, 1025, BLOCK - 1, BLOCK, BLOCK + 1, 4097, 16385)
NO_AMP = AmpTensors(None, None)

# The dtype of a parameter, whether its master weight is split, and whether it is rounded by chance.
MASTER_FORMS = {
    "bf16 split": (torch.bfloat16, True, False),
    "bf16 whole": (torch.bfloat16, False, False),
    "bf16 by chance": (torch.bfloat16, False, True),
    "fp16": (torch.float16, False, False),
    "fp16 by chance": (torch.float16, False, True),
}


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


# The step in place.


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_every_size(interpreter: Interpreter, dtype: torch.dtype, amsgrad: bool) -> None:
    """All in one launch, so the search for a program's tensor is tested with them."""
    samples = [wide_sample(size, dtype, amsgrad=amsgrad, seed=size) for size in SIZES]
    launches = len(interpreter.launches)
    compare(interpreter, lists_of(samples))
    blocks = sum(-(-size // BLOCK) for size in SIZES)
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
    capacity = _C.CUDA_LAYOUT["StepParameters<InPlaceTensor>.capacity"]
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
    for size in (1, 1027, BLOCK, 3000):
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


# 16-bit parameters.


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("form", MASTER_FORMS)
def test_16_bit_parameters(interpreter: Interpreter, form: str, amsgrad: bool) -> None:
    """In place, every size and dtype of gradients; a third of the parameters were written to by others."""
    dtype, split, seeds = MASTER_FORMS[form]
    samples = [
        wide_sample(size, GRAD_DTYPES[i % 3], amsgrad=amsgrad, seed=size) for i, size in enumerate(SIZES)
    ]
    lists = lists_of(samples)
    masters = lists[0]
    lists[0] = [master.to(dtype) for master in masters]
    if split:
        lists[0], masters = ([pair[k] for pair in map(split_master, masters)] for k in (0, 1))
    for param in lists[0]:
        param[::3] *= 2.0
    options: dict[str, Any] = {"rounding_seeds": [7 - i for i in range(len(SIZES))]} if seeds else {}
    for found_inf in (0.0, 1.0):
        options["found_inf"] = torch.tensor(found_inf)
        found, expected = clones([*lists, masters]), clones([*lists, masters])
        with interpreter.ops():
            call_step_(found[:-1], masters=found[-1], **options)
        call_step_(expected[:-1], masters=expected[-1], **options)
        assert_same_lists(found, expected)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("form", MASTER_FORMS)
def test_16_bit_parameters_out_of_place(
    interpreter: Interpreter, form: str, amsgrad: bool, first: bool, skip: bool
) -> None:
    dtype, split, seed = MASTER_FORMS[form]
    sample = wide_sample(BLOCK + 3, torch.float16, amsgrad=amsgrad)
    param, master = split_master(sample.param) if split else (sample.param.to(dtype), sample.param)
    state = [None] * (3 + amsgrad) if first else [*sample.moments, master]
    overload = ops.step.master_amsgrad if amsgrad else ops.step.master
    step = 0 if first else 2**40
    options = {"rounding_seed": 5} if seed and not (first and split) else {}
    if skip:
        options["found_inf"] = torch.tensor(1.0)
    with interpreter.ops():
        found = overload(param, sample.grad, *state, step, **options)
    for mine, other in zip(found, overload(param, sample.grad, *state, step, **options), strict=True):
        assert_same_bits(mine, other)
