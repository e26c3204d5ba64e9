"""Rounding of master weights by chance: how often which way, and which random bits each element has."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused_adamw
from cases import Snapshot, assert_same_bits, bits
from master_weights import as_params, assert_rounding, float32_twin, gradients_for, make_rounded, masters_of
from training import (
    advance,
    assert_all_same_bits,
    error,
    oracles_of,
    params_of,
    set_gradients,
    tensors_of,
    train,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
STEPS = 4


def by_chance(params: Sequence[Tensor], seed: int = 0, **options: Any) -> fused_adamw.AdamW:
    return fused_adamw.AdamW(
        [{"params": list(params), "rounding_seed": seed}], stochastic_rounding=True, **options
    )


def trained(seed: int, steps: int = STEPS, dtype: torch.dtype = torch.bfloat16) -> fused_adamw.AdamW:
    optimizer = by_chance(make_rounded(dtype), seed)
    train(optimizer, gradients_for(params_of(optimizer), steps, dtype))
    return optimizer


def roundings(masters: Sequence[Tensor], dtype: torch.dtype, steps: int, seed: int = 0) -> list[list[Tensor]]:
    """What these masters are rounded to in each step: a learning rate of 0 leaves them as they are."""
    params = as_params(masters, dtype)
    optimizer = by_chance(params, seed, lr=0.0)
    for param, master in zip(params, masters, strict=True):
        optimizer.set_master_param(param, master)
    found = []
    for _ in range(steps):
        train(optimizer, [[torch.zeros_like(param) for param in params]])
        assert_all_same_bits(masters_of(optimizer), masters)
        found.append([param.detach().clone() for param in params])
    return found


# --- how often which way ------------------------------------------------------------------------------------

SIGMAS = 6.0  # of a binomial distribution; beyond them lies a share of 2e-9


def assert_binomial(count: int, trials: int, chance: float) -> None:
    deviation = math.sqrt(trials * chance * (1.0 - chance))
    assert abs(count - trials * chance) <= SIGMAS * deviation, f"{count} of {trials}, chance {chance}"


# A number and the one above it in magnitude, in steps of a number's unit in the last place.
PLACES: dict[str, tuple[torch.dtype, float, float]] = {
    "bf16 normal": (torch.bfloat16, 1.0, 2.0**-7),
    "bf16 negative": (torch.bfloat16, -3.0, -(2.0**-6)),
    "bf16 below a power of two": (torch.bfloat16, 2.0 - 2.0**-7, 2.0**-7),
    "bf16 subnormal": (torch.bfloat16, 5 * 2.0**-133, 2.0**-133),
    "fp16 normal": (torch.float16, 1.0, 2.0**-10),
    "fp16 negative": (torch.float16, -3.0, -(2.0**-9)),
    "fp16 below a power of two": (torch.float16, 2.0 - 2.0**-10, 2.0**-10),
    "fp16 subnormal": (torch.float16, 5 * 2.0**-24, 2.0**-24),
    "fp16 below the subnormal numbers": (torch.float16, 0.0, 2.0**-24),
    "fp16 least normal": (torch.float16, 2.0**-14 - 2.0**-24, 2.0**-24),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_master_is_rounded_up_as_often_as_it_is_near(name: str) -> None:
    """16,384 elements for each of 33 distances."""
    dtype, low, ulp = PLACES[name]
    trials = 16_384
    chances = [i / 32 for i in range(33)]
    exact = [low + chance * ulp for chance in chances]
    master = torch.tensor(exact, dtype=torch.float64).float().repeat(trials, 1)
    [[rounded]] = roundings([master], dtype, 1)
    found = rounded.double()
    assert ((found == low) | (found == low + ulp)).all()
    for column, (chance, value) in enumerate(zip(chances, exact, strict=True)):
        assert master[0, column].double() == value  # exact in float32
        count = int((found[:, column] == low + ulp).sum())
        assert_binomial(count, trials, chance)


@DTYPES
def test_a_number_of_the_dtype_is_never_changed(dtype: torch.dtype) -> None:
    """All of them, infinities and zeros of both signs too."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = every[~every.isnan()]
    for [rounded] in roundings([numbers.float()], dtype, 3):
        assert_same_bits(rounded, numbers)


@DTYPES
def test_the_parameters_are_their_masters_on_average(dtype: torch.dtype) -> None:
    """Over many steps, in units of the last place; an error's variance is below 1/4."""
    params = as_params([torch.full((500,), 1.5)], dtype)
    optimizer = by_chance(params, lr=2.0**-12)
    gradients = gradients_for(params, 200, dtype)
    total = torch.zeros(500, dtype=torch.float64)
    nearest = torch.zeros(500, dtype=torch.float64)
    for grads in gradients:
        train(optimizer, [grads])
        [master] = masters_of(optimizer)
        assert_rounding(params[0], master, by_chance=True)
        assert (params[0] >= 1.0).all()
        assert (params[0] < 2.0).all()
        total += (params[0].detach().double() - master.double()) / torch.finfo(dtype).eps
        nearest += (master.to(dtype).double() - master.double()) / torch.finfo(dtype).eps
    assert total.sum().abs() <= SIGMAS * 0.5 * math.sqrt(500 * 200)
    assert (total.abs() <= SIGMAS * 0.5 * math.sqrt(200)).all()
    assert total.abs().max() > 0.0
    assert not torch.equal(total, nearest)


def test_a_decay_too_small_for_the_parameter_acts_on_average() -> None:
    """2e-6 a step, of numbers that are 2^-7 of themselves apart; their mean moves all the same."""
    params = as_params([torch.full((10_000,), 1.0 + 2.0**-7)], torch.bfloat16)
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 2e-3}
    optimizer, plain = (
        by_chance(params, **options),
        fused_adamw.AdamW(as_params(params, torch.bfloat16), **options),
    )
    oracles = oracles_of(params, **options)
    gradients = [[torch.zeros_like(params[0])] for _ in range(100)]
    train(optimizer, gradients)
    train(plain, gradients)
    advance(oracles, gradients)
    assert (params_of(plain)[0] == 1.0 + 2.0**-7).all()  # rounded to the nearest number
    mean = oracles[0].param[0].item()
    chance = (1.0 + 2.0**-7 - mean) * 2.0**7
    assert 0.02 < chance < 0.03
    assert_binomial(int((params[0] == 1.0).sum()), 10_000, chance)
    assert error(masters_of(optimizer), oracles) < 100 * 2.0**-23


# --- which random bits --------------------------------------------------------------------------------------


def halfway(*shape: int) -> Tensor:
    """Masters that are rounded up in half of all cases."""
    return torch.full(shape, 1.0 + 2.0**-8)


def assert_independent(found: Tensor, other: Tensor) -> None:
    """That roundings of ``halfway`` agree in about half of the elements."""
    assert_binomial(int((found == other).sum()), found.numel(), 0.5)


def test_every_element_tensor_and_step_has_bits_of_its_own() -> None:
    found = roundings([halfway(30_000), halfway(30_000)], torch.bfloat16, 4)
    for step, tensors in enumerate(found):
        for i, tensor in enumerate(tensors):
            assert_binomial(int((tensor == 1.0).sum()), tensor.numel(), 0.5)
            for shift in (1, 2, 3, 4, 8, 64, 1024):
                assert_independent(tensor[shift:], tensor[:-shift])
            for others in found[:step]:
                assert_independent(tensor, others[0])
                assert_independent(tensor, others[1])
            for other in tensors[:i]:
                assert_independent(tensor, other)


def test_other_seeds_have_other_bits_and_the_same_seed_has_the_same() -> None:
    seeds = (0, 1, -1, 2**32, 2**63, 2**64 - 1, 12345)
    found = {seed: roundings([halfway(30_000)], torch.bfloat16, 1, seed)[0][0] for seed in seeds}
    for i, seed in enumerate(seeds):
        for other in seeds[:i]:
            if (seed - other) % 2**64 != 0:
                assert_independent(found[seed], found[other])
    [[again]] = roundings([halfway(30_000)], torch.bfloat16, 1, 12345)
    assert_same_bits(again, found[12345])


@DTYPES
def test_replicas_with_the_same_seed_have_the_same_bits(dtype: torch.dtype) -> None:
    """Whatever the generators of torch were used for in the meantime."""
    optimizer = trained(3, dtype=dtype)
    torch.manual_seed(1234)
    replica = by_chance(make_rounded(dtype), 3)
    for grads in gradients_for(params_of(replica), STEPS, dtype):
        torch.rand(7)
        train(replica, [grads])
    assert_all_same_bits(tensors_of(replica), tensors_of(optimizer))
    other = trained(4, dtype=dtype)
    assert_all_same_bits(masters_of(other), masters_of(optimizer))
    for mine, param in zip(params_of(other), params_of(optimizer), strict=True):
        assert param.numel() < 20 or not torch.equal(mine, param)


def test_torchs_generator_is_left_alone() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    optimizer = fused_adamw.AdamW(make_rounded(torch.bfloat16), stochastic_rounding=True)
    train(optimizer, gradients_for(params_of(optimizer), 2, torch.bfloat16))
    assert torch.equal(torch.get_rng_state(), state)


@DTYPES
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype, set_threads: Any) -> None:
    found = []
    for threads in (1, 2, 5):
        set_threads(threads)
        found.append(roundings([halfway(100_003), halfway(70_001)], dtype, 2))
    for other in found[1:]:
        for step, expected in zip(other, found[0], strict=True):
            assert_all_same_bits(step, expected)


def test_the_instruction_set_changes_nothing(set_capability: Any) -> None:
    found = roundings([halfway(10_007)], torch.bfloat16, 2)
    set_capability("baseline")
    for step, expected in zip(roundings([halfway(10_007)], torch.bfloat16, 2), found, strict=True):
        assert_all_same_bits(step, expected)


def test_a_parameter_has_the_bits_of_its_place_whoever_has_a_gradient() -> None:
    """And however the parameters are grouped."""
    gradients = gradients_for(make_rounded(torch.bfloat16), STEPS, torch.bfloat16)
    expected = trained(5)
    for absent in range(2):
        some = by_chance(make_rounded(torch.bfloat16), 5)
        train(some, [[None if i == absent else g for i, g in enumerate(grads)] for grads in gradients])
        kept = [i for i in range(len(params_of(some))) if i != absent]
        assert_all_same_bits([params_of(some)[i] for i in kept], [params_of(expected)[i] for i in kept])
    params = make_rounded(torch.bfloat16)
    groups = [{"params": params[:2], "rounding_seed": 5}, {"params": params[2:], "rounding_seed": 5}]
    grouped = fused_adamw.AdamW(groups, stochastic_rounding=True)
    train(grouped, gradients)
    assert_all_same_bits(tensors_of(grouped), tensors_of(expected))


def test_a_group_added_later_has_bits_of_its_own() -> None:
    params = as_params([halfway(30_000), halfway(30_000)], torch.bfloat16)
    optimizer = by_chance(params[:1], 5, lr=0.0)
    optimizer.add_param_group({"params": params[1:], "rounding_seed": 5})
    for param in params:
        optimizer.set_master_param(param, halfway(30_000))
    train(optimizer, [[torch.zeros(30_000)] * 2])
    assert_independent(params[0].detach(), params[1].detach())


@pytest.mark.parametrize("explicit", [False, True], ids=["nonfinite", "found_inf"])
def test_a_skipped_step_uses_no_bits(explicit: bool) -> None:
    optimizer = by_chance(make_rounded(torch.bfloat16), 3, nonfinite=None if explicit else "skip")
    for grads in gradients_for(params_of(optimizer), STEPS, torch.bfloat16):
        train(optimizer, [grads])
        before = Snapshot(tensors_of(optimizer))
        if explicit:
            optimizer.found_inf = torch.tensor(1.0)
            train(optimizer, [grads])
            del optimizer.found_inf
        else:
            train(optimizer, [[torch.full_like(grad, math.nan) for grad in grads]])
        before.assert_unchanged()
    assert_all_same_bits(tensors_of(optimizer), tensors_of(trained(3)))


# --- where the seed comes from and goes ---------------------------------------------------------------------


def test_the_seed_is_torchs_and_is_kept() -> None:
    torch.manual_seed(99)
    optimizer = fused_adamw.AdamW(make_rounded(torch.bfloat16), stochastic_rounding=True)
    torch.manual_seed(100)
    train(optimizer, gradients_for(params_of(optimizer), STEPS, torch.bfloat16))
    assert optimizer.param_groups[0]["rounding_seed"] == 99
    assert_all_same_bits(tensors_of(optimizer), tensors_of(trained(99)))
    assert "rounding_seed" not in fused_adamw.AdamW(make_rounded(torch.bfloat16)).param_groups[0]


def test_a_state_dict_has_the_seeds_of_all_groups() -> None:
    first, second = make_rounded(torch.bfloat16)[:2]
    groups = [{"params": [first], "rounding_seed": 2**64 - 1}, {"params": [second], "rounding_seed": 4}]
    optimizer = fused_adamw.AdamW(groups, stochastic_rounding=True)
    assert [group["rounding_seed"] for group in optimizer.state_dict()["param_groups"]] == [2**64 - 1, 4]


@pytest.mark.parametrize("switched_on", ["at first", "by the checkpoint"])
@DTYPES
def test_a_resumed_run_has_the_same_bits(dtype: torch.dtype, switched_on: str) -> None:
    torch.manual_seed(21)
    optimizer = fused_adamw.AdamW(make_rounded(dtype), stochastic_rounding=True)
    gradients = gradients_for(params_of(optimizer), 2 * STEPS, dtype)
    train(optimizer, gradients[:STEPS])
    torch.manual_seed(22)
    resumed = fused_adamw.AdamW(
        as_params(params_of(optimizer), dtype), stochastic_rounding=switched_on == "at first"
    )
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, resumed):
        train(each, gradients[STEPS:])
    assert_all_same_bits(tensors_of(resumed), tensors_of(optimizer))
    torch.manual_seed(21)
    whole = fused_adamw.AdamW(make_rounded(dtype), stochastic_rounding=True)
    train(whole, gradients)
    assert_all_same_bits(tensors_of(resumed), tensors_of(whole))


@pytest.mark.parametrize("how", ["between steps", "by a checkpoint of torch"])
def test_rounding_by_chance_can_begin_later(how: str) -> None:
    gradients = gradients_for(make_rounded(torch.bfloat16), STEPS, torch.bfloat16)
    torch.manual_seed(33)
    if how == "between steps":
        optimizer = fused_adamw.AdamW(make_rounded(torch.bfloat16))
        twin = float32_twin(params_of(optimizer))
        train(optimizer, gradients[:2])
        optimizer.param_groups[0]["rounding_seed"] = torch.initial_seed()
    else:
        source = torch.optim.AdamW(as_params(make_rounded(torch.bfloat16), torch.float32))
        optimizer = fused_adamw.AdamW(make_rounded(torch.bfloat16), stochastic_rounding=True)
        optimizer.load_state_dict(source.state_dict())
        twin = float32_twin(params_of(optimizer))
        train(optimizer, gradients[:2])
    train(optimizer, gradients[2:])
    assert optimizer.state_dict()["param_groups"][0]["rounding_seed"] == 33
    for grads in gradients:
        set_gradients(params_of(twin), [grad.float() for grad in grads])
        twin.step()
    assert_all_same_bits(masters_of(optimizer), [param.detach() for param in params_of(twin)])
    rounded = [param.detach() for param in params_of(optimizer)]
    nearest = [master.bfloat16() for master in masters_of(optimizer)]
    assert any(not torch.equal(bits(a), bits(b)) for a, b in zip(rounded, nearest, strict=True))


def test_float32_parameters_are_not_rounded() -> None:
    params = [nn.Parameter(torch.linspace(1.0, 2.0, 100)), *make_rounded(torch.bfloat16)]
    optimizer = by_chance(params)
    twin = float32_twin(params)
    gradients = gradients_for(params, STEPS, torch.float32)
    train(optimizer, gradients)
    train(twin, gradients)
    assert_same_bits(params[0].detach(), params_of(twin)[0].detach())
    assert "master_param" not in optimizer.state[params[0]]
