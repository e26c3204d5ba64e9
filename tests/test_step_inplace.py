"""``fused_adamw::step_``: lists of tensors, in place. Its bits are those of ``step``: see test_step.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from cases import (
    GRAD_DTYPES,
    LISTS,
    OPTIONS,
    SCALARS,
    SIZES,
    WRITTEN_LISTS,
    Sample,
    Snapshot,
    assert_same_bits,
    assert_same_state,
    call_step,
    call_step_,
    lists_of,
    normal_gradient,
    normal_sample,
    scalar,
    step_inplace_op,
    wide_sample,
)
from fused_adamw.torch_library import checks, step_inplace
from fused_adamw.torch_library.step_options import split_options

Lists: TypeAlias = Sequence[Sequence[Tensor]]


def assert_updates_like_step(samples: Sequence[Sample], *, scalars: str = "numbers", **options: Any) -> None:
    """One call of ``step_`` gives the bits of ``step`` called for each sample, and counts."""
    expected = [call_step(sample, **options) for sample in samples]
    lists = lists_of(samples)
    before = Snapshot(sample.grad for sample in samples)
    call_step_(lists, scalars=scalars, **options)
    before.assert_unchanged()
    for sample, new, counter in zip(samples, expected, lists[-1], strict=True):
        assert_same_state(sample, new)  # the sample's tensors are the lists' tensors
        assert counter.item() == sample.step + (sample.param.numel() > 0)


@pytest.mark.parametrize("scalars", SCALARS)
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_bits_of_step_for_all_options(
    device: torch.device, options: dict[str, Any], amsgrad: bool, scalars: str
) -> None:
    samples = [
        wide_sample(1025, dtype, amsgrad=amsgrad, step=step, seed=step, device=device)
        for step, dtype in enumerate(GRAD_DTYPES)
    ]
    assert_updates_like_step(samples, scalars=scalars, **options)


@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_bits_of_step_for_all_sizes_at_once(device: torch.device, dtype: torch.dtype, amsgrad: bool) -> None:
    samples = [wide_sample(size, dtype, amsgrad=amsgrad, seed=size, device=device) for size in SIZES]
    assert_updates_like_step(samples)
    assert_updates_like_step(samples[::-1])


def test_each_size_alone(device: torch.device) -> None:
    for size in SIZES:
        assert_updates_like_step([wide_sample(size, amsgrad=True, device=device)])


@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
def test_many_small_tensors(device: torch.device, amsgrad: bool) -> None:
    # Every third is empty, the first and the last too; each has its own count and one of three dtypes.
    samples = [
        normal_sample(
            0 if i % 3 == 0 else i % 71,
            GRAD_DTYPES[i // 2 % 3],
            amsgrad=amsgrad,
            step=i % 5,
            seed=i,
            device=device,
        )
        for i in range(1003)
    ]
    assert samples[0].param.numel() == samples[-1].param.numel() == 0
    assert_updates_like_step(samples)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_empty_tensor_at_any_position(device: torch.device, position: int) -> None:
    samples = [normal_sample(33, seed=i, device=device) for i in range(2)]
    samples.insert(position, normal_sample((3, 0, 2), device=device))
    assert_updates_like_step(samples)


def test_several_steps_in_a_row(device: torch.device) -> None:
    samples = [normal_sample(size, amsgrad=True, step=0, device=device) for size in (31, 4097)]
    samples = [sample.with_zero_moments() for sample in samples]
    lists = lists_of(samples)
    expected = [sample.clone() for sample in samples]
    for step in range(5):
        grads = [normal_gradient(s.param.shape, torch.float16, seed=step, device=device) for s in samples]
        lists[1] = grads
        call_step_(lists)
        expected = [call_step(replace(e, grad=g)) for e, g in zip(expected, grads, strict=True)]
        for found, wanted in zip(samples, expected, strict=True):
            assert_same_state(found, wanted)
        assert [counter.item() for counter in lists[-1]] == [step + 1, step + 1]


def test_no_tensors_are_no_work() -> None:
    for scalars in SCALARS:
        call_step_([[], [], [], [], [], []], scalars=scalars)


def test_only_empty_tensors(device: torch.device) -> None:
    assert_updates_like_step([normal_sample(0, device=device), normal_sample((2, 0), device=device)])


# --- Step counters.


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 999, 2**24 - 2, 2**24 - 1])
def test_the_counter_goes_up_by_1(device: torch.device, count: int, shape: tuple[int, ...]) -> None:
    sample = normal_sample(33, step=count, device=device)
    options = {"beta1": 1.0 - 2.0**-26, "beta2": 1.0 - 2.0**-30}
    expected = call_step(sample, **options)
    lists = lists_of([sample])
    lists[-1] = [scalar(count, device, torch.float32, shape)]
    call_step_(lists, **options)
    assert_same_state(sample, expected)
    assert_same_bits(lists[-1][0], scalar(count + 1, device, torch.float32, shape))


@pytest.mark.parametrize("count", [2**24, 2**30, 2**62])
def test_from_2_24_on_the_counter_stays_and_the_update_is_right(device: torch.device, count: int) -> None:
    zeros = torch.zeros(33, device=device)
    sample = replace(normal_sample(33, step=count, device=device), param=zeros)
    options = {"beta1": 1.0 - 2.0**-26, "beta2": 0.5}
    if count == 2**24:
        # A learning rate with which update number 2^24 would give other bits than update number 2^24 + 1.
        options["lr"] = next(
            lr
            for lr in torch.linspace(1.0, 2.0, 100).tolist()
            if not torch.equal(
                call_step(sample, lr=lr, **options).param,
                call_step(replace(sample, step=count - 1), lr=lr, **options).param,
            )
        )
    expected = call_step(sample, **options)
    lists = lists_of([sample])
    call_step_(lists, **options)
    assert_same_state(sample, expected)
    assert lists[-1][0].item() == count


def test_an_empty_parameter_leaves_its_counter(device: torch.device) -> None:
    samples = [normal_sample(size, step=7, device=device) for size in (0, 5, 0)]
    lists = lists_of(samples)
    call_step_(lists)
    assert [counter.item() for counter in lists[-1]] == [7, 8, 7]


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_scalar_tensors_of_every_shape_and_dtype(device: torch.device, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float64, torch.float32):
        values = {"lr": 0.01, "beta1": 0.8, "beta2": 0.95}
        tensors = {name: scalar(value, device, dtype, shape) for name, value in values.items()}
        sample = normal_sample(257, amsgrad=True, device=device)
        # A float32 tensor stands for the value that it holds.
        expected = call_step(sample, **{name: tensor.item() for name, tensor in tensors.items()})
        before = Snapshot(tensors.values())
        step_inplace_op.tensor(*lists_of([sample]), **tensors)
        before.assert_unchanged()
        assert_same_state(sample, expected)


# --- Gradient scaling and skipping.


@pytest.mark.parametrize("scale", [2.0**16, 3.0, 2.0**127, 2.0**-127])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_grad_scale(
    device: torch.device, scale: float, scale_dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    samples = [wide_sample(257, dtype, amsgrad=True, device=device) for dtype in GRAD_DTYPES]
    assert_updates_like_step(samples, grad_scale=scalar(scale, device, scale_dtype, shape))


@pytest.mark.parametrize("scalars", SCALARS)
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_found_inf_leaves_everything(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], amsgrad: bool, scalars: str
) -> None:
    samples = [wide_sample(257, dtype, amsgrad=amsgrad, device=device) for dtype in GRAD_DTYPES]
    lists = lists_of(samples)
    scaling = {"grad_scale": scalar(8.0, device), "found_inf": scalar(1.0, device, dtype, shape)}
    before = Snapshot([t for tensors in lists for t in tensors] + list(scaling.values()))
    call_step_(lists, scalars=scalars, **scaling)
    before.assert_skipped()
    scaling["found_inf"].zero_()
    assert_updates_like_step(samples, scalars=scalars, **scaling)


# --- Where the tensors lie.


@pytest.mark.parametrize("name", ["param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
@pytest.mark.parametrize("as_view", [False, True], ids=["same_object", "view"])
@pytest.mark.parametrize("size", [1, 33, 65537])
def test_a_gradient_that_is_a_tensor_of_its_own_parameter(
    device: torch.device, name: str, as_view: bool, size: int
) -> None:
    # As Inductor may make of op(x, x.clone()): each element is read before it is written.
    sample = wide_sample(size, amsgrad=True, device=device)
    same = getattr(sample, name)
    expected = call_step(replace(sample, grad=same.clone()))
    found = replace(sample, grad=same.view(-1) if as_view else same)
    call_step_(lists_of([found, normal_sample(5, amsgrad=True, device=device)]))
    assert_same_state(found, expected)


def test_gradients_may_share_memory_with_one_another(device: torch.device) -> None:
    base = normal_gradient(300, device=device)
    samples = [normal_sample(257, seed=i, device=device) for i in range(3)]
    views = [base[:257], base[:257], base[5:262]]
    assert_updates_like_step([replace(s, grad=view) for s, view in zip(samples, views, strict=True)])


def test_tensors_may_be_slices_of_one_storage(device: torch.device) -> None:
    apart = [normal_sample(size, amsgrad=True, seed=size, device=device) for size in (5, 33, 1, 257)]
    expected = [call_step(sample) for sample in apart]
    flat = torch.cat([tensor for sample in apart for tensor in sample.tensors])
    slices = iter(flat.split([tensor.numel() for sample in apart for tensor in sample.tensors]))
    packed = [sample.map(lambda tensor: next(slices)) for sample in apart]
    counters = torch.full((4,), 5.0, device=device)
    lists = lists_of(packed)
    lists[-1] = list(counters.unbind())
    call_step_(lists)
    for found, wanted in zip(packed, expected, strict=True):
        assert_same_state(found, wanted)
    assert counters.tolist() == [6.0] * 4


GUARD = 24  # elements on each side; no multiple of a cache line, so that views are misaligned


class Guarded:
    """Copies of tensors as views into storage whose other elements must stay."""

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._outside: list[Tensor] = []
        self._before: list[Snapshot] = []

    def view_of(self, tensor: Tensor) -> Tensor:
        size = tensor.numel()
        storage = torch.full((GUARD + self._offset + size + GUARD,), -7.25, device=tensor.device)
        storage = storage.to(tensor.dtype)
        start = GUARD + self._offset
        view = storage[start : start + size].view(tensor.shape)
        view.copy_(tensor)
        self._before.append(Snapshot([storage[:start].detach(), storage[start + size :].detach()]))
        return view

    def assert_unchanged(self) -> None:
        for before in self._before:
            before.assert_bits_unchanged()


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_misaligned_views_and_the_bytes_around_them(
    device: torch.device, dtype: torch.dtype, offset: int
) -> None:
    guarded = Guarded(offset)
    sizes = (1, 2, 3, 31, 32, 33, 255, 257, 1025, 40001)
    samples = [wide_sample(size, dtype, amsgrad=True, seed=size, device=device) for size in sizes]
    assert_updates_like_step([sample.map(guarded.view_of) for sample in samples])
    guarded.assert_unchanged()


LAYOUTS = {
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_dense_layouts(device: torch.device, layout: Any, dtype: torch.dtype) -> None:
    sample = normal_sample((3, 4, 5, 6), dtype, amsgrad=True, device=device)
    expected = call_step(sample)
    permuted = sample.map(lambda t: layout(t.clone()))
    strides = permuted.param.stride()
    assert strides != sample.param.stride()
    call_step_(lists_of([permuted, sample]))
    assert_same_state(permuted, expected)
    assert_same_state(sample, expected)
    assert permuted.param.stride() == strides


def test_strides_of_size_1_dimensions_mean_nothing(device: torch.device) -> None:
    for name in ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        sample = normal_sample((5, 1, 4), amsgrad=True, device=device)
        odd = getattr(sample, name).as_strided((5, 1, 4), (4, 77, 1))
        assert_updates_like_step([replace(sample, **{name: odd})])


# --- Autograd and modes.


def update_by_number(lists: Lists, amp: dict[str, Tensor]) -> list[Tensor]:
    step_inplace_op.default(*lists, **amp)
    return []


def update_by_tensor(lists: Lists, amp: dict[str, Tensor]) -> list[Tensor]:
    options = {name: scalar(0.5, lists[0][0].device) for name in ("lr", "beta1", "beta2")}
    step_inplace_op.tensor(*lists, **options, **amp)
    return list(options.values())


def update_around_the_dispatcher(lists: Lists, amp: dict[str, Tensor]) -> list[Tensor]:
    options, amp_tensors = split_options(0.5, **amp)
    step_inplace.apply([step_inplace.StepGroup(checks.StepLists(*lists), options)], amp_tensors)
    return []


@pytest.mark.parametrize("update", [update_by_number, update_by_tensor, update_around_the_dispatcher])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
def test_version_counters_of_written_tensors_go_up_by_1(
    device: torch.device, amsgrad: bool, update: Callable[[Lists, dict[str, Tensor]], list[Tensor]]
) -> None:
    samples = [normal_sample(size, amsgrad=amsgrad, device=device) for size in (5, 33, 257)]
    lists = lists_of(samples)
    amp = {"grad_scale": scalar(2.0, device), "found_inf": scalar(0.0, device)}
    before = [[tensor._version for tensor in tensors] for tensors in lists]
    before_amp = [tensor._version for tensor in amp.values()]
    for repeat in (1, 2):
        scalars = update(lists, amp)
        for name, tensors, versions in zip(LISTS, lists, before, strict=True):
            up = repeat if name in WRITTEN_LISTS else 0
            assert [tensor._version for tensor in tensors] == [version + up for version in versions], name
        assert [tensor._version for tensor in amp.values()] == before_amp
        assert [tensor._version for tensor in scalars] == [0] * len(scalars)


def test_a_second_backward_sees_the_update(device: torch.device) -> None:
    # Without the version counter it would use the new weight for the old forward.
    sample = normal_sample(5, device=device)
    weight = sample.param.requires_grad_()
    y = (weight * weight).sum()
    y.backward(retain_graph=True)
    with torch.no_grad():
        call_step_(lists_of([replace(sample, grad=weight.grad)]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_parameters_that_require_grad_under_no_grad(device: torch.device) -> None:
    sample = normal_sample(33, device=device)
    expected = call_step(sample)
    param = torch.nn.Parameter(sample.param.clone())
    with torch.no_grad():
        call_step_(lists_of([replace(sample, param=param, grad=sample.grad.clone().requires_grad_())]))
    assert_same_bits(param, expected.param)
    assert param.is_leaf
    assert param.grad_fn is None
    assert param.requires_grad


def test_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        assert_updates_like_step([normal_sample(33, amsgrad=True, device=device)])
    outside = normal_sample(33, amsgrad=True, device=device)
    with torch.inference_mode():
        assert_updates_like_step([outside])


def test_an_inference_tensor_outside_of_inference_mode(device: torch.device) -> None:
    # torch refuses to write to one; there is no need, for no graph can hold one for its backward.
    with torch.inference_mode():
        made_inside = normal_sample(33, amsgrad=True, device=device)
    assert_updates_like_step([normal_sample(5, amsgrad=True, device=device), made_inside])


def test_tensor_subclasses(device: torch.device) -> None:
    class Named(torch.Tensor):
        pass

    sample = normal_sample(33, amsgrad=True, device=device)
    expected = call_step(sample)
    named = sample.map(lambda t: t.as_subclass(Named))
    call_step_(lists_of([named]))
    assert_same_state(sample, expected)


# --- Any lists.


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Sample]:
    amsgrad = draw(st.booleans())
    count = draw(st.integers(1, 8))
    return [
        wide_sample(
            draw(st.integers(0, 300) | st.sampled_from([16384, 16385, 20000])),
            draw(st.sampled_from(GRAD_DTYPES)),
            amsgrad=amsgrad,
            step=draw(st.integers(0, 2**24 - 1)),
            seed=draw(st.integers(0, 1000)),
        )
        for _ in range(count)
    ]


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    sample_lists(),
    st.sampled_from(SCALARS),
    st.sampled_from(list(OPTIONS.values())),
    st.integers(0, 3),
)
def test_bits_of_step_for_any_lists(
    device: torch.device, samples: list[Sample], scalars: str, options: dict[str, Any], offset: int
) -> None:
    guarded = Guarded(offset)
    on_device = [sample.map(lambda t: guarded.view_of(t.to(device))) for sample in samples]
    assert_updates_like_step(on_device, scalars=scalars, **options)
    guarded.assert_unchanged()
