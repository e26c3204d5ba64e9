"""``fused_adamw::step``: one tensor, out of place. What holds here holds for ``step_`` by its bits."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from cases import (
    GRAD_DTYPES,
    OPTIONS,
    SCALARS,
    SIZES,
    Sample,
    Snapshot,
    assert_same_bits,
    assert_same_state,
    bits,
    call_step,
    first_sample,
    normal_gradient,
    normal_sample,
    scalar,
    step_op,
    wide_sample,
)
from oracle.adamw import Oracle
from oracle.adamw_float32 import adamw_float32, power, rounded

# --- The right numbers: the float64 oracle, with torch.optim.AdamW as the measure of what float32 can do.

STEPS = 4

# Our largest error may be this multiple of torch's, in any tensor. torch's first moment is a lerp with one
# rounding fewer; test_accuracy.py has the ratios over long runs.
ERROR_SLACK = 2.0

# Where torch happens to hit the oracle exactly: half a unit in the last place of the largest value per step.
ERROR_FLOOR = STEPS * 2.0**-24


def assert_as_accurate_as_torch(
    device: torch.device, size: int, dtype: torch.dtype, amsgrad: bool, scale: float = 1.0, **options: Any
) -> None:
    sample = first_sample(size, dtype, amsgrad=amsgrad, device=device)
    param = torch.nn.Parameter(sample.param.clone())
    names = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, **options}
    named = {name: value for name, value in names.items() if not name.startswith("beta")}
    named |= {"betas": (names["beta1"], names["beta2"]), "amsgrad": amsgrad}
    optimizer = torch.optim.AdamW([param], **named)
    oracle = Oracle(sample.param, **named)
    scaling = {"grad_scale": scalar(scale, device, torch.float32)} if scale != 1.0 else {}
    for step in range(STEPS):
        grad = normal_gradient(size, dtype, seed=100 + step, device=device)
        sample = call_step(replace(sample, grad=grad), **options, **scaling)
        param.grad = grad.float() * (1.0 / scale)
        optimizer.step()
        oracle.update(grad, scale)
    torch_state = optimizer.state[param]
    for name, found in zip(("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"), sample.state, strict=False):
        expected = getattr(oracle, name)
        by_torch = param.detach() if name == "param" else torch_state[name]
        if size == 0:
            assert found.shape == expected.shape
            continue
        floor = ERROR_FLOOR * expected.abs().max().item()
        error = (found.double() - expected).abs().max().item()
        error_of_torch = (by_torch.double() - expected).abs().max().item()
        assert error <= ERROR_SLACK * error_of_torch + floor, (name, error, error_of_torch)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_accuracy_for_all_options(
    device: torch.device, dtype: torch.dtype, amsgrad: bool, options: dict[str, Any]
) -> None:
    assert_as_accurate_as_torch(device, 1025, dtype, amsgrad, **options)


@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize("size", [size for size in SIZES if size < 10**5])
def test_accuracy_for_all_sizes(device: torch.device, size: int, dtype: torch.dtype, amsgrad: bool) -> None:
    assert_as_accurate_as_torch(device, size, dtype, amsgrad)


@pytest.mark.parametrize(("dtype", "amsgrad"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_accuracy_for_a_large_tensor(device: torch.device, dtype: torch.dtype, amsgrad: bool) -> None:
    assert_as_accurate_as_torch(device, max(SIZES), dtype, amsgrad)


@pytest.mark.parametrize("scale", [2.0**16, 3.0, 1e-3])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_accuracy_with_a_gradient_scale(device: torch.device, dtype: torch.dtype, scale: float) -> None:
    assert_as_accurate_as_torch(device, 1025, dtype, amsgrad=True, scale=scale)


def test_with_lr_0_the_parameter_stays_and_the_moments_go_on(device: torch.device) -> None:
    old = first_sample(257, device=device)
    new = call_step(old, lr=0.0)
    assert_same_bits(new.param, old.param)
    torch.testing.assert_close(new.exp_avg, 0.1 * old.grad)
    torch.testing.assert_close(new.exp_avg_sq, 0.001 * old.grad**2)


def test_with_lr_0_and_a_second_moment_of_0_there_is_no_nan(device: torch.device) -> None:
    old = replace(first_sample(257, device=device), grad=torch.zeros(257, device=device))
    for sample in (old, old.with_zero_moments()):
        new = call_step(sample, lr=0.0)
        assert_same_bits(new.param, old.param)
        for moment in new.moments:
            assert_same_bits(moment, torch.zeros(257, device=device))


# --- The promised bits.


def float32_oracle(sample: Sample, **options: Any) -> Sample:
    """What ``call_step`` must return, in bits; on the CPU."""
    param, exp_avg, exp_avg_sq, max_exp_avg_sq = adamw_float32(
        sample.param,
        sample.grad,
        sample.exp_avg,
        sample.exp_avg_sq,
        sample.max_exp_avg_sq,
        sample.step,
        amsgrad=sample.amsgrad,
        **options,
    )
    maximum = max_exp_avg_sq if sample.amsgrad else None
    return Sample(param, sample.grad, exp_avg, exp_avg_sq, maximum, sample.step + 1, sample.amsgrad)


def on_cpu(sample: Sample) -> Sample:
    return sample.map(Tensor.cpu)


EXTREME_OPTIONS = (
    {"lr": 1e-42},
    {"lr": 1e30},
    {"eps": 1e-40},
    {"eps": 0.0},
    {"lr": 0.77, "weight_decay": 0.37},
)


@pytest.mark.parametrize("options", [*OPTIONS.values(), *EXTREME_OPTIONS], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_bits_for_every_kind_of_value(
    device: torch.device, dtype: torch.dtype, amsgrad: bool, options: dict[str, Any]
) -> None:
    for make_sample in (wide_sample, normal_sample):
        sample = make_sample(20001, dtype, amsgrad=amsgrad, device=device)
        assert_same_state(on_cpu(call_step(sample, **options)), float32_oracle(sample, **options))


@pytest.mark.parametrize("scalars", SCALARS)
@pytest.mark.parametrize("step", [0, 1, 2, 9, 1000, 10**5, 2**24 - 1, 2**24 + 7, 2**53 + 1, 2**63 - 2])
def test_bits_for_every_count_of_steps(device: torch.device, step: int, scalars: str) -> None:
    options = {"beta1": 1.0 - 2.0**-26, "beta2": 1.0 - 2.0**-30}
    sample = normal_sample(1025, amsgrad=True, step=step, device=device)
    assert_same_state(
        on_cpu(call_step(sample, scalars=scalars, **options)), float32_oracle(sample, **options)
    )


def test_steps_beyond_2_24_are_counted_one_by_one(device: torch.device) -> None:
    # The case above would prove nothing if these were equal in float32.
    options = {"beta1": 1.0 - 2.0**-26, "beta2": 1.0 - 2.0**-30}
    sample = normal_sample(1025, device=device)
    even, odd = (call_step(replace(sample, step=2**24 + s), **options) for s in (0, 7))
    assert not torch.equal(even.param, odd.param)


@pytest.mark.parametrize("scalars", SCALARS)
def test_powers_are_by_repeated_squaring(device: torch.device, scalars: str) -> None:
    # pow() differs in the last bit of the double, which seldom shows in a float32. It does with a learning
    # rate that puts the step size on both sides of the middle between two float32 numbers.
    beta1 = 1.0 - 2.0**-20
    t = next(t for t in range(1000, 2000) if power(beta1, t) != math.pow(beta1, t))
    ours, other = 1.0 - power(beta1, t), 1.0 - math.pow(beta1, t)
    options = {"lr": (1.5 + 2.0**-24) * 0.5 * (ours + other), "beta1": beta1, "weight_decay": 0.0}
    assert rounded(options["lr"] / ours) != rounded(options["lr"] / other)
    sample = normal_sample(257, step=t - 1, device=device)
    sample = replace(sample, param=torch.zeros(257, device=device))
    assert_same_state(
        on_cpu(call_step(sample, scalars=scalars, **options)), float32_oracle(sample, **options)
    )


@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_gradient_is_converted_exactly(
    device: torch.device, dtype: torch.dtype, amsgrad: bool
) -> None:
    gradients = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    for sample in (
        first_sample(2**16, amsgrad=amsgrad, device=device),
        wide_sample(2**16, amsgrad=amsgrad, device=device),
    ):
        narrow = call_step(replace(sample, grad=gradients), eps=0.0)
        wide = call_step(replace(sample, grad=gradients.float()), eps=0.0)
        assert_same_state(narrow, wide)


@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
def test_every_nan_is_the_canonical_one(device: torch.device, amsgrad: bool) -> None:
    new = call_step(wide_sample(20001, amsgrad=amsgrad, device=device))
    for tensor in new.state:
        nans = bits(tensor)[tensor.isnan()]
        assert len(nans) > 100
        assert (nans == 0x7FC00000).all()


def test_the_amsgrad_maximum_keeps_nan_from_either_side(device: torch.device) -> None:
    nan, inf = float("nan"), float("inf")
    old_max = torch.tensor([nan, 2.0, nan, inf, 0.0, 1.0])
    old_sq = torch.tensor([1.0, nan, nan, 1.0, inf, 2.0])
    zeros = torch.zeros(6)
    sample = Sample(zeros, zeros, zeros, old_sq, old_max, step=1, amsgrad=True).map(lambda t: t.to(device))
    new = call_step(sample, beta2=0.5)
    expected = torch.tensor([nan, nan, nan, inf, inf, 1.0])
    torch.testing.assert_close(new.max_exp_avg_sq.cpu(), expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize("scalars", SCALARS)
def test_no_moments_are_moments_of_0(
    device: torch.device, dtype: torch.dtype, amsgrad: bool, scalars: str
) -> None:
    wide = wide_sample(4097, dtype, amsgrad=amsgrad, step=0, device=device)
    first = replace(wide, exp_avg=None, exp_avg_sq=None, max_exp_avg_sq=None)
    assert_same_state(call_step(first, scalars=scalars), call_step(wide.with_zero_moments(), scalars=scalars))


# --- Scalars as tensors.


@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_tensor_scalars_give_the_bits_of_numbers(
    device: torch.device, options: dict[str, Any], amsgrad: bool
) -> None:
    sample = wide_sample(1025, amsgrad=amsgrad, device=device)
    expected = call_step(sample, **options)
    assert_same_state(call_step(sample, scalars="tensors", **options), expected)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("step_dtype", [torch.int64, torch.float32, torch.float64], ids=str)
def test_scalars_of_every_shape_and_dtype(
    device: torch.device, step_dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    sample = normal_sample(1025, device=device)
    values = {"lr": 0.01, "beta1": 0.8, "beta2": 0.95}
    for dtype in (torch.float64, torch.float32):
        tensors = {name: scalar(value, device, dtype, shape) for name, value in values.items()}
        step = scalar(sample.step, device, step_dtype, shape)
        given = Snapshot([step, *tensors.values()])
        new = step_op.tensor(*sample.tensors, step, **tensors)
        given.assert_unchanged()
        # A float32 tensor stands for the value that it holds.
        numbers = {name: tensor.item() for name, tensor in tensors.items()}
        expected = call_step(sample, **numbers)
        for found, wanted in zip(new, expected.state, strict=True):
            assert_same_bits(found, wanted)


# --- Gradient scaling and skipping.


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**16, 3.0, 1e-3, 2.0**127, 3e38, 2.0**-127])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_unscaling_gives_the_bits_of_unscaling_before(
    device: torch.device, scale: float, scale_dtype: torch.dtype, shape: tuple[int, ...], maximize: bool
) -> None:
    for dtype in GRAD_DTYPES:
        sample = wide_sample(1025, dtype, amsgrad=True, device=device)
        factor = 1.0 / torch.tensor(scale, dtype=torch.float32)
        unscaled = replace(sample, grad=(sample.grad.cpu().float() * factor).to(device))
        found = call_step(sample, maximize=maximize, grad_scale=scalar(scale, device, scale_dtype, shape))
        assert_same_state(found, call_step(unscaled, maximize=maximize))


FOUND = [(torch.float32, 1.0), (torch.float64, 1.0), (torch.bool, True), (torch.float32, float("nan"))]


@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize(("dtype", "value"), FOUND, ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_found_inf_makes_copies(
    device: torch.device, dtype: torch.dtype, value: Any, shape: tuple[int, ...], amsgrad: bool, first: bool
) -> None:
    sample = wide_sample(257, amsgrad=amsgrad, step=0, device=device)
    zeros = sample.with_zero_moments()
    given = replace(sample, exp_avg=None, exp_avg_sq=None, max_exp_avg_sq=None) if first else sample
    before = Snapshot(given.tensors)
    new = call_step(given, found_inf=scalar(value, device, dtype, shape))
    before.assert_unchanged()
    assert_same_state(new, zeros if first else sample)
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*given.tensors, *new.state)}
    assert len(storages) == len(given.tensors) + len(new.state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool], ids=str)
def test_found_inf_of_0_does_not_skip(device: torch.device, dtype: torch.dtype) -> None:
    sample = normal_sample(257, device=device)
    found_inf = scalar(0.0, device, dtype)
    assert_same_state(call_step(sample, found_inf=found_inf), call_step(sample))


# --- What is read and what is returned.


@pytest.mark.parametrize("scalars", SCALARS)
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
def test_inputs_stay_and_results_are_new(device: torch.device, amsgrad: bool, scalars: str) -> None:
    for sample in (
        wide_sample(257, amsgrad=amsgrad, device=device),
        first_sample((3, 5), amsgrad=amsgrad, device=device),
    ):
        before = Snapshot(sample.tensors)
        new = call_step(sample, scalars=scalars)
        before.assert_unchanged()
        assert len(new.state) == (4 if amsgrad else 3)
        storages = {tensor.untyped_storage().data_ptr() for tensor in (*sample.tensors, *new.state)}
        assert len(storages) == len(sample.tensors) + len(new.state)
        for tensor in new.state:
            assert tensor.dtype is torch.float32
            assert tensor.device == device
            assert tensor.shape == sample.param.shape
            assert not tensor.requires_grad


def test_inputs_may_share_memory(device: torch.device) -> None:
    x = torch.rand(257, device=device)
    before = Snapshot([x])
    new = call_step(Sample(x, x, x, x, x, step=3, amsgrad=True))
    before.assert_unchanged()
    apart = Sample(*(x.clone() for _ in range(5)), step=3, amsgrad=True)
    assert_same_state(new, call_step(apart))
    # Overlap in part, too: nothing of it is written.
    base = torch.rand(300, device=device)
    views = [base[i : i + 257] for i in range(5)]
    apart = Sample(*(view.clone() for view in views), step=3, amsgrad=True)
    assert_same_state(call_step(Sample(*views, step=3, amsgrad=True)), call_step(apart))


LAYOUTS = {
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "permuted": lambda t: t.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_dense_layouts(device: torch.device, layout: Any, dtype: torch.dtype, first: bool) -> None:
    make_sample = first_sample if first else normal_sample
    contiguous = make_sample((3, 4, 5, 6), dtype, amsgrad=True, device=device)
    sample = contiguous.map(layout)
    assert not sample.param.is_contiguous()
    for skip in (False, True):
        found_inf = scalar(skip, device, torch.bool)
        new = call_step(sample, found_inf=found_inf)
        assert_same_state(new, call_step(contiguous, found_inf=found_inf))
        assert {tensor.stride() for tensor in new.state} == {sample.param.stride()}


def test_strides_of_size_1_dimensions_mean_nothing(device: torch.device) -> None:
    sample = normal_sample((5, 1, 4), amsgrad=True, device=device)
    names = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    for name in names:
        odd = getattr(sample, name).as_strided((5, 1, 4), (4, 77, 1))
        assert_same_state(call_step(replace(sample, **{name: odd})), call_step(sample))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 4, 0), (1, 1, 1), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_small_shapes(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for sample in (
        normal_sample(shape, dtype, amsgrad=True, device=device),
        first_sample(shape, dtype, amsgrad=True, device=device),
    ):
        assert_same_state(on_cpu(call_step(sample)), float32_oracle(sample))


@pytest.mark.parametrize("size", [1, 31, 33, 257, 1025, 65537])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_misaligned_storage(device: torch.device, size: int, dtype: torch.dtype) -> None:
    sample = wide_sample(size, dtype, amsgrad=True, device=device)
    expected = call_step(sample)
    offsets = itertools.count(1)

    def misaligned(tensor: Tensor) -> Tensor:
        offset = next(offsets) % 4
        return torch.cat([tensor.new_empty(offset), tensor])[offset:]

    for _ in range(4):
        assert_same_state(call_step(sample.map(misaligned)), expected)


def test_tensor_subclasses(device: torch.device) -> None:
    class Named(torch.Tensor):
        pass

    sample = normal_sample(33, amsgrad=True, device=device)
    new = call_step(sample.map(lambda t: t.as_subclass(Named)))
    assert type(new.param) is Named
    assert_same_state(new.map(lambda t: t.as_subclass(torch.Tensor)), call_step(sample))


def test_inference_mode(device: torch.device) -> None:
    expected = call_step(normal_sample(33, amsgrad=True, device=device))
    outside = normal_sample(33, amsgrad=True, device=device)
    with torch.inference_mode():
        assert_same_state(call_step(outside), expected)
        new = call_step(normal_sample(33, amsgrad=True, device=device))
        assert new.param.is_inference()
        assert_same_state(new, expected)
    again = call_step(new)  # inference tensors are only read
    assert not again.param.is_inference()


def test_a_negated_view_is_read_as_its_value(device: torch.device) -> None:
    # The dispatcher materialises it; the refusals in checks.py are for callers who go around it.
    sample = normal_sample(33, device=device)
    negated = replace(sample, grad=torch._neg_view(sample.grad))
    assert negated.grad.is_neg()
    assert_same_state(call_step(negated), call_step(sample, maximize=True))


def test_several_steps_in_a_row(device: torch.device) -> None:
    sample = first_sample(4097, amsgrad=True, device=device)
    expected = on_cpu(sample)
    for step in range(6):
        grad = normal_gradient(4097, torch.bfloat16, seed=step, device=device)
        sample = call_step(replace(sample, grad=grad))
        expected = float32_oracle(replace(expected, grad=grad.cpu()))
    assert sample.step == 6
    assert_same_state(on_cpu(sample), expected)


# --- Any shape, any order of dimensions, any values.


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    back = [order.index(d) for d in range(len(shape))]
    dtype = draw(st.sampled_from(GRAD_DTYPES))
    amsgrad = draw(st.booleans())
    any_float = st.floats(width=32)
    stored = tuple(shape[d] for d in order)

    def values() -> Tensor:
        elements = draw(npst.arrays(np.float32, stored, elements=any_float))
        return torch.from_numpy(elements).permute(back)

    def moment() -> Tensor | None:
        return None if first else values()

    first = draw(st.booleans())
    sample = Sample(
        param=values(),
        grad=values().to(dtype),
        exp_avg=moment(),
        exp_avg_sq=moment(),
        max_exp_avg_sq=moment() if amsgrad else None,
        step=0 if first else draw(st.integers(0, 2**63 - 2)),
        amsgrad=amsgrad,
    )
    assert sample.param.shape == shape
    return sample


decay_rates = st.floats(0.0, 1.0, exclude_max=True)
step_options = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.floats(0.0, 1e38),
        "beta1": decay_rates,
        "beta2": decay_rates,
        "weight_decay": st.floats(0.0, 1e6),
        "eps": st.floats(0.0, 1e38),
        "maximize": st.booleans(),
    },
)
grad_scales = st.none() | st.floats(2.0**-127, 2.0**127, width=32)


@hypothesis.settings(max_examples=300)
@hypothesis.given(samples(), step_options, grad_scales, st.sampled_from(SCALARS))
def test_bits_of_any_step(
    device: torch.device, sample: Sample, options: dict[str, Any], scale: float | None, scalars: str
) -> None:
    given = sample.map(lambda t: t.to(device))
    before = Snapshot(given.tensors)
    scaling = {} if scale is None else {"grad_scale": scalar(scale, device)}
    new = call_step(given, scalars=scalars, **options, **scaling)
    before.assert_unchanged()
    expected = float32_oracle(sample, **options, grad_scale=1.0 if scale is None else scale)
    assert_same_state(on_cpu(new), expected)
    for tensor in new.state:
        assert tensor.stride() == given.param.stride() or sample.param.numel() == 0
