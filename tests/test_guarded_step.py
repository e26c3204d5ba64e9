"""The guarded step: ``AdamW(max_grad_norm=, nonfinite=)`` and ``guarded_adamw_step``."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from cases import Snapshot, assert_same_bits
from fused_adamw import (
    AdamW,
    AdamWOptions,
    AdamWState,
    Entry,
    GradientGuardOptions,
    NonfiniteGradientError,
    StepControl,
    guarded_adamw_step,
    merge_stats,
)
from oracle import gradient_stats as stats_oracle
from oracle.adamw import Oracle
from refusals import refuse

SHAPES = ((50, 7), (), (300,), (2, 3, 4), (20_000,))
SPECIALS = (math.nan, math.inf, -math.inf)


@pytest.fixture(autouse=True)
def one_thread(set_threads: Callable[[int], None]) -> None:
    """Thousands of small steps: waking a second thread on a busy machine costs more than all else."""
    set_threads(1)


def make_params(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def make_gradients(
    params: Sequence[Tensor], steps: int, dtype: torch.dtype = torch.float32, seed: int = 1
) -> list[list[Tensor]]:
    """Gradients for each step; their norms are between 0.1 and 10."""
    generator = torch.Generator().manual_seed(seed)
    elements = sum(param.numel() for param in params)
    gradients = []
    for _ in range(steps):
        norm = 10.0 ** (2.0 * torch.rand((), generator=generator) - 1.0)
        gradients.append(
            [
                (norm / math.sqrt(elements) * torch.randn(param.shape, generator=generator)).to(dtype)
                for param in params
            ]
        )
    return gradients


def set_gradients(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad_dtype = None  # any dtype may be assigned
        param.grad = None if grad is None else grad.clone(memory_format=torch.preserve_format)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters, gradients and states, in a fixed order."""
    tensors: list[Tensor] = []
    for param in params_of(optimizer):
        state = optimizer.state.get(param, {})
        tensors += [param, *(state[name] for name in sorted(state))]
        tensors += [] if param.grad is None else [param.grad]
    return tensors


def assert_same_tensors(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    for i, (a, b) in enumerate(zip(tensors_of(found), tensors_of(expected), strict=True)):
        assert_same_bits(a.detach(), b.detach(), f"tensor {i}")


def train(optimizer: torch.optim.Optimizer, gradients: Sequence[Sequence[Tensor | None]]) -> None:
    for grads in gradients:
        set_gradients(params_of(optimizer), grads)
        optimizer.step()


def train_torch(
    optimizer: torch.optim.Optimizer, gradients: Sequence[Sequence[Tensor]], max_norm: float
) -> None:
    """What users write today, with float32 gradients; torch's step takes no others."""
    for grads in gradients:
        set_gradients(params_of(optimizer), [grad.float() for grad in grads])
        torch.nn.utils.clip_grad_norm_(params_of(optimizer), max_norm)
        optimizer.step()


def advance(oracles: Sequence[Oracle], grads: Sequence[Tensor], max_norm: float | None) -> float:
    """One clipped step in float64; returns the coefficient."""
    clip = stats_oracle.clip_coefficient(stats_oracle.exact_norm(grads), max_norm)
    for oracle, grad in zip(oracles, grads, strict=True):
        oracle.update(grad.double() * clip)
    return clip


def error(params: Sequence[Tensor], oracles: Sequence[Oracle]) -> float:
    """The root of the mean squared distance from the oracle."""
    squares = [
        (param.detach().double() - oracle.param).square().flatten()
        for param, oracle in zip(params, oracles, strict=True)
    ]
    return math.sqrt(torch.cat(squares).mean().item())


GROUP_OPTIONS: tuple[dict[str, Any], ...] = (
    {"lr": 0.01, "weight_decay": 0.1},
    {"lr": 0.001, "betas": (0.8, 0.99), "eps": 1e-6},
)


def grouped(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2], **GROUP_OPTIONS[0]}, {"params": params[2:], **GROUP_OPTIONS[1]}]


# The optimizer against torch's.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
def test_100_steps_are_as_exact_as_those_of_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours = AdamW(grouped(make_params()), max_grad_norm=1.0, **options)
    theirs = torch.optim.AdamW(grouped(make_params()), **options)
    group_options = [GROUP_OPTIONS[0]] * 2 + [GROUP_OPTIONS[1]] * 3
    oracles = [
        Oracle(param, **own, **options) for param, own in zip(make_params(), group_options, strict=True)
    ]
    gradients = make_gradients(params_of(ours), 100, dtype)
    coefficients = [advance(oracles, grads, 1.0) for grads in gradients]
    assert 20 < sum(clip < 1.0 for clip in coefficients) < 80
    train(ours, gradients)
    train_torch(theirs, gradients, 1.0)
    # Both round a parameter of float32 in each step, which is nearly all of either error.
    assert error(params_of(ours), oracles) <= 1.001 * error(params_of(theirs), oracles)
    for mine, other in zip(params_of(ours), params_of(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_all_groups_are_clipped_together() -> None:
    params = make_params()
    ours = AdamW(grouped(params), max_grad_norm=1.0)
    grads = [torch.full_like(param, 0.1) for param in params]
    set_gradients(params, grads)
    ours.step()
    clip = 1.0 / (stats_oracle.exact_norm(grads) + 1e-6)
    for param, (beta1, _) in zip(params, [(0.9, 0.999)] * 2 + [(0.8, 0.99)] * 3, strict=True):
        expected = torch.full_like(param, (1 - beta1) * 0.1 * clip)
        torch.testing.assert_close(ours.state[param]["exp_avg"], expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 0.5}, {"nonfinite": "skip"}, {"nonfinite": "error"}], ids=str
)
def test_gradients_stay_as_they_are(options: dict[str, Any]) -> None:
    params = make_params()
    optimizer = AdamW(params, **options)
    for grads in make_gradients(params, 3, torch.float16):
        set_gradients(params, grads)
        before = Snapshot([param.grad for param in params])
        optimizer.step()
        before.assert_unchanged()


@pytest.mark.parametrize("max_grad_norm", [None, math.inf, 1e30])
def test_a_guard_that_does_nothing_changes_no_bit(max_grad_norm: float | None) -> None:
    plain = AdamW(grouped(make_params()))
    guarded = AdamW(grouped(make_params()), max_grad_norm=max_grad_norm, nonfinite="skip")
    gradients = make_gradients(params_of(plain), 5)
    train(plain, gradients)
    train(guarded, gradients)
    assert_same_tensors(guarded, plain)


def test_max_norm_0() -> None:
    """The gradients count as 0; moments, decay and step go on."""
    guarded = AdamW(make_params(), max_grad_norm=0.0, weight_decay=0.1)
    plain = AdamW(make_params(), weight_decay=0.1)
    gradients = make_gradients(params_of(plain), 2)
    zeros = [[torch.zeros_like(grad) for grad in grads] for grads in gradients]
    guarded.max_grad_norm = None
    train(guarded, gradients)
    train(plain, gradients)
    guarded.max_grad_norm = 0.0
    train(guarded, gradients)
    train(plain, zeros)
    for mine, other in zip(params_of(guarded), params_of(plain), strict=True):
        assert_same_bits(mine.detach(), other.detach())
        assert guarded.state[mine]["step"].item() == 4.0


def test_passes_of_their_own_agree_and_change_the_gradients() -> None:
    fused = AdamW(grouped(make_params()), max_grad_norm=1.0)
    apart = AdamW(grouped(make_params()), max_grad_norm=1.0, fused_step=False)
    changed = 0
    for grads in make_gradients(params_of(fused), 30):
        train(fused, [grads])
        train(apart, [grads])
        clip = stats_oracle.clip_coefficient(stats_oracle.exact_norm(grads), 1.0)
        for param, grad in zip(params_of(apart), grads, strict=True):
            torch.testing.assert_close(param.grad, grad * clip, rtol=1e-6, atol=0.0)
        changed += clip < 1.0
    assert 5 < changed < 25
    for mine, other in zip(params_of(fused), params_of(apart), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_passes_of_their_own_skip_what_is_not_finite() -> None:
    params = make_params()
    optimizer = AdamW(params, max_grad_norm=1.0, fused_step=False)
    gradients = make_gradients(params, 2)
    train(optimizer, gradients[:1])
    gradients[1][2][3] = math.nan
    set_gradients(params, gradients[1])
    before = Snapshot(tensors_of(optimizer))
    optimizer.step()
    before.assert_unchanged()


def test_passes_of_their_own_check_before_the_gradients_change() -> None:
    params = make_params()
    optimizer = AdamW(grouped(params), max_grad_norm=1e-3, fused_step=False)
    gradients = make_gradients(params, 2)
    train(optimizer, gradients[:1])
    set_gradients(params, gradients[1])
    optimizer.param_groups[1]["lr"] = -1.0
    refuse("lr of the second group", optimizer.step, tensors_of(optimizer))


def test_serial_statistics_agree() -> None:
    stages = AdamW(make_params(), max_grad_norm=1.0)
    serial = AdamW(make_params(), max_grad_norm=1.0, hierarchical_stats=False)
    gradients = make_gradients(params_of(stages), 20)
    train(stages, gradients)
    train(serial, gradients)
    for mine, other in zip(params_of(stages), params_of(serial), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_the_rows_are_merged_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from fused_adamw.torch_library import cpu

    asked = []
    analyze_and_merge = cpu.analyze_and_merge

    def spy(tables: Any, stats: Any, amp: Any, hierarchical: bool) -> None:
        asked.append(hierarchical)
        analyze_and_merge(tables, stats, amp, hierarchical)

    monkeypatch.setattr(cpu, "analyze_and_merge", spy)
    for hierarchical in (True, False):
        optimizer = AdamW(make_params(), max_grad_norm=1.0, hierarchical_stats=hierarchical)
        train(optimizer, make_gradients(params_of(optimizer), 1))
    assert asked == [True, False]


def test_settings_may_change_between_steps() -> None:
    optimizer = AdamW(make_params(), max_grad_norm=1e6)
    gradients = make_gradients(params_of(optimizer), 1)
    norm = stats_oracle.exact_norm(gradients[0])
    train(optimizer, gradients)
    assert optimizer.last_stats.clip_coefficient == 1.0
    optimizer.max_grad_norm = norm / 2
    train(optimizer, gradients)
    assert optimizer.last_stats.clip_coefficient == pytest.approx(0.5, rel=1e-4)


# Gradients that are not finite.


def test_150_steps_with_random_nans() -> None:
    """Skipped steps are as if they had not been."""
    ours = AdamW(grouped(make_params()), max_grad_norm=1.0)
    clean = AdamW(grouped(make_params()), max_grad_norm=1.0)
    theirs = torch.optim.AdamW(grouped(make_params()))
    generator = torch.Generator().manual_seed(5)
    good = []
    skipped = 0
    for grads in make_gradients(params_of(ours), 150):
        if torch.rand((), generator=generator) < 0.3:
            bad = grads[int(torch.randint(len(grads), (), generator=generator))].view(-1)
            bad[int(torch.randint(len(bad), (), generator=generator))] = SPECIALS[skipped % 3]
            set_gradients(params_of(ours), grads)
            before = Snapshot(tensors_of(ours))
            ours.step()
            if good:
                before.assert_unchanged()
            assert ours.last_stats.skipped
            skipped += 1
        else:
            good.append(grads)
            train(ours, [grads])
            assert not ours.last_stats.skipped
    assert 30 < skipped < 60
    train(clean, good)
    for mine, other in zip(params_of(ours), params_of(clean), strict=True):
        assert_same_bits(mine.detach(), other.detach())
        assert ours.state[mine]["step"].item() == len(good)
    train_torch(theirs, good, 1.0)
    for mine, other in zip(params_of(ours), params_of(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", SPECIALS)
@pytest.mark.parametrize("which", range(len(SHAPES)))
def test_one_bad_element_skips_the_step_of_all_parameters(which: int, value: float) -> None:
    optimizer = AdamW(grouped(make_params()), nonfinite="skip")
    gradients = make_gradients(params_of(optimizer), 2)
    train(optimizer, gradients[:1])
    gradients[1][which].view(-1)[-1] = value
    set_gradients(params_of(optimizer), gradients[1])
    before = Snapshot(tensors_of(optimizer))
    optimizer.step()
    before.assert_unchanged()


def test_without_a_guard_nan_goes_through_as_in_torch() -> None:
    ours, theirs = AdamW(make_params()), torch.optim.AdamW(make_params())
    gradients = make_gradients(params_of(ours), 1)
    gradients[0][2][3] = math.nan
    train(ours, gradients)
    train(theirs, gradients)
    assert ours.last_stats is None
    for mine, other in zip(params_of(ours), params_of(theirs), strict=True):
        assert torch.equal(mine.isnan(), other.isnan())
    assert params_of(ours)[2].isnan().sum() == 1


def test_first_step_skipped() -> None:
    """Its state can be saved, and both optimizers go on from it as from the start."""
    ours = AdamW(make_params(), max_grad_norm=1.0, amsgrad=True)
    gradients = make_gradients(params_of(ours), 3)
    bad = [grad.clone() for grad in gradients[0]]
    bad[0][0, 0] = math.inf
    train(ours, [bad])
    for param, fresh in zip(params_of(ours), make_params(), strict=True):
        assert_same_bits(param.detach(), fresh.detach())
        assert ours.state[param]["step"].item() == 0.0
        assert not ours.state[param]["exp_avg"].any()
    theirs = torch.optim.AdamW(make_params(), amsgrad=True)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    fresh = AdamW(make_params(), max_grad_norm=1.0, amsgrad=True)
    train(ours, gradients)
    train(fresh, gradients)
    assert_same_tensors(ours, fresh)
    train_torch(theirs, gradients, 1.0)
    for mine, other in zip(params_of(ours), params_of(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def named_params() -> list[tuple[str, nn.Parameter]]:
    return [(f"layer.{i}.weight", param) for i, param in enumerate(make_params())]


def test_errors_name_the_parameters_and_leave_all_as_it_is() -> None:
    lines = []
    for params in (
        make_params(),
        grouped(make_params()),
        named_params(),
        [{"params": named_params()[:3]}, {"params": named_params()[3:]}],
    ):
        optimizer = AdamW(params, nonfinite="error", max_grad_norm=1.0)
        gradients = make_gradients(params_of(optimizer), 2)
        train(optimizer, gradients[:1])
        gradients[1][1].fill_(math.inf)
        gradients[1][4][-1] = math.nan
        set_gradients(params_of(optimizer), gradients[1])
        before = Snapshot(tensors_of(optimizer))
        with pytest.raises(NonfiniteGradientError) as caught:
            optimizer.step()
        before.assert_unchanged()
        lines.append(str(caught.value).replace("infinity in ", "infinity in\n    "))
    assert_expected_inline(
        "\n".join(lines),
        """\
fused_adamw.AdamW: NaN or infinity in
    param_groups[0]['params'][1], param_groups[0]['params'][4]; nothing was updated
fused_adamw.AdamW: NaN or infinity in
    param_groups[0]['params'][1], param_groups[1]['params'][2]; nothing was updated
fused_adamw.AdamW: NaN or infinity in
    layer.1.weight, layer.4.weight; nothing was updated
fused_adamw.AdamW: NaN or infinity in
    layer.1.weight, layer.4.weight; nothing was updated""",
    )
    assert issubclass(NonfiniteGradientError, RuntimeError)


def test_an_error_is_raised_without_clipping_and_in_passes_of_their_own_too() -> None:
    for options in ({}, {"fused_step": False}, {"fused_step": False, "max_grad_norm": 1.0}):
        optimizer = AdamW(make_params(), nonfinite="error", **options)
        gradients = make_gradients(params_of(optimizer), 1)
        train(optimizer, gradients)
        gradients[0][0][0, 0] = math.nan
        set_gradients(params_of(optimizer), gradients[0])
        before = Snapshot(tensors_of(optimizer))
        with pytest.raises(NonfiniteGradientError, match=r"in param_groups\[0\]\['params'\]\[0\];"):
            optimizer.step()
        before.assert_unchanged()


def test_names_leave_out_parameters_without_gradients() -> None:
    optimizer = AdamW(named_params(), nonfinite="error")
    gradients = make_gradients(params_of(optimizer), 1)
    gradients[0][3].fill_(math.nan)
    set_gradients(params_of(optimizer), [None, None, *gradients[0][2:]])
    with pytest.raises(NonfiniteGradientError, match=r"in layer\.3\.weight;"):
        optimizer.step()


# Statistics.


def test_last_stats() -> None:
    optimizer = AdamW(named_params(), max_grad_norm=1.0)
    assert optimizer.last_stats is None
    gradients = make_gradients(params_of(optimizer), 10)
    for grads in gradients:
        train(optimizer, [grads])
        stats = optimizer.last_stats
        norm = stats_oracle.exact_norm(grads)
        assert stats.norm == pytest.approx(norm, rel=1e-7)
        assert stats.clip_coefficient == pytest.approx(stats_oracle.clip_coefficient(norm, 1.0), rel=1e-6)
        assert stats.skipped is False
        assert stats.nonfinite_parameters == []
        assert stats.gradients.max_abs == stats_oracle.exact_max(grads)
        each = [own.norm for own in stats.gradients.per_gradient()]
        assert each == pytest.approx([stats_oracle.exact_norm([grad]) for grad in grads], rel=1e-7)
    gradients[0][1].fill_(math.nan)
    gradients[0][3][1, 1, 1] = -math.inf
    train(optimizer, gradients[:1])
    stats = optimizer.last_stats
    assert stats.skipped is True
    assert stats.nonfinite_parameters == ["layer.1.weight", "layer.3.weight"]
    assert stats.norm == pytest.approx(stats_oracle.exact_norm(gradients[0]), rel=1e-7)


def test_last_stats_without_clipping() -> None:
    optimizer = AdamW(make_params(), nonfinite="skip")
    gradients = make_gradients(params_of(optimizer), 1)
    train(optimizer, gradients)
    assert optimizer.last_stats.clip_coefficient == 1.0
    assert optimizer.last_stats.norm == pytest.approx(stats_oracle.exact_norm(gradients[0]), rel=1e-7)
    optimizer.nonfinite = None
    train(optimizer, gradients)
    assert optimizer.last_stats is None


def test_last_stats_tells_of_found_inf() -> None:
    optimizer = AdamW(make_params(), max_grad_norm=1.0)
    gradients = make_gradients(params_of(optimizer), 1)
    optimizer.found_inf = torch.ones(())
    train(optimizer, gradients)
    assert optimizer.last_stats.skipped
    del optimizer.found_inf
    train(optimizer, gradients)
    assert not optimizer.last_stats.skipped


def test_statistics_taken_before_the_step_are_used_once() -> None:
    optimizer = AdamW(make_params(), max_grad_norm=1.0)
    expected = AdamW(make_params(), max_grad_norm=1.0)
    first, second = make_gradients(params_of(optimizer), 2)
    set_gradients(params_of(optimizer), first)
    taken = optimizer.analyze_gradients()
    assert taken.norm == pytest.approx(stats_oracle.exact_norm(first), rel=1e-7)
    optimizer.step()
    assert_same_bits(optimizer.last_stats.gradients.report, taken.report)
    train(optimizer, [second])
    assert optimizer.last_stats.norm == pytest.approx(stats_oracle.exact_norm(second), rel=1e-7)
    train(expected, [first, second])
    assert_same_tensors(optimizer, expected)


def test_two_halves_with_merged_statistics_are_one_optimizer() -> None:
    whole = AdamW(make_params(), max_grad_norm=1.0)
    params = make_params()
    halves = [AdamW(params[:2], max_grad_norm=1.0), AdamW(params[2:], max_grad_norm=1.0)]
    for i, grads in enumerate(make_gradients(params, 10)):
        if i == 4:
            grads[3][0, 0, 0] = math.nan  # skips the half that has it not as well
        train(whole, [grads])
        set_gradients(params, grads)
        reports = [half.analyze_gradients().report for half in halves]
        stats = merge_stats(torch.stack(reports))
        for half in halves:
            half.step(stats=stats)
            assert half.last_stats.skipped == (i == 4)
            assert half.last_stats.norm == stats.norm
    for mine, other in zip(params, params_of(whole), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        assert whole.state[other]["step"].item() == 9.0
    steps = [half.state[param]["step"].item() for half in halves for param in params_of(half)]
    assert steps == [9.0] * len(params)


def test_given_statistics_that_are_not_finite() -> None:
    bad = merge_stats(torch.tensor([[1.0, 1.0, 1.0]]))
    skipping = AdamW(make_params())
    gradients = make_gradients(params_of(skipping), 2)
    train(skipping, gradients[:1])
    set_gradients(params_of(skipping), gradients[1])
    before = Snapshot(tensors_of(skipping))
    skipping.step(stats=bad)
    before.assert_unchanged()
    raising = AdamW(make_params(), nonfinite="error")
    set_gradients(params_of(raising), gradients[1])
    with pytest.raises(NonfiniteGradientError, match="in the statistics given; nothing was updated"):
        raising.step(stats=bad)


def test_given_statistics_are_used_instead_of_the_own() -> None:
    ours = AdamW(make_params(), max_grad_norm=1.0)
    plain = AdamW(make_params())
    gradients = make_gradients(params_of(ours), 1)
    set_gradients(params_of(ours), gradients[0])
    ours.step(stats=merge_stats(torch.tensor([[3.0, 4.0, 0.0]])))
    assert ours.last_stats.norm == 6.0
    train(plain, [[grad * torch.tensor(1.0 / (6.0 + 1e-6)) for grad in gradients[0]]])
    for mine, other in zip(params_of(ours), params_of(plain), strict=True):
        assert_same_bits(mine.detach(), other.detach())


# State, settings, edges.


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
def test_copies_keep_the_settings(make_copy: Any) -> None:
    settings = {"max_grad_norm": 0.7, "nonfinite": "error", "fused_step": False, "hierarchical_stats": False}
    optimizer = AdamW(grouped(make_params()), **settings)
    gradients = make_gradients(params_of(optimizer), 4)
    train(optimizer, gradients[:2])
    other = make_copy(optimizer)
    assert {name: getattr(other, name) for name in settings} == settings
    train(optimizer, gradients[2:])
    train(other, gradients[2:])
    assert_same_tensors(other, optimizer)


def test_state_dict_is_exchangeable_with_torch() -> None:
    ours = AdamW(grouped(make_params()), max_grad_norm=1.0, nonfinite="skip")
    theirs = torch.optim.AdamW(grouped(make_params()))
    gradients = make_gradients(params_of(ours), 6)
    train(ours, gradients[:3])
    train_torch(theirs, gradients[:3], 1.0)
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    assert [group.keys() for group in mine["param_groups"]] == [
        group.keys() for group in other["param_groups"]
    ]
    assert [state.keys() for state in mine["state"].values()] == [
        state.keys() for state in other["state"].values()
    ]
    file = io.BytesIO()
    torch.save(mine, file)
    file.seek(0)
    theirs.load_state_dict(torch.load(file, weights_only=True))
    ours.load_state_dict(copy.deepcopy(other))
    assert ours.max_grad_norm == 1.0
    train(ours, gradients[3:])
    train_torch(theirs, gradients[3:], 1.0)
    for a, b in zip(params_of(ours), params_of(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert ours.last_stats.clip_coefficient <= 1.0


@pytest.mark.parametrize("nonfinite", ["skip", "error"])
def test_no_gradients_no_step(nonfinite: Any) -> None:
    optimizer = AdamW(make_params(), max_grad_norm=1.0, nonfinite=nonfinite)
    before = Snapshot(params_of(optimizer))
    assert optimizer.step() is None
    assert optimizer.step(lambda: 3.0) == 3.0
    before.assert_unchanged()
    assert optimizer.last_stats is None
    assert not optimizer.state
    assert optimizer.analyze_gradients().report.tolist() == [0.0, 0.0, 0.0]


def test_some_gradients_missing_or_empty() -> None:
    params = [*make_params(), nn.Parameter(torch.empty(0, 3))]
    optimizer = AdamW(params, max_grad_norm=1.0)
    (grads,) = make_gradients(params, 1)
    set_gradients(params, [None, *grads[1:]])
    before = Snapshot(params[:1])
    optimizer.step()
    before.assert_unchanged()
    assert optimizer.last_stats.norm == pytest.approx(stats_oracle.exact_norm(grads[1:]), rel=1e-7)
    assert params[0] not in optimizer.state
    assert optimizer.state[params[-1]]["step"].item() == 0.0
    assert optimizer.state[params[1]]["step"].item() == 1.0


def test_only_empty_gradients() -> None:
    optimizer = AdamW([nn.Parameter(torch.empty(0))], max_grad_norm=1.0, nonfinite="error")
    train(optimizer, [[torch.empty(0)]])
    assert optimizer.last_stats.gradients.report.tolist() == [0.0, 0.0, 0.0]


def test_zero_gradients() -> None:
    guarded, plain = AdamW(make_params(), max_grad_norm=1.0), AdamW(make_params())
    zeros = [[torch.zeros_like(param) for param in make_params()]]
    train(guarded, zeros)
    train(plain, zeros)
    assert_same_tensors(guarded, plain)
    assert (guarded.last_stats.norm, guarded.last_stats.clip_coefficient) == (0.0, 1.0)


def test_a_closure_makes_the_gradients_that_are_clipped() -> None:
    params = make_params()
    optimizer = AdamW(params, max_grad_norm=1e-3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(param.square().sum() for param in params)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.last_stats.norm == pytest.approx(2.0 * math.sqrt(first.item()), rel=1e-5)
    assert optimizer.step(closure) < first


def test_all_groups_are_checked_before_any_is_written() -> None:
    params = make_params()
    optimizer = AdamW(grouped(params), max_grad_norm=1.0)
    gradients = make_gradients(params, 2)
    train(optimizer, gradients[:1])
    set_gradients(params, gradients[1])
    optimizer.param_groups[1]["lr"] = -1.0
    line = refuse("lr of the second group", optimizer.step, tensors_of(optimizer))
    optimizer.param_groups[1]["lr"] = 1e-3
    params[4].grad = params[4].grad[:40].expand(500, 40).reshape(-1)[:20_000].as_strided((20_000,), (0,))
    line += "\n" + refuse("a gradient of one element", optimizer.step, tensors_of(optimizer))
    assert_expected_inline(
        line,
        """\
lr of the second group: ValueError: fused_adamw::adamw_scaled, group 1: lr is -1.0; a finite number of at
    least 0 is required
a gradient of one element: ValueError: fused_adamw::adamw_scaled, group 1: grads[2] has strides (0,);
    (1,), the parameter's, are required""",
    )


def test_refused_settings() -> None:
    lines = [
        refuse(str(options), functools.partial(AdamW, make_params(), **options), [])
        for options in (
            {"max_grad_norm": -1.0},
            {"max_grad_norm": math.nan},
            {"nonfinite": "raise"},
        )
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
{'max_grad_norm': -1.0}: ValueError: fused_adamw.AdamW: max_norm is -1.0; a number of at least 0, or
    None, is required
{'max_grad_norm': nan}: ValueError: fused_adamw.AdamW: max_norm is nan; a number of at least 0, or None,
    is required
{'nonfinite': 'raise'}: ValueError: fused_adamw.AdamW: nonfinite is 'raise'; None, 'skip' or 'error' is
    required""",
    )


# The functional step.


def entries_of(
    params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[AdamWState | None] | None = None
) -> list[Entry]:
    states = [None] * len(params) if states is None else states
    return [Entry(*parts) for parts in zip([p.detach() for p in params], grads, states, strict=True)]


def tensors_of_entries(entries: Sequence[Entry]) -> list[Tensor]:
    tensors = []
    for entry in entries:
        tensors += [entry.param, entry.grad]
        if entry.state is not None:
            parts = entry.state.to_parts().values()
            tensors += [part for part in parts if isinstance(part, Tensor)]
    return tensors


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1.0, 0.0])
def test_functional_steps_are_those_of_the_optimizer(max_norm: float | None, amsgrad: bool) -> None:
    options = AdamWOptions(lr=0.01, weight_decay=0.1, amsgrad=amsgrad)
    optimizer = AdamW(
        make_params(), 0.01, weight_decay=0.1, amsgrad=amsgrad, max_grad_norm=max_norm, nonfinite="skip"
    )
    params: list[Tensor] = [param.detach() for param in make_params()]
    states: list[AdamWState | None] = [None] * len(params)
    for i, grads in enumerate(make_gradients(params, 6, torch.float16)):
        if i == 3:
            grads[4][17] = math.nan
        train(optimizer, [grads])
        entries = entries_of(params, grads, states)
        before = Snapshot(tensors_of_entries(entries))
        result = guarded_adamw_step(entries, options, guard=GradientGuardOptions(max_norm=max_norm))
        before.assert_unchanged()
        assert result.updated == (i != 3)
        assert_same_bits(result.stats.report, optimizer.last_stats.gradients.report)
        params = [update.parameters for update in result.updates]
        states = [update.state for update in result.updates]
    for param, state, theirs in zip(params, states, params_of(optimizer), strict=True):
        assert_same_bits(param, theirs.detach())
        assert state.step == optimizer.state[theirs]["step"].item() == 5
        for name, part in state.to_parts().items():
            if name != "step":
                assert_same_bits(part, optimizer.state[theirs][name])


def test_first_and_later_updates_may_be_mixed_with_empty_ones() -> None:
    params = [param.detach() for param in make_params()]
    (grads,) = make_gradients(params, 1)
    empty = torch.empty(0, 4)
    state = AdamWState(7, torch.ones_like(params[1]), torch.ones_like(params[1]))
    empty_state = AdamWState(3, empty.clone(), empty.clone())
    entries = [
        Entry(params[0], grads[0]),
        Entry(empty, empty.clone()),
        Entry(params[1], grads[1], state),
        Entry(empty, empty.clone(), empty_state),
    ]
    result = guarded_adamw_step(entries, guard=GradientGuardOptions(max_norm=1e-3))
    assert result.updated
    assert result.skip_reason is None
    assert [update.updated for update in result.updates] == [True, False, True, False]
    assert result.updates[1].parameters is empty
    assert result.updates[1].state is None
    assert result.updates[3].state is empty_state
    assert [result.updates[i].state.step for i in (0, 2)] == [1, 8]
    assert result.stats.norm == pytest.approx(stats_oracle.exact_norm(grads[:2]), rel=1e-7)
    clip = stats_oracle.clip_coefficient(result.stats.norm, 1e-3)
    expected = 0.1 * grads[0].double() * clip, 0.9 + 0.1 * grads[1].double() * clip
    found = result.updates[0].state.exp_avg, result.updates[2].state.exp_avg
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=0.0)


def assert_returned_as_given(result: Any, entries: Sequence[Entry]) -> None:
    assert not result.updated
    for update, entry in zip(result.updates, entries, strict=True):
        assert update.parameters is entry.param
        assert update.state is entry.state
        assert not update.updated


def test_skip_requested() -> None:
    params = make_params()
    entries = entries_of(params, [torch.full_like(param, math.nan) for param in params])
    before = Snapshot(tensors_of_entries(entries))
    result = guarded_adamw_step(
        entries, control=StepControl(skip_update=True), guard=GradientGuardOptions(nonfinite="error")
    )
    before.assert_unchanged()
    assert (result.skip_reason, result.stats) == ("requested", None)
    assert_returned_as_given(result, entries)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_nothing_to_update(count: int) -> None:
    entries = [Entry(torch.empty(0, i), torch.empty(0, i)) for i in range(count)]
    result = guarded_adamw_step(entries, guard=GradientGuardOptions(max_norm=1.0))
    assert (result.skip_reason, result.stats) == ("empty", None)
    assert len(result.updates) == count
    assert_returned_as_given(result, entries)


@pytest.mark.parametrize("value", SPECIALS)
def test_not_finite(value: float) -> None:
    params = make_params()
    (grads,) = make_gradients(params, 1)
    grads[2][5] = value
    grads[3][0, 0, 0] = value
    entries = entries_of(params, grads)
    before = Snapshot(tensors_of_entries(entries))
    result = guarded_adamw_step(entries)
    assert result.skip_reason == "nonfinite"
    assert result.stats.nonfinite_gradients() == [2, 3]
    assert_returned_as_given(result, entries)
    with pytest.raises(NonfiniteGradientError) as caught:
        guarded_adamw_step(entries, guard=GradientGuardOptions(nonfinite="error"))
    before.assert_unchanged()
    assert_expected_inline(
        str(caught.value),
        """fused_adamw.guarded_adamw_step: NaN or infinity in grads[2], grads[3]; nothing was updated""",
    )


def test_unscaling_comes_before_the_check_and_the_norm() -> None:
    params = [param.detach() for param in make_params()]
    (grads,) = make_gradients(params, 1)
    entries = entries_of(params, [grad * 1024 for grad in grads])
    guard = GradientGuardOptions(max_norm=0.05)
    scaled = guarded_adamw_step(entries, control=StepControl(gradient_scale=1024.0), guard=guard)
    plain = guarded_adamw_step(entries_of(params, grads), guard=guard)
    assert scaled.stats.norm == plain.stats.norm > 0.05
    for a, b in zip(scaled.updates, plain.updates, strict=True):
        assert_same_bits(a.parameters, b.parameters)
    tiny = guarded_adamw_step(entries, control=StepControl(gradient_scale=2.0**-127), guard=guard)
    assert tiny.skip_reason == "nonfinite"


def test_epsilon() -> None:
    params = [torch.ones(4)]
    entries = entries_of(params, [torch.full((4,), 0.5)])
    result = guarded_adamw_step(entries, guard=GradientGuardOptions(max_norm=1.0, epsilon=1.0))
    # The norm is 1, the coefficient 1/2, and the first moment 0.1 of half of 0.5.
    torch.testing.assert_close(result.updates[0].state.exp_avg, torch.full((4,), 0.025))


def test_results_share_no_memory_with_the_inputs() -> None:
    params = [param.detach() for param in make_params()]
    (grads,) = make_gradients(params, 1)
    result = guarded_adamw_step(entries_of(params, grads))
    given = {tensor.data_ptr() for tensor in [*params, *grads]}
    for update in result.updates:
        assert update.parameters.data_ptr() not in given
        assert update.state.exp_avg.data_ptr() not in given


def test_plain_tuples_are_entries() -> None:
    param, grad = torch.ones(3), torch.ones(3)
    expected = guarded_adamw_step([Entry(param, grad)]).updates[0]
    assert_same_bits(guarded_adamw_step([(param, grad)]).updates[0].parameters, expected.parameters)
    assert_same_bits(guarded_adamw_step([(param, grad, None)]).updates[0].parameters, expected.parameters)


def test_all_entries_are_validated_first() -> None:
    good = Entry(torch.ones(3), torch.full((3,), math.nan))

    def state(**parts: Any) -> AdamWState:
        return AdamWState(**{"step": 1, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3), **parts})

    cases: dict[str, tuple[Entry, dict[str, Any]]] = {
        "param float64": (Entry(torch.ones(3).double(), torch.ones(3)), {}),
        "grad shape": (Entry(torch.ones(3), torch.ones(4)), {}),
        "grad strides": (Entry(torch.ones(2, 3), torch.ones(3, 2).t()), {}),
        "exp_avg dtype": (Entry(*good[:2], state(exp_avg=torch.ones(3).half())), {}),
        "step": (Entry(*good[:2], state(step=-1)), {}),
        "amsgrad": (Entry(*good[:2], state()), {"options": AdamWOptions(amsgrad=True)}),
        "lr": (good, {"options": AdamWOptions(lr=-1.0)}),
        "scale": (good, {"control": StepControl(gradient_scale=0.0)}),
        "max_norm": (good, {"guard": GradientGuardOptions(max_norm=-1.0)}),
        "epsilon": (good, {"guard": GradientGuardOptions(max_norm=1.0, epsilon=math.nan)}),
        "nonfinite": (good, {"guard": GradientGuardOptions(nonfinite="raise")}),
        "requires grad": (Entry(torch.ones(3, requires_grad=True), torch.ones(3)), {}),
    }
    lines = []
    for name, (bad, options) in cases.items():
        for control in ({}, {"control": StepControl(skip_update=True)}):
            entries = [good, bad]
            call = functools.partial(guarded_adamw_step, entries, **{**control, **options})
            line = refuse(name, call, tensors_of_entries(entries))
        lines.append(line)
    assert_expected_inline(
        "\n".join(lines),
        """\
param float64: TypeError: fused_adamw::step: param has dtype torch.float64; torch.float32, torch.float16
    or torch.bfloat16 is required
grad shape: ValueError: fused_adamw::step: grad has shape (4,); (3,), the parameter's, is required
grad strides: ValueError: fused_adamw::step: grad has strides (1, 2); (3, 1), the parameter's, are
    required
exp_avg dtype: TypeError: fused_adamw::step: exp_avg has dtype torch.float16; torch.float32 is required
step: ValueError: fused_adamw::step: step is -1; a whole number of at least 0 and below 2^63 - 1 is
    required
amsgrad: ValueError: fused_adamw::step: exp_avg, exp_avg_sq given without max_exp_avg_sq; all of the
    state, or None for all before the first update, is required
lr: ValueError: fused_adamw::step: lr is -1.0; a finite number of at least 0 is required
scale: ValueError: fused_adamw::step: grad_scale is 0.0; a positive finite number whose reciprocal is
    finite in float32 is required
max_norm: ValueError: fused_adamw.guarded_adamw_step: max_norm is -1.0; a number of at least 0, or None,
    is required
epsilon: ValueError: fused_adamw.guarded_adamw_step: epsilon is nan; a finite number of at least 0 is
    required
nonfinite: ValueError: fused_adamw.guarded_adamw_step: nonfinite is 'raise'; 'skip' or 'error' is
    required
requires grad: RuntimeError: fused_adamw::step has no derivative, by design, and param requires grad;
    call it under torch.no_grad(), or pass detached tensors""",
    )


def test_a_compiler_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(RuntimeError) as caught:
        guarded_adamw_step([Entry(torch.ones(3), torch.ones(3))])
    assert_expected_inline(
        str(caught.value).replace("; ", ";\n").replace(", which", ",\nwhich"),
        """\
guarded_adamw_step reads the report of its gradients on the host,
which a traced program or a CUDA graph cannot do;
use fused_adamw.AdamW or torch.ops.fused_adamw.adamw_scaled there""",
    )
