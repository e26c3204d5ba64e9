"""The ops on 16-bit parameters: the float32 update of the master weight, and its rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from cases import (
    GRAD_DTYPES,
    SCALARS,
    SIZES,
    Sample,
    Snapshot,
    assert_same_bits,
    bits,
    call_step,
    lists_of,
    normal_sample,
    option_arguments,
    scalar,
    step_inplace_overload,
    step_op,
    wide_sample,
)
from fused_adamw.rounding import join_master, split_master, tensor_seed
from oracle import low_precision as oracle
from training import refusal

SEED = -7_046_029_254_386_353_131

# The dtype of the parameter, and how its master weight is kept.
FORMS = {
    "bf16 split": (torch.bfloat16, "split"),
    "bf16 whole": (torch.bfloat16, "whole"),
    "bf16 by chance": (torch.bfloat16, "chance"),
    "fp16": (torch.float16, "whole"),
    "fp16 by chance": (torch.float16, "chance"),
}
all_forms = pytest.mark.parametrize("form", FORMS)


def rounded(form: str, master: Tensor, update: int, seed: int = SEED) -> tuple[Tensor, Tensor]:
    """The parameter after update number ``update``, and what is kept of a master weight, on the CPU."""
    dtype, kept = FORMS[form]
    if kept == "split":
        return oracle.split(master)
    if kept == "chance":
        words = oracle.random_words(seed, master.numel(), update)
        return oracle.by_chance(master, dtype, words), master
    return oracle.nearest(master, dtype), master


def canonical(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isnan(), torch.nan, tensor)


def seeds_of(form: str, count: int) -> dict[str, Any]:
    return {"rounding_seeds": [SEED] * count} if FORMS[form][1] == "chance" else {}


def lists_on(device: Any, samples: Sequence[Sample]) -> list[list[Tensor]]:
    """Copies of the samples as the op takes them, with float32 parameters."""
    return lists_of([sample.map(lambda t: t.to(device, copy=True)) for sample in samples])


def in_place(
    form: str, samples: Sequence[Sample], device: Any, *, scalars: str = "numbers", **options: Any
) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Parameters, what is kept of masters, and all lists after one update of float32 samples in this form."""
    pairs = [rounded(form, canonical(sample.param), sample.step) for sample in samples]
    params, masters = ([pair[k].to(device, copy=True) for pair in pairs] for k in (0, 1))
    lists = [params, *lists_on(device, samples)[1:]]
    arguments = {**option_arguments(options, scalars, device), **seeds_of(form, len(samples))}
    step_inplace_overload(scalars)(*lists, masters=masters, **arguments)
    return params, masters, lists


def assert_updated(
    form: str, sample: Sample, param: Tensor, master: Tensor, moments: Sequence[Tensor], **options: Any
) -> None:
    """That the update is the float32 one of the master weight, and the parameter its rounding."""
    expected = call_step(replace(sample, param=canonical(sample.param)), **options)
    new_param, new_master = rounded(form, expected.param, sample.step + 1)
    assert_same_bits(master.cpu(), new_master, "master")
    assert_same_bits(param.cpu(), new_param, "param")
    for mine, other in zip(moments, expected.moments, strict=True):
        assert other is not None
        assert_same_bits(mine.cpu(), other, "moment")


# --- the update ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
@all_forms
def test_every_size(device: torch.device, form: str, dtype: torch.dtype, amsgrad: bool) -> None:
    """Every kind of number, and sizes around those of vectors, threads and blocks."""
    sizes = [size for size in SIZES if size != 1048577]
    samples = [wide_sample(size, dtype, amsgrad=amsgrad, seed=size) for size in sizes]
    params, masters, lists = in_place(form, samples, device)
    for i, sample in enumerate(samples):
        if sample.param.numel() == 0:
            continue
        moments = [lists[k][i] for k in ((2, 3, 4) if amsgrad else (2, 3))]
        assert_updated(form, sample, params[i], masters[i], moments)
        assert lists[5][i].item() == sample.step + 1


@pytest.mark.parametrize("scalars", SCALARS)
@all_forms
def test_a_large_tensor_with_all_options(device: torch.device, form: str, scalars: str) -> None:
    sample = normal_sample(1048577, torch.bfloat16, amsgrad=True, step=2**24 - 1)
    options = {"lr": 0.01, "beta1": 0.8, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-6, "maximize": True}
    params, masters, lists = in_place(form, [sample], device, scalars=scalars, **options)
    assert_updated(form, sample, params[0], masters[0], [lists[k][0] for k in (2, 3, 4)], **options)


@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("scalars", SCALARS)
@all_forms
def test_out_of_place(device: torch.device, form: str, scalars: str, amsgrad: bool, first: bool) -> None:
    """A count of updates beyond 2^32 is a part of the counter of random bits."""
    if first and FORMS[form][1] == "split":
        pytest.skip("without a master weight the new one is float32")
    for dtype in GRAD_DTYPES:
        sample = wide_sample(4097, dtype, amsgrad=amsgrad, step=0 if first else 2**33 + 5)
        param, master = rounded(form, canonical(sample.param), sample.step)
        if first:
            sample = replace(sample, param=param.float()).with_zero_moments()
        moments: list[Any] = [None if first else t.to(device) for t in (*sample.moments, master)]  # type: ignore[union-attr]
        step: Any = sample.step if scalars == "numbers" else scalar(sample.step, device, torch.int64)
        name = "_".join(["master", *(["amsgrad"] * amsgrad), *(["tensor"] * (scalars == "tensors"))])
        inputs = [param.to(device), sample.grad.to(device), *moments]
        before = Snapshot(inputs)
        seed = {"rounding_seed": SEED} if FORMS[form][1] == "chance" else {}
        new = getattr(step_op, name)(*inputs, step, **option_arguments({}, scalars, device), **seed)
        before.assert_unchanged()
        assert_updated(form, sample, new[0], new[-1], new[1:-1])


@all_forms
def test_addresses_that_allow_no_wide_accesses(device: torch.device, form: str) -> None:
    """Every tensor in turn begins an element behind one that does."""
    sample = wide_sample(3001, torch.bfloat16)
    param, master = rounded(form, canonical(sample.param), sample.step)
    tensors = [param, sample.grad, sample.exp_avg, sample.exp_avg_sq, master]
    for odd in range(len(tensors)):
        placed = []
        for i, tensor in enumerate(tensors):
            assert tensor is not None
            room = torch.empty(tensor.numel() + 16, dtype=tensor.dtype, device=device)
            start = 1 if i == odd else 0
            placed.append(room[start : start + tensor.numel()].copy_(tensor))
        lists = [[placed[0]], [placed[1]], [placed[2]], [placed[3]], [], [scalar(5, device, torch.float32)]]
        step_inplace_overload("numbers")(*lists, masters=[placed[4]], **seeds_of(form, 1))
        assert_updated(form, sample, placed[0], placed[4], placed[2:4])


def test_dtypes_of_parameters_share_a_call(device: torch.device) -> None:
    samples = [normal_sample(1000, seed=seed) for seed in range(4)]
    forms = ["bf16 whole", "fp16", "fp16", "bf16 whole"]
    pairs = [rounded(form, s.param, s.step) for form, s in zip(forms, samples, strict=True)]
    params, masters = ([pair[k].to(device, copy=True) for pair in pairs] for k in (0, 1))
    lists = [params, *lists_on(device, samples)[1:]]
    step_inplace_overload("numbers")(*lists, masters=masters)
    for i, form in enumerate(forms):
        assert_updated(form, samples[i], params[i], masters[i], [lists[2][i], lists[3][i]])


def test_many_tensors(device: torch.device) -> None:
    """More than a launch has room for, of which each has a seed of its own."""
    samples = [normal_sample(1 + 37 * i % 300, seed=i) for i in range(700)]
    seeds = [tensor_seed(11, i) for i in range(len(samples))]
    masters, *others = lists_on(device, samples)
    params = [master.bfloat16() for master in masters]
    # A float32 master weight whose parameter is the nearest number is rounded by chance from now on.
    step_inplace_overload("numbers")(params, *others, masters=masters, rounding_seeds=seeds)
    for i, sample in enumerate(samples):
        expected = call_step(sample).param
        assert_same_bits(masters[i].cpu(), expected)
        assert_same_bits(params[i].cpu(), rounded("bf16 by chance", expected, 6, seeds[i])[0])


# --- the roundings ------------------------------------------------------------------------------------------


def stands_still(device: torch.device, master: Tensor, form: str, **options: Any) -> tuple[Tensor, Tensor]:
    """An update that changes no weight: the parameter and what is kept of these master weights after it."""
    sample = Sample(master, torch.zeros_like(master), *[torch.zeros_like(master)] * 2, None, 0, False)
    params, masters, _ = in_place(form, [sample.clone()], device, lr=0.0, **options)
    return params[0].cpu(), masters[0].cpu()


def every_upper_half() -> Tensor:
    """All 65,536 upper halves with lower ones around the ties of bfloat16, and some others."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    lower = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234]
    return canonical(torch.cat([upper + low for low in lower]).view(torch.float32))


def around_float16() -> Tensor:
    """All float16 numbers, halves between two of them, and the float32 numbers next to those."""
    numbers = torch.arange(0, 0x7C01, dtype=torch.int16).view(torch.float16).float()
    numbers[-1] = 65536.0
    ties = (numbers[1:] + numbers[:-1]) / 2
    points = torch.cat([numbers, ties]).view(torch.int32)
    magnitudes = torch.cat([points, points + 1, (points - 1).clamp(min=0)]).view(torch.float32)
    specials = torch.tensor([torch.inf, torch.nan, 65519.99, 65520.0, 1e38, 2.0**-149, 2.0**-25, 2.9e-8])
    return torch.cat([magnitudes, -magnitudes, specials, -specials])


@pytest.mark.parametrize("values", [every_upper_half, around_float16], ids=["bf16 values", "fp16 values"])
@all_forms
def test_roundings(device: torch.device, form: str, values: Callable[[], Tensor]) -> None:
    master = canonical(values())
    param, kept = stands_still(device, master, form)
    expected_param, expected_kept = rounded(form, master, 1)
    assert_same_bits(kept, expected_kept)
    assert_same_bits(param, expected_param)


def test_a_split_is_exact(device: torch.device) -> None:
    """For every float32 number, that is: for those around every bfloat16, and a million random ones."""
    generator = torch.Generator().manual_seed(3)
    some = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator).to(torch.int32)
    master = canonical(torch.cat([every_upper_half(), some.view(torch.float32)]))
    param, remainder = stands_still(device, master, "bf16 split")
    assert_same_bits(join_master(param, remainder), master)
    for mine, python in zip((param, remainder), split_master(master), strict=True):
        assert_same_bits(mine, python)
    finite = master[master.isfinite()]
    distance = (param[master.isfinite()].double() - finite.double()).abs()
    nearest = (finite.bfloat16().double() - finite.double()).abs()
    assert torch.equal(distance, nearest)  # infinitely far both, where it overflows


def test_random_bits_are_those_of_philox() -> None:
    """Known answers of the authors' Random123 library, kat_vectors, philox4x32 10."""
    zero = oracle.philox(0, np.array([0], dtype=np.uint64), 0)
    assert [f"{word:08x}" for word in zero] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    ones = oracle.philox(2**64 - 1, np.array([2**64 - 1], dtype=np.uint64), 2**64 - 1)
    assert [f"{word:08x}" for word in ones] == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]
    pi = oracle.philox(
        0x299F31D0A4093822, np.array([0x85A308D3243F6A88], dtype=np.uint64), 0x0370734413198A2E
    )
    assert [f"{word:08x}" for word in pi] == ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"]


# --- parameters that someone else wrote to ------------------------------------------------------------------


@all_forms
def test_a_new_value_counts(device: torch.device, form: str) -> None:
    """Element by element; what was not written to keeps its master weight."""
    sample = normal_sample(4097)
    dtype, kept = FORMS[form]
    param, master = rounded(form, sample.param, sample.step)
    written = torch.arange(4097) % 3 == 0
    new_value = torch.where(written, (2.0 * sample.param + 1.0).to(dtype), param)
    # Rounded by chance, a parameter may be the number next to it.
    written &= (bits(new_value).int() - bits(param).int()).abs() > (kept == "chance")
    new_value = torch.where(written, new_value, param)
    if kept == "split":
        expected = join_master(new_value, master)
        ulp = torch.exp2(new_value.float().abs().log2().floor() - 7)
        assert ((expected - new_value.float()).abs() <= ulp / 2)[written].all()
    else:
        expected = torch.where(written, new_value.float(), master)
    moved = sample.map(lambda t: t.to(device, copy=True))
    params, masters = [new_value.to(device, copy=True)], [master.to(device, copy=True)]
    step_inplace_overload("numbers")(
        params,
        [moved.grad],
        [moved.exp_avg],
        [moved.exp_avg_sq],
        [],
        [scalar(sample.step, device, torch.float32)],
        masters=masters,
        **seeds_of(form, 1),
    )
    after = replace(sample, param=expected)
    assert_updated(form, after, params[0], masters[0], [moved.exp_avg, moved.exp_avg_sq])  # type: ignore[list-item]


def test_specials_that_were_written(device: torch.device) -> None:
    """Zeros, infinities and NaNs beside every remainder: they stay what they are."""
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan], dtype=torch.bfloat16)
    remainders = torch.arange(-(2**15), 2**15, 7, dtype=torch.int32).to(torch.int16)
    param = values.repeat_interleave(len(remainders))
    remainder = remainders.repeat(len(values))
    zeros = [torch.zeros(param.shape, device=device) for _ in range(3)]
    params, masters = [param.to(device)], [remainder.to(device)]
    step_inplace_overload("numbers")(
        params,
        [zeros[0]],
        [zeros[1]],
        [zeros[2]],
        [],
        [scalar(0.0, device, torch.float32)],
        0.0,
        masters=masters,
    )
    found = join_master(params[0].cpu(), masters[0].cpu())
    assert_same_bits(found.isnan(), param.isnan())
    assert torch.equal(
        found[param == 0].abs() < 2.0**-126, torch.ones(int((param == 0).sum()), dtype=torch.bool)
    )
    infinite = param.isinf()
    # Below an infinity there are the numbers that are rounded to it.
    assert (found[infinite].abs() >= 3.38e38).all()
    assert torch.equal(found[infinite].signbit(), param[infinite].signbit())


# --- steps that are skipped ---------------------------------------------------------------------------------


@all_forms
def test_a_skipped_step_changes_nothing(device: torch.device, form: str) -> None:
    """Not even what disagrees, or is a NaN of another payload."""
    sample = wide_sample(3001, torch.float32)
    master = sample.param
    param = rounded(form, canonical(master), 5)[0]
    kept = rounded(form, canonical(master), 5)[1] if FORMS[form][1] == "split" else master
    param = torch.where(torch.arange(3001) % 5 == 0, torch.ones_like(param), param)
    tensors = [t.to(device) for t in (param, sample.grad, sample.exp_avg, sample.exp_avg_sq, kept)]  # type: ignore[union-attr]
    lists = [*([tensor] for tensor in tensors[:4]), [], [scalar(5, device, torch.float32)]]
    found_inf = scalar(1.0, device, torch.float32)
    before = Snapshot([*tensors, lists[5][0]])
    step_inplace_overload("numbers")(*lists, masters=[tensors[4]], found_inf=found_inf, **seeds_of(form, 1))
    before.assert_skipped()
    seed = {"rounding_seed": SEED} if FORMS[form][1] == "chance" else {}
    new = step_op.master(*tensors, 5, found_inf=found_inf, **seed)
    for mine, old in zip(new, (tensors[0], *tensors[2:]), strict=True):
        assert_same_bits(mine, old)
        assert mine.data_ptr() != old.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_skipped_first_step_returns_the_parameter(device: torch.device, dtype: torch.dtype) -> None:
    param = normal_sample(77).param.to(dtype).to(device)
    new = step_op.master(
        param, torch.ones_like(param), None, None, None, 0, found_inf=scalar(1.0, device, torch.float32)
    )
    for mine, expected in zip(
        new, (param, *[torch.zeros_like(param, dtype=torch.float32)] * 2, param.float()), strict=True
    ):
        assert_same_bits(mine, expected)


# --- schema, fake and refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize("scalars", SCALARS)
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@all_forms
def test_opcheck(device: torch.device, form: str, amsgrad: bool, scalars: str) -> None:
    samples = [normal_sample(shape, torch.bfloat16, amsgrad=amsgrad) for shape in ((12,), (5,), (1,))]
    pairs = [rounded(form, sample.param, 5) for sample in samples]
    params, masters = ([pair[k].to(device, copy=True) for pair in pairs] for k in (0, 1))
    lists = (params, *lists_on(device, samples)[1:])
    options = option_arguments({}, scalars, device)
    torch.library.opcheck(
        step_inplace_overload(scalars), lists, {**options, "masters": masters, **seeds_of(form, len(samples))}
    )
    step: Any = 5 if scalars == "numbers" else scalar(5, device, torch.int64)
    name = "_".join(["master", *(["amsgrad"] * amsgrad), *(["tensor"] * (scalars == "tensors"))])
    seed = {"rounding_seed": SEED} if FORMS[form][1] == "chance" else {}
    torch.library.opcheck(
        getattr(step_op, name),
        (*(tensors[0] for tensors in lists[:-1] if tensors), masters[0], step),
        {**options, **seed},
    )


def test_opcheck_adamw_scaled(device: torch.device) -> None:
    sample = normal_sample(12, torch.bfloat16)
    param, master = rounded("bf16 split", sample.param, 5)
    lists = [[t.to(device)] for t in (param, sample.grad, sample.exp_avg, sample.exp_avg_sq)]  # type: ignore[union-attr]
    report = torch.tensor([0.5, 4.0, 0.0], device=device)
    torch.library.opcheck(
        torch.ops.fused_adamw.adamw_scaled.default,
        (*lists, [], [scalar(5, device, torch.float32)], report),
        {"max_norm": 0.1, "masters": [master.to(device)]},
    )


def test_refusals_are_sentences_and_nothing_is_written(device: torch.device) -> None:
    def lists_of(dtype: torch.dtype = torch.bfloat16) -> list[list[Tensor]]:
        return [
            [torch.ones(3, dtype=dtype, device=device) for _ in range(2)],
            *([torch.zeros(3, device=device) for _ in range(2)] for _ in range(3)),
            [],
            [scalar(0.0, device, torch.float32) for _ in range(2)],
        ]

    def masters(*dtypes: torch.dtype, size: int = 3) -> list[Tensor]:
        return [torch.ones(size, dtype=dtype, device=device) for dtype in dtypes]

    whole, split = torch.float32, torch.int16
    cases: dict[str, tuple[list[list[Tensor]], dict[str, Any]]] = {
        "no masters": (lists_of(), {}),
        "masters of float32 parameters": (lists_of(whole), {"masters": masters(whole, whole)}),
        "too few masters": (lists_of(), {"masters": masters(whole)}),
        "both forms": (lists_of(), {"masters": masters(whole, split)}),
        "16-bit masters": (lists_of(), {"masters": masters(torch.bfloat16, torch.bfloat16)}),
        "remainders of float16": (lists_of(torch.float16), {"masters": masters(split, split)}),
        "seeds of remainders": (lists_of(), {"masters": masters(split, split), "rounding_seeds": [1, 2]}),
        "too few seeds": (lists_of(), {"masters": masters(whole, whole), "rounding_seeds": [1]}),
        "seeds of float32": (lists_of(whole), {"rounding_seeds": [1, 2]}),
        "shape": (lists_of(), {"masters": masters(whole, whole, size=4)}),
    }
    shared = lists_of()
    cases["a master that is a moment"] = (shared, {"masters": [shared[2][0], masters(whole)[0]]})
    twice = masters(whole)[0]
    cases["one master for two"] = (lists_of(), {"masters": [twice, twice]})
    messages = []
    for name, (lists, options) in cases.items():
        before = Snapshot([t for tensors in (*lists, options.get("masters", [])) for t in tensors])
        message = refusal(lambda c=(lists, options): step_inplace_overload("numbers")(*c[0], **c[1]))
        messages.append(f"{name}:\n{message}")
        before.assert_unchanged()
    assert_expected_inline(
        "\n".join(messages),
        """\
no masters:
TypeError: fused_adamw::step_: params[0] has dtype torch.bfloat16 and no master weight;
torch.float32, or a master weight, is required
masters of float32 parameters:
TypeError: fused_adamw::step_: params[0] has dtype torch.float32; torch.float16 or torch.bfloat16 is
required
too few masters:
ValueError: fused_adamw::step_: masters has 1 tensors; 2, as params, is required
both forms:
TypeError: fused_adamw::step_: masters[1] has dtype torch.int16; torch.float32, as the first one, is
required
16-bit masters:
TypeError: fused_adamw::step_: masters[0] has dtype torch.bfloat16; torch.float32 or torch.int16 is
required
remainders of float16:
TypeError: fused_adamw::step_: masters[0] has dtype torch.int16; torch.float32 is required
seeds of remainders:
TypeError: fused_adamw::step_: masters[0] has dtype torch.int16; torch.float32 is required
too few seeds:
ValueError: fused_adamw::step_: rounding_seeds has 1 numbers; 2, as params, or none is required
seeds of float32:
ValueError: fused_adamw::step_: rounding seeds are given, but params[0], of dtype torch.float32, is
not rounded; no seeds are required
shape:
ValueError: fused_adamw::step_: masters[0] has shape (4,); (3,), the parameter's, is required
a master that is a moment:
ValueError: fused_adamw::step_: exp_avgs[0] and masters[0] share memory; a tensor that is written
may share memory with no other tensor (a gradient that is exactly a tensor of its own parameter may)
one master for two:
ValueError: fused_adamw::step_: masters[0] and masters[1] share memory; a tensor that is written may
share memory with no other tensor (a gradient that is exactly a tensor of its own parameter may)""",
    )


def test_refusals_out_of_place() -> None:
    half, full = torch.ones(3, dtype=torch.bfloat16), torch.ones(3)
    zeros = torch.zeros(3)
    calls = {
        "no master": lambda: step_op.default(half, half, zeros, zeros, 1),
        "float32": lambda: step_op.master(full, full, zeros, zeros, full, 1),
        "half a state": lambda: step_op.master(half, half, zeros, zeros, None, 1),
        "first, float32": lambda: step_op.master(full, full, None, None, None, 0),
        "16-bit master": lambda: step_op.master(half, half, zeros, zeros, half, 1),
        "seed of a remainder": lambda: step_op.master(
            half, half, zeros, zeros, torch.zeros(3, dtype=torch.int16), 1, rounding_seed=1
        ),
    }
    assert_expected_inline(
        "\n".join(f"{name}:\n{refusal(call)}" for name, call in calls.items()),
        """\
no master:
TypeError: fused_adamw::step: param has dtype torch.bfloat16 and no master weight; torch.float32, or
a master weight, is required
float32:
TypeError: fused_adamw::step: param has dtype torch.float32; torch.float16 or torch.bfloat16 is
required
half a state:
ValueError: fused_adamw::step: exp_avg, exp_avg_sq given without master; all of the state, or None
for all before the first update, is required
first, float32:
TypeError: fused_adamw::step: param has dtype torch.float32; torch.float16 or torch.bfloat16 is
required
16-bit master:
TypeError: fused_adamw::step: master has dtype torch.bfloat16; torch.float32 or torch.int16 is
required
seed of a remainder:
TypeError: fused_adamw::step: master has dtype torch.int16; torch.float32 is required""",
    )


def test_bits_of_a_seed_differ_for_all_tensors() -> None:
    seeds = [tensor_seed(seed, index) for seed in (0, 1, 2**64 - 1, -1) for index in range(1000)]
    assert len(set(seeds)) == 3000  # -1 is 2^64 - 1
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert bits(torch.tensor(seeds)).dtype == torch.int64
