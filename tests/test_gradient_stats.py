"""``analyze_gradient``, ``merge_gradient_stats_chunks``, ``merge_gradient_stats``, and their functions.

Rows and reports must have the bits of ``oracle/gradient_stats.py``; norms must be right by its exact sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fused_adamw
from cases import Snapshot, assert_same_bits
from fused_adamw import GradientStats, StatsPlan, gradient_stats, merge_stats
from oracle import gradient_stats as oracle
from refusals import refuse

ops = torch.ops.fused_adamw

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Around a vector, a pass over the lanes, a row, two rows.
SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 513, 1023, 1024, 1025, 2049, 16383, 16384, 16385, 32769, 100_000)


def wide_values(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Finite values with exponents from the whole range of float32, or of float16, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (-24.0, 15.0) if dtype is torch.float16 else (-149.0, 127.0)
    exponents = torch.rand(size, generator=generator, dtype=torch.float64) * (high - low) + low
    signs = torch.randint(-1, 2, (size,), generator=generator)
    return (torch.exp2(exponents) * signs).to(dtype)


def normal_values(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Values of one magnitude, so that every addition rounds."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def analyze(grads: Sequence[Tensor], grad_scale: Tensor | None = None) -> Tensor:
    """The rows that the op makes, in storage that held NaNs before."""
    count = sum(-(-grad.numel() // 16384) for grad in grads)
    rows = torch.full((count, 3), math.nan, device=grads[0].device if grads else "cpu")
    ops.analyze_gradient(grads, rows, grad_scale=grad_scale)
    return rows


def merge(rows: Tensor, *, hierarchical: bool = True) -> Tensor:
    """The report that the op makes, in storage that held NaNs before."""
    elements = StatsPlan(len(rows)).scratch_elements if hierarchical and len(rows) > 0 else 0
    scratch = torch.full((elements,), math.nan, device=rows.device)
    report = torch.full((3,), math.nan, device=rows.device)
    ops.merge_gradient_stats(rows, scratch, report, hierarchical=hierarchical)
    return report


def random_rows(count: int, seed: int = 0) -> Tensor:
    """Rows as gradients of very different magnitudes make them; some are of zeros."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(count, generator=generator) * 60 - 30
    max_abs = torch.exp2(exponents) * (torch.rand(count, generator=generator) > 0.1)
    squares = (1.0 + 16383 * torch.rand(count, generator=generator)) * (max_abs > 0)
    return torch.stack([max_abs, squares, torch.zeros(count)], dim=1)


def norm_of(report: Tensor) -> float:
    max_abs, squares, _ = report.tolist()
    return max_abs * math.sqrt(squares)


# Rows.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rows_have_the_promised_bits(device: torch.device, size: int, dtype: torch.dtype) -> None:
    for values in (normal_values(size, dtype), wide_values(size, dtype)):
        assert_same_bits(analyze([values.to(device)]).cpu(), oracle.rows_of([values]))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("capability", fused_adamw.cpu_capabilities())
def test_each_instruction_set_and_thread_count_makes_the_same_rows(
    capability: str,
    threads: int,
    set_capability: Callable[[str], None],
    set_threads: Callable[[int], None],
) -> None:
    grads = [
        make(size, dtype, seed)
        for seed, size in enumerate(SIZES)
        for dtype in DTYPES
        for make in (normal_values, wide_values)
    ]
    expected = oracle.rows_of(grads)
    set_capability(capability)
    set_threads(threads)
    assert fused_adamw.cpu_capability() == capability
    assert_same_bits(analyze(grads), expected)


@pytest.mark.parametrize("capability", fused_adamw.cpu_capabilities())
@pytest.mark.parametrize("dtype", DTYPES)
def test_flushing_subnormals_changes_nothing(
    dtype: torch.dtype,
    capability: str,
    set_capability: Callable[[str], None],
    flush_denormals: Callable[[], None],
) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    values = normal_values(40_000).double() * tiny
    grads = [values.to(dtype), torch.full((5,), tiny / 4, dtype=dtype)]
    grad_scale = torch.tensor(4.0)
    expected = oracle.rows_of(grads, 4.0)
    expected_report = oracle.merge(expected)
    serial = oracle.merge_serially(expected)
    assert (expected[:, 0] > 0).all()
    set_capability(capability)
    flush_denormals()
    rows = analyze(grads, grad_scale)
    assert_same_bits(rows, expected)
    assert_same_bits(merge(rows), expected_report)
    assert_same_bits(merge(rows, hierarchical=False), serial)


def values_in_need_of_order(size: int, seed: int) -> Tensor:
    """Values whose sum of squares, rounded to float32, tells in which order it was summed in float64.

    1 and 2^-24 are squares that sum to the middle between two float32 numbers. Squares of 2^-54 vanish where
    they meet the 1 by ones or twos, and push the sum over the middle where more of them meet before. In turn,
    all are in one lane, in neighbouring lanes, anywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    passes = -(-size // 1024)
    order = torch.randperm(max(passes, 16), generator=generator)[:10]
    lane = int(torch.randint(min(size, 1024), (), generator=generator))
    positions = (
        lane + 1024 * (order % passes),
        lane + order,
        torch.randint(size, (10,), generator=generator),
    )[seed % 3]
    values = torch.zeros(size)
    values[positions % size] = 2.0**-27
    values[positions[0] % size] = 1.0
    values[positions[1] % size] = 2.0**-12
    return values


@pytest.mark.parametrize("capability", fused_adamw.cpu_capabilities())
@pytest.mark.parametrize("size", [16, 1024, 5000, 16384])
def test_every_sum_is_taken_in_the_promised_order(
    size: int, capability: str, set_capability: Callable[[str], None]
) -> None:
    set_capability(capability)
    grads = [values_in_need_of_order(size, seed) for seed in range(200)]
    expected = oracle.rows_of(grads)
    assert len(expected[:, 1].unique()) > 1
    assert_same_bits(analyze(grads), expected)


@pytest.mark.parametrize("grad_scale", [2.0**16, 3.0, 2.0**-100, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_scale_is_divided_out(device: torch.device, grad_scale: float, dtype: torch.dtype) -> None:
    grads = [normal_values(20_000), normal_values(100, torch.float16), wide_values(3000)]
    scale = torch.tensor(grad_scale, dtype=dtype)
    rows = analyze([grad.to(device) for grad in grads], scale.to(device))
    assert_same_bits(rows.cpu(), oracle.rows_of(grads, scale.item()))
    shaped = analyze([grad.to(device) for grad in grads], scale.reshape(1).to(device))
    assert_same_bits(shaped, rows)


def test_dtypes_may_be_mixed(device: torch.device) -> None:
    grads = [normal_values(20_000, dtype, seed) for seed, dtype in enumerate(DTYPES * 2)]
    assert_same_bits(analyze([grad.to(device) for grad in grads]).cpu(), oracle.rows_of(grads))


def test_empty_gradients_make_no_rows(device: torch.device) -> None:
    full = [normal_values(20_000), normal_values(3, torch.float16)]
    grads = [torch.empty(0), full[0], torch.empty(3, 0), full[1], torch.empty(0, 2, dtype=torch.bfloat16)]
    rows = analyze([grad.to(device) for grad in grads])
    assert rows.shape == (3, 3)
    assert_same_bits(rows.cpu(), oracle.rows_of(full))


@pytest.mark.parametrize("grads", [[], [torch.empty(0)], [torch.empty(0), torch.empty(2, 0, 3)]], ids=len)
def test_nothing_is_the_identity(grads: list[Tensor]) -> None:
    assert analyze(grads).shape == (0, 3)
    stats = gradient_stats(grads)
    assert stats.report.tolist() == [0.0, 0.0, 0.0]
    assert (stats.norm, stats.max_abs, stats.finite) == (0.0, 0.0, True)
    other = torch.tensor([[2.0, 3.0, 0.0]])
    assert_same_bits(merge_stats(torch.cat([stats.report[None], other])).report, other[0])


def test_offset_views_are_read_where_they_are(device: torch.device) -> None:
    base = normal_values(50_000)
    on_device = base.to(device)
    rows = analyze([on_device[1:20_000], on_device[20_003:]])
    assert_same_bits(rows.cpu(), oracle.rows_of([base[1:20_000].clone(), base[20_003:].clone()]))


@pytest.mark.parametrize(
    "layout",
    [
        lambda grad: grad.to(memory_format=torch.channels_last),
        lambda grad: grad.transpose(0, 3),
        lambda grad: grad.permute(2, 0, 3, 1),
        lambda grad: grad[:, :, :1].squeeze(2).unsqueeze(2).contiguous(),
    ],
    ids=["channels_last", "transposed", "permuted", "size_1"],
)
def test_elements_count_in_the_order_of_memory(device: torch.device, layout: Any) -> None:
    grad = layout(normal_values(8 * 12 * 9 * 25).reshape(8, 12, 9, 25))
    in_memory = torch.as_strided(grad, (grad.numel(),), (1,))
    assert not torch.equal(in_memory, grad.reshape(-1)) or grad.is_contiguous()
    assert_same_bits(analyze([grad.to(device)]).cpu(), oracle.rows_of([in_memory.clone()]))


def test_gradients_stay_as_they_are_and_rows_count_as_written(device: torch.device) -> None:
    grads = [normal_values(20_000).to(device), wide_values(10).to(device)]
    before = Snapshot(grads)
    rows = torch.zeros(3, 3, device=device)
    version = rows._version
    ops.analyze_gradient(grads, rows)
    before.assert_unchanged()
    assert rows._version > version


# Values at the ends of the range.


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (3e38, 10_000),
        (torch.finfo(torch.float32).max, 5),
        (1e-30, 10_000),
        (2.0**-149, 40_000),
        (2.0**-130, 3),
    ],
)
def test_no_square_overflows_or_vanishes(device: torch.device, value: float, size: int) -> None:
    grads = [torch.full((size,), value), torch.full((7,), -value)]
    stats = gradient_stats([grad.to(device) for grad in grads])
    assert stats.finite
    assert stats.max_abs == grads[0][0].item()
    assert stats.norm == pytest.approx(math.sqrt(size + 7) * grads[0][0].item(), rel=1e-7)


def test_zeros_have_norm_0(device: torch.device) -> None:
    stats = gradient_stats([torch.zeros(40_000, device=device), -torch.zeros(3, device=device)])
    assert_same_bits(stats.rows.cpu(), torch.zeros(4, 3))
    assert (stats.norm, stats.max_abs, stats.finite) == (0.0, 0.0, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [normal_values, wide_values])
@pytest.mark.parametrize("hierarchical", [True, False])
def test_norm_is_exact_to_rounding(make: Any, dtype: torch.dtype, hierarchical: bool) -> None:
    grads = [make(size, dtype, size) for size in (1, 100, 16385, 100_000)]
    stats = gradient_stats(grads, hierarchical=hierarchical)
    assert stats.norm == pytest.approx(oracle.exact_norm(grads), rel=1e-7)
    assert stats.max_abs == oracle.exact_max(grads)
    assert stats.finite


def test_a_finite_gradient_that_unscaling_takes_beyond_float32_is_not_finite(device: torch.device) -> None:
    grad = torch.tensor([60_000.0, 1.0], dtype=torch.float16, device=device)
    assert gradient_stats(grad).finite
    stats = gradient_stats(grad, grad_scale=2.0**-120)
    assert not stats.finite
    # The other element still counts: it unscales to 2^120.
    assert stats.report.tolist() == [2.0**120, 1.0, 1.0]


SPECIALS = (math.nan, math.inf, -math.inf)


@given(data=st.data())
def test_one_element_that_is_not_finite_is_found(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 5, 1024, 1030, 16384, 16390, 40_000]), min_size=1))
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in sizes]
    grads = [normal_values(size, dtype, i) for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))]
    candidates = [i for i, size in enumerate(sizes) if size > 0]
    if not candidates:
        return
    bad = data.draw(st.sampled_from(candidates))
    position = data.draw(st.integers(0, sizes[bad] - 1))
    grads[bad][position] = data.draw(st.sampled_from(SPECIALS))
    stats = gradient_stats(grads, grad_scale=data.draw(st.sampled_from([None, 4.0])))
    assert not stats.finite
    assert stats.nonfinite_gradients() == [bad]
    flags = stats.rows[:, 2].tolist()
    first_row = sum(-(-size // 16384) for size in sizes[:bad])
    assert [i for i, flag in enumerate(flags) if flag] == [first_row + position // 16384]
    assert set(flags) <= {0.0, 1.0}


@pytest.mark.parametrize("capability", fused_adamw.cpu_capabilities())
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nonfinite_element_is_found_at_each_position(
    dtype: torch.dtype, capability: str, set_capability: Callable[[str], None]
) -> None:
    set_capability(capability)
    for size in (1, 15, 17, 70):
        clean = normal_values(size, dtype)
        for position in range(size):
            for value in SPECIALS:
                grad = clean.clone()
                grad[position] = value
                assert_same_bits(analyze([grad]), oracle.rows_of([grad]))
                assert analyze([grad])[0, 2] == 1.0


def test_every_16_bit_value_is_read_exactly(device: torch.device) -> None:
    all_bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        values = all_bits.view(dtype)
        grads = [value.clone() for value in values.split(1)]
        rows = analyze([grad.to(device) for grad in grads]).cpu()
        wide = values.double().numpy()
        finite = np.isfinite(wide)
        expected = np.where(finite, np.abs(wide), 0.0)
        assert np.array_equal(rows[:, 0].double().numpy(), expected)
        assert np.array_equal(rows[:, 1].numpy(), (expected > 0).astype(np.float32))
        assert np.array_equal(rows[:, 2].numpy(), (~finite).astype(np.float32))


def test_100_000_tensors(device: torch.device) -> None:
    values = normal_values(100_000).to(device)
    grads = list(values.split(1))
    stats = gradient_stats(grads)
    assert stats.rows.shape == (100_000, 3)
    expected = torch.stack([values.abs(), (values != 0).float(), torch.zeros_like(values)], dim=1)
    assert_same_bits(stats.rows, expected)
    assert_same_bits(stats.report.cpu(), oracle.merge(expected))
    assert stats.norm == pytest.approx(oracle.exact_norm([values]), rel=1e-7)


def available_memory() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable"):
                return 1024 * int(line.split()[1])
    return 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_positions_beyond_31_bits(dtype: torch.dtype) -> None:
    size = 2**31 + 16384 + 3
    needed = 2 * size
    if available_memory() < 1.25 * needed:
        pytest.skip(f"{needed / 1e9:.1f} GB of memory would be needed")
    # numpy leaves zeros to the operating system, which makes a page only where one is written.
    grad = torch.from_numpy(np.zeros(size, dtype=np.int16)).view(dtype)
    grad[0] = 3.0
    grad[2**31 + 1] = -6.0
    grad[-1] = 2.0
    small = torch.full((5,), 2.0)
    stats = gradient_stats([grad, small])
    assert (stats.max_abs, stats.finite) == (6.0, True)
    assert stats.norm == pytest.approx(math.sqrt(9 + 36 + 4 + 5 * 4), rel=1e-7)
    filled = stats.rows[:, 0].nonzero().flatten().tolist()
    assert filled == [0, 2**31 // 16384, 2**31 // 16384 + 1, 2**31 // 16384 + 2]
    grad[-1] = math.nan
    stats = gradient_stats([grad, small])
    assert (stats.max_abs, stats.finite) == (6.0, False)
    assert stats.rows[:, 2].nonzero().flatten().tolist() == [2**31 // 16384 + 1]
    assert stats.nonfinite_gradients() == [0]


# Merging.

COUNTS = (1, 2, 3, 1023, 1024, 1025, 2048, 2049, 5000, 1_048_576, 1_048_577)


@pytest.mark.parametrize("count", COUNTS)
def test_reports_have_the_promised_bits(device: torch.device, count: int) -> None:
    rows = random_rows(count)
    assert_same_bits(merge(rows.to(device)).cpu(), oracle.merge(rows))


def test_the_most_rows_that_may_be_merged(device: torch.device) -> None:
    count = 4_194_304
    rows = torch.tensor([2.0, 4.0, 0.0]).repeat(count, 1)
    rows[-1, 2] = 1.0
    assert merge(rows.to(device)).tolist() == [2.0, 4.0 * count, 1.0]
    with pytest.raises(ValueError, match="4194304 at most"):
        merge_stats(torch.zeros(count + 1, 3), hierarchical=False)


@pytest.mark.parametrize("count", [8, 1000, 1024, 1500, 16384])
def test_rows_are_merged_in_the_promised_order(device: torch.device, count: int) -> None:
    reports: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(100):
        values = values_in_need_of_order(count, seed)
        rows = torch.stack([values, (values > 0).float(), torch.zeros(count)], dim=1)
        for hierarchical, expect in ((True, oracle.merge), (False, oracle.merge_serially)):
            expected = expect(rows)
            reports[hierarchical].append(expected[1].item())
            assert_same_bits(merge(rows.to(device), hierarchical=hierarchical).cpu(), expected)
    assert len(set(reports[True])) > 1
    assert len(set(reports[False])) > 1
    assert reports[True] != reports[False]


@pytest.mark.parametrize("count", [*COUNTS, 0])
def test_serial_reports_have_the_promised_bits(count: int) -> None:
    rows = random_rows(count)
    assert_same_bits(merge(rows, hierarchical=False), oracle.merge_serially(rows))


@pytest.mark.parametrize("count", COUNTS)
def test_both_orders_agree_to_rounding(device: torch.device, count: int) -> None:
    rows = random_rows(count).to(device)
    by_stages, serial = merge(rows), merge(rows, hierarchical=False)
    assert by_stages[0] == serial[0]
    assert norm_of(by_stages) == pytest.approx(norm_of(serial), rel=2e-7)
    squares = rows.double()[:, 0] ** 2 * rows.double()[:, 1]
    exact = math.sqrt(math.fsum(squares.tolist()))
    assert norm_of(by_stages) == pytest.approx(exact, rel=1e-7)
    assert norm_of(serial) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("count", [1, 1025, 5000, 1_048_577])
def test_stage_after_stage_is_the_whole_merge(device: torch.device, count: int) -> None:
    rows = random_rows(count)
    report = merge(rows.to(device))
    stage = rows.to(device)
    for left in StatsPlan(count).rows_after_stages:
        merged = torch.full((left, 3), math.nan, device=device)
        ops.merge_gradient_stats_chunks(stage, merged)
        assert_same_bits(merged.cpu(), oracle.merge_chunks(stage))
        stage = merged
    assert_same_bits(stage[0], report)


def test_scratch_holds_the_rows_between(device: torch.device) -> None:
    rows = random_rows(1025)
    scratch = torch.zeros(6, device=device)
    ops.merge_gradient_stats(rows.to(device), scratch, torch.zeros(3, device=device))
    assert_same_bits(scratch.cpu().reshape(2, 3), oracle.merge_chunks(rows))


@pytest.mark.parametrize("hierarchical", [True, False])
def test_one_nonfinite_row_makes_the_report_nonfinite(hierarchical: bool) -> None:
    for count in (1, 5, 1024, 1025, 3000):
        clean = merge(random_rows(count), hierarchical=hierarchical)
        for position in {0, count // 2, count - 1}:
            rows = random_rows(count)
            rows[position, 2] = 1.0
            report = merge(rows, hierarchical=hierarchical)
            assert report.tolist() == [*clean.tolist()[:2], 1.0]


def test_merges_write_only_what_they_return(device: torch.device) -> None:
    rows = random_rows(1025).to(device)
    before = Snapshot([rows])
    scratch, report, merged = (torch.zeros(shape, device=device) for shape in (6, 3, (2, 3)))
    versions = [tensor._version for tensor in (scratch, report, merged)]
    ops.merge_gradient_stats(rows, scratch, report)
    ops.merge_gradient_stats_chunks(rows, merged)
    before.assert_unchanged()
    assert all(
        tensor._version > version for tensor, version in zip((scratch, report, merged), versions, strict=True)
    )


@given(
    rows=st.lists(
        st.tuples(
            st.floats(0, 2.0**100, width=32), st.floats(1, 16384, width=32), st.sampled_from([0.0, 1.0])
        ),
        max_size=40,
    ),
    cut=st.integers(0, 40),
)
def test_any_split_merges_to_the_same_statistics(rows: list[tuple[float, float, float]], cut: int) -> None:
    """What ranks do: each merges its own rows, one merges the reports."""
    table = torch.tensor(rows, dtype=torch.float32).reshape(-1, 3)
    whole = merge_stats(table)
    parts = [merge_stats(part).report for part in (table[:cut], table[cut:])]
    merged = merge_stats(torch.stack(parts))
    assert merged.max_abs == whole.max_abs
    assert merged.finite == whole.finite
    assert merged.norm == pytest.approx(whole.norm, rel=2e-7)


# The Python functions.


def test_gradient_stats_is_the_chain_of_ops(device: torch.device) -> None:
    grads = [normal_values(20_000).to(device), normal_values(10, torch.bfloat16).to(device)]
    stats = gradient_stats(iter(grads), grad_scale=3.0)
    assert isinstance(stats, GradientStats)
    assert stats.sizes == (20_000, 10)
    assert_same_bits(stats.rows, analyze(grads, torch.tensor(3.0, device=device)))
    assert_same_bits(stats.report, merge(stats.rows))
    assert stats.report.device == stats.rows.device == device
    as_tensor = gradient_stats(grads, grad_scale=torch.tensor(3.0, device=device))
    assert_same_bits(as_tensor.report, stats.report)


def test_one_tensor_is_a_list_of_one() -> None:
    grad = normal_values(20_000)
    assert_same_bits(gradient_stats(grad).report, gradient_stats([grad]).report)


def test_each_gradient_has_its_own_statistics() -> None:
    sizes = (20_000, 0, 10, 16384, 40_000)
    grads = [normal_values(size, seed=i) * 10.0**i for i, size in enumerate(sizes)]
    grads[2][3] = math.inf
    grads[4][-1] = math.nan
    stats = gradient_stats(grads)
    each = stats.per_gradient()
    assert len(each) == len(grads)
    for own, grad in zip(each, grads, strict=True):
        assert own.norm == pytest.approx(oracle.exact_norm([grad]), rel=1e-7)
        assert own.max_abs == oracle.exact_max([grad])
        assert own.finite == bool(grad.isfinite().all())
        assert own.sizes == (grad.numel(),)
    assert stats.nonfinite_gradients() == [2, 4]
    assert stats.norm == pytest.approx(oracle.exact_norm(grads), rel=1e-7)


def test_norm_agrees_with_torch() -> None:
    grads = [normal_values(size, seed=size) for size in (10, 30_000)]
    expected = torch.nn.utils.get_total_norm([grad.double() for grad in grads]).item()
    assert gradient_stats(grads).norm == pytest.approx(expected, rel=1e-7)


def test_gradients_that_require_grad_are_read_without_autograd() -> None:
    grad = normal_values(10).requires_grad_()
    assert gradient_stats(grad).norm == pytest.approx(oracle.exact_norm([grad]), rel=1e-7)


def test_rows_given_to_merge_stats_may_lie_anyhow() -> None:
    rows = random_rows(2000)
    expected = oracle.merge(rows)
    assert_same_bits(merge_stats(rows.t().contiguous().t()).report, expected)
    assert_same_bits(merge_stats(rows.repeat(1, 2)[:, :3]).report, expected)
    assert merge_stats(rows).sizes == ()


# Schemas, refusals, opcheck.


def test_merge_stats_refuses_what_are_no_rows() -> None:
    cases = (torch.zeros(()), torch.zeros(3), torch.zeros(2, 4), torch.zeros(2, 3).to_sparse())
    lines = [refuse(f"{tuple(rows.shape)}", functools.partial(merge_stats, rows), rows) for rows in cases]
    assert_expected_inline(
        "\n".join(lines),
        """\
(): ValueError: fused_adamw::merge_gradient_stats: rows has shape (); (number of rows, 3) is required
(3,): ValueError: fused_adamw::merge_gradient_stats: rows has shape (3,); (number of rows, 3) is required
(2, 4): ValueError: fused_adamw::merge_gradient_stats: rows has shape (2, 4); (2, 3) is required
(2, 3): TypeError: fused_adamw::merge_gradient_stats: rows has layout torch.sparse_coo; a dense tensor
    (torch.strided) is required""",
    )


def test_schemas() -> None:
    names = ("analyze_gradient", "merge_gradient_stats_chunks", "merge_gradient_stats")
    found = [
        str(getattr(getattr(ops, name), overload)._schema).replace(" *, ", "\n    *, ")
        for name in names
        for overload in getattr(ops, name).overloads()
    ]
    assert_expected_inline(
        "\n".join(found),
        """\
fused_adamw::analyze_gradient(Tensor[] grads, Tensor(a!) rows,
    *, Tensor? grad_scale=None) -> ()
fused_adamw::merge_gradient_stats_chunks(Tensor rows, Tensor(a!) merged) -> ()
fused_adamw::merge_gradient_stats(Tensor rows, Tensor(a!) scratch, Tensor(b!) report,
    *, bool hierarchical=True) -> ()""",
    )


def refusals() -> dict[str, tuple[Callable[..., Any], list[Any], dict[str, Any]]]:
    """Calls that must be refused: the op, its arguments, its keyword arguments."""
    grad = normal_values(20_000)
    rows = torch.zeros(2, 3)
    report = torch.zeros(3)
    none = torch.zeros(0)
    store = torch.zeros(20_000)
    analyze_op, chunks_op, merge_op = (
        ops.analyze_gradient,
        ops.merge_gradient_stats_chunks,
        ops.merge_gradient_stats,
    )
    sparse = torch.eye(3).to_sparse()
    many = torch.zeros(1, 3).expand(4_194_305, 3)
    return {
        "rows, one too few": (analyze_op, [[grad], torch.zeros(1, 3)], {}),
        "rows, one too many": (analyze_op, [[grad], torch.zeros(3, 3)], {}),
        "rows of no gradient": (analyze_op, [[], rows], {}),
        "rows of 2 values": (analyze_op, [[grad], torch.zeros(2, 2)], {}),
        "flat rows": (analyze_op, [[grad], torch.zeros(6)], {}),
        "rows dtype": (analyze_op, [[grad], rows.double()], {}),
        "rows strides": (analyze_op, [[grad], torch.zeros(3, 2).t()], {}),
        "rows sparse": (analyze_op, [[grad], rows.to_sparse()], {}),
        "rows in a gradient": (analyze_op, [[store], store[100:106].view(2, 3)], {}),
        "grads float64": (analyze_op, [[grad, grad.double()], rows], {}),
        "grads int": (analyze_op, [[grad.int()], rows], {}),
        "grads complex": (analyze_op, [[torch.zeros(3, dtype=torch.complex64)], rows[:1]], {}),
        "grads sparse": (analyze_op, [[sparse], rows[:1]], {}),
        "grads with holes": (analyze_op, [[torch.zeros(4, 4)[:, ::2]], rows[:1]], {}),
        "grads expanded": (analyze_op, [[torch.zeros(1, 4).expand(3, 4)], rows[:1]], {}),
        "grads on another device": (analyze_op, [[grad, grad.to("meta")], torch.zeros(4, 3)], {}),
        "grad_scale 0": (analyze_op, [[grad], rows], {"grad_scale": torch.tensor(0.0)}),
        "grad_scale NaN": (analyze_op, [[grad], rows], {"grad_scale": torch.tensor(math.nan)}),
        "grad_scale too small": (analyze_op, [[grad], rows], {"grad_scale": torch.tensor(2.0**-128)}),
        "grad_scale dtype": (analyze_op, [[grad], rows], {"grad_scale": torch.tensor(1)}),
        "grad_scale shape": (analyze_op, [[grad], rows], {"grad_scale": torch.ones(2)}),
        "grads require grad": (analyze_op, [[grad.clone().requires_grad_()], rows], {}),
        "rows require grad": (analyze_op, [[grad], torch.zeros(2, 3, requires_grad=True)], {}),
        "merged, too many": (chunks_op, [rows, torch.zeros(2, 3)], {}),
        "merged dtype": (chunks_op, [rows, torch.zeros(1, 3).half()], {}),
        "merged is rows": (chunks_op, [rows[:1], rows[:1]], {}),
        "rows to merge, flat": (chunks_op, [torch.zeros(6), torch.zeros(2, 3)], {}),
        "rows to merge, too many in chunks": (chunks_op, [many, torch.zeros(4097, 3)], {}),
        "rows to merge require grad": (
            chunks_op,
            [torch.zeros(2, 3, requires_grad=True), torch.zeros(1, 3)],
            {},
        ),
        "rows to merge, too many": (merge_op, [many, none, report], {}),
        "rows to merge, too many serially": (merge_op, [many, none, report], {"hierarchical": False}),
        "rows to merge dtype": (merge_op, [rows.double(), none, report], {}),
        "rows to merge of 4 values": (merge_op, [torch.zeros(2, 4), none, report], {}),
        "rows to merge strides": (merge_op, [torch.zeros(3, 2).t(), none, report], {}),
        "scratch too small": (merge_op, [torch.zeros(1025, 3), torch.zeros(5), report], {}),
        "scratch too large": (merge_op, [torch.zeros(1025, 3), torch.zeros(7), report], {}),
        "scratch not needed": (merge_op, [rows, torch.zeros(6), report], {}),
        "scratch of a serial merge": (
            merge_op,
            [torch.zeros(1025, 3), torch.zeros(6), report],
            {"hierarchical": False},
        ),
        "scratch dtype": (merge_op, [rows, none.double(), report], {}),
        "report of 4 values": (merge_op, [rows, none, torch.zeros(4)], {}),
        "report as a row": (merge_op, [rows, none, torch.zeros(1, 3)], {}),
        "report dtype": (merge_op, [rows, none, report.bfloat16()], {}),
        "report strides": (merge_op, [rows, none, torch.zeros(6)[::2]], {}),
        "report in rows": (merge_op, [store[:6].view(2, 3), none, store[3:6]], {}),
        "report in scratch": (merge_op, [torch.zeros(1025, 3), store[:6], store[5:8]], {}),
        "report on another device": (merge_op, [rows, none, report.to("meta")], {}),
        "report requires grad": (merge_op, [rows, none, torch.zeros(3, requires_grad=True)], {}),
    }


def test_refusals_are_sentences_and_nothing_is_written() -> None:
    lines = [
        refuse(name, functools.partial(op, *arguments, **options), arguments)
        for name, (op, arguments, options) in refusals().items()
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
rows, one too few: ValueError: fused_adamw::analyze_gradient: rows has shape (1, 3); (2, 3) is required
rows, one too many: ValueError: fused_adamw::analyze_gradient: rows has shape (3, 3); (2, 3) is required
rows of no gradient: ValueError: fused_adamw::analyze_gradient: rows has shape (2, 3); (0, 3) is required
rows of 2 values: ValueError: fused_adamw::analyze_gradient: rows has shape (2, 2); (2, 3) is required
flat rows: ValueError: fused_adamw::analyze_gradient: rows has shape (6,); (2, 3) is required
rows dtype: TypeError: fused_adamw::analyze_gradient: rows has dtype torch.float64; torch.float32 is
    required
rows strides: ValueError: fused_adamw::analyze_gradient: rows has strides (1, 2); a contiguous tensor is
    required
rows sparse: TypeError: fused_adamw::analyze_gradient: rows has layout torch.sparse_coo; a dense tensor
    (torch.strided) is required
rows in a gradient: ValueError: fused_adamw::analyze_gradient: rows[0] and grads[0] share memory; a
    tensor that is written may share memory with no other tensor (a gradient that is exactly a tensor of
    its own parameter may)
grads float64: TypeError: fused_adamw::analyze_gradient: grads[1] has dtype torch.float64; torch.float32,
    torch.float16 or torch.bfloat16 is required
grads int: TypeError: fused_adamw::analyze_gradient: grads[0] has dtype torch.int32; torch.float32,
    torch.float16 or torch.bfloat16 is required
grads complex: TypeError: fused_adamw::analyze_gradient: grads[0] has dtype torch.complex64;
    torch.float32, torch.float16 or torch.bfloat16 is required
grads sparse: TypeError: fused_adamw::analyze_gradient: grads[0] has layout torch.sparse_coo; a dense
    tensor (torch.strided) is required
grads with holes: ValueError: fused_adamw::analyze_gradient: grads[0] has shape (4, 2) and strides (4,
    2); strides without holes or overlap (contiguous, or a permutation of it) are required
grads expanded: ValueError: fused_adamw::analyze_gradient: grads[0] has shape (3, 4) and strides (0, 1);
    strides without holes or overlap (contiguous, or a permutation of it) are required
grads on another device: ValueError: fused_adamw::analyze_gradient: grads[1] is on meta; cpu, where the
    parameters are, is required
grad_scale 0: ValueError: fused_adamw::analyze_gradient: grad_scale is 0.0; a positive finite number
    whose reciprocal is finite in float32 is required
grad_scale NaN: ValueError: fused_adamw::analyze_gradient: grad_scale is nan; a positive finite number
    whose reciprocal is finite in float32 is required
grad_scale too small: ValueError: fused_adamw::analyze_gradient: grad_scale is 2.938735877055719e-39; a
    positive finite number whose reciprocal is finite in float32 is required
grad_scale dtype: TypeError: fused_adamw::analyze_gradient: grad_scale has dtype torch.int64;
    torch.float32 or torch.float64 is required
grad_scale shape: ValueError: fused_adamw::analyze_gradient: grad_scale has shape (2,); shape () or (1,)
    is required
grads require grad: RuntimeError: fused_adamw::analyze_gradient has no derivative, by design, and
    grads[0] requires grad; call it under torch.no_grad(), or pass detached tensors
rows require grad: RuntimeError: fused_adamw::analyze_gradient has no derivative, by design, and rows
    requires grad; call it under torch.no_grad(), or pass detached tensors
merged, too many: ValueError: fused_adamw::merge_gradient_stats_chunks: merged has shape (2, 3); (1, 3)
    is required
merged dtype: TypeError: fused_adamw::merge_gradient_stats_chunks: merged has dtype torch.float16;
    torch.float32 is required
merged is rows: ValueError: fused_adamw::merge_gradient_stats_chunks: merged[0] and rows[0] share memory;
    a tensor that is written may share memory with no other tensor (a gradient that is exactly a tensor
    of its own parameter may)
rows to merge, flat: ValueError: fused_adamw::merge_gradient_stats_chunks: rows has shape (6,); (number
    of rows, 3) is required
rows to merge, too many in chunks: ValueError: fused_adamw::merge_gradient_stats_chunks: rows has 4194305
    rows; 4194304 at most are required
rows to merge require grad: RuntimeError: fused_adamw::merge_gradient_stats_chunks has no derivative, by
    design, and rows requires grad; call it under torch.no_grad(), or pass detached tensors
rows to merge, too many: ValueError: fused_adamw::merge_gradient_stats: rows has 4194305 rows; 4194304 at
    most are required
rows to merge, too many serially: ValueError: fused_adamw::merge_gradient_stats: rows has 4194305 rows;
    4194304 at most are required
rows to merge dtype: TypeError: fused_adamw::merge_gradient_stats: rows has dtype torch.float64;
    torch.float32 is required
rows to merge of 4 values: ValueError: fused_adamw::merge_gradient_stats: rows has shape (2, 4); (2, 3)
    is required
rows to merge strides: ValueError: fused_adamw::merge_gradient_stats: rows has strides (1, 2); a
    contiguous tensor is required
scratch too small: ValueError: fused_adamw::merge_gradient_stats: scratch has shape (5,); (6,) is
    required
scratch too large: ValueError: fused_adamw::merge_gradient_stats: scratch has shape (7,); (6,) is
    required
scratch not needed: ValueError: fused_adamw::merge_gradient_stats: scratch has shape (6,); (0,) is
    required
scratch of a serial merge: ValueError: fused_adamw::merge_gradient_stats: scratch has shape (6,); (0,) is
    required
scratch dtype: TypeError: fused_adamw::merge_gradient_stats: scratch has dtype torch.float64;
    torch.float32 is required
report of 4 values: ValueError: fused_adamw::merge_gradient_stats: report has shape (4,); (3,) is
    required
report as a row: ValueError: fused_adamw::merge_gradient_stats: report has shape (1, 3); (3,) is required
report dtype: TypeError: fused_adamw::merge_gradient_stats: report has dtype torch.bfloat16;
    torch.float32 is required
report strides: ValueError: fused_adamw::merge_gradient_stats: report has strides (2,); a contiguous
    tensor is required
report in rows: ValueError: fused_adamw::merge_gradient_stats: report[0] and rows[0] share memory; a
    tensor that is written may share memory with no other tensor (a gradient that is exactly a tensor of
    its own parameter may)
report in scratch: ValueError: fused_adamw::merge_gradient_stats: scratch[0] and report[0] share memory;
    a tensor that is written may share memory with no other tensor (a gradient that is exactly a tensor
    of its own parameter may)
report on another device: ValueError: fused_adamw::merge_gradient_stats: report is on meta; cpu, where
    the parameters are, is required
report requires grad: RuntimeError: fused_adamw::merge_gradient_stats has no derivative, by design, and
    report requires grad; call it under torch.no_grad(), or pass detached tensors""",
    )


def test_tensors_that_require_grad_are_taken_without_grad_mode() -> None:
    grad = normal_values(10).requires_grad_()
    rows = torch.zeros(1, 3, requires_grad=True)
    with torch.no_grad():
        ops.analyze_gradient([grad], rows)
    assert_same_bits(rows.detach(), oracle.rows_of([grad]))


@pytest.mark.parametrize(
    "test", ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
)
def test_opcheck(device: torch.device, test: str) -> None:
    grads = [normal_values(20_000).to(device), normal_values(10, torch.float16).to(device)]
    scale = torch.tensor(2.0, device=device)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device)

    for op, arguments, options in (
        (ops.analyze_gradient.default, (grads, zeros(3, 3)), {}),
        (ops.analyze_gradient.default, (grads[:1], zeros(2, 3)), {"grad_scale": scale}),
        (ops.merge_gradient_stats_chunks.default, (random_rows(1025).to(device), zeros(2, 3)), {}),
        (ops.merge_gradient_stats.default, (random_rows(1025).to(device), zeros(6), zeros(3)), {}),
        (
            ops.merge_gradient_stats.default,
            (random_rows(1025).to(device), zeros(0), zeros(3)),
            {"hierarchical": False},
        ),
    ):
        torch.library.opcheck(op, arguments, options, test_utils=test)


def test_fakes_refuse_what_the_kernels_refuse() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        rows = torch.empty(2, 3)
        ops.analyze_gradient([torch.empty(20_000)], rows)
        with pytest.raises(ValueError, match=r"rows has shape \(2, 3\); \(1, 3\) is required"):
            ops.analyze_gradient([torch.empty(5)], rows)
        with pytest.raises(ValueError, match=r"scratch has shape \(0,\); \(6,\) is required"):
            ops.merge_gradient_stats(torch.empty(1025, 3), torch.empty(0), torch.empty(3))
        with pytest.raises(TypeError, match="merged has dtype"):
            ops.merge_gradient_stats_chunks(rows, torch.empty(1, 3, dtype=torch.float64))
