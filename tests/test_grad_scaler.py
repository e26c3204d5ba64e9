"""``torch.amp.GradScaler`` and ``fused_adamw.GradScaler`` with the optimizer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused_adamw
from cases import Snapshot, assert_same_bits
from fused_adamw import AdamW, NonfiniteGradientError
from fused_adamw.torch_library import analyze_gradient
from oracle import gradient_stats as stats_oracle

SHAPES = ((50, 7), (), (300,), (20_000,))

Scaler = Callable[..., torch.amp.GradScaler]


def torch_scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **options)


def own_scaler(**options: Any) -> torch.amp.GradScaler:
    return fused_adamw.GradScaler("cpu", **options)


both_scalers = pytest.mark.parametrize("make_scaler", [torch_scaler, own_scaler], ids=["torch", "own"])


@pytest.fixture(autouse=True)
def one_thread(set_threads: Callable[[int], None]) -> None:
    """Thousands of small steps: waking a second thread on a busy machine costs more than all else."""
    set_threads(1)


def make_params(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def make_gradients(steps: int, seed: int = 1) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[0.01 * torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(steps)]


def set_gradients(params: Sequence[Tensor], grads: Sequence[Tensor], scale: float = 1.0) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad * scale


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def started(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """The scaler with its scale on the device, as the first loss puts it there."""
    scaler.scale(torch.zeros(()))
    return scaler


def scaled_step(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    grads: Sequence[Tensor],
    *,
    unscale: bool = False,
) -> None:
    """One step with gradients as a scaled loss would have made them."""
    set_gradients(params_of(optimizer), grads, scaler.get_scale())
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors: list[Tensor] = []
    for param in params_of(optimizer):
        state = optimizer.state.get(param, {})
        tensors += [param, *(state[name] for name in sorted(state))]
    return tensors


def assert_same_tensors(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    for i, (a, b) in enumerate(zip(tensors_of(found), tensors_of(expected), strict=True)):
        assert_same_bits(a.detach(), b.detach(), f"tensor {i}")


def with_overflows(gradients: list[list[Tensor]], steps: Sequence[int]) -> list[list[Tensor]]:
    for i, step in enumerate(steps):
        gradients[step][i % len(SHAPES)].fill_((math.inf, math.nan, -math.inf)[i % 3])
    return gradients


@both_scalers
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_training_is_that_of_torch(make_scaler: Scaler, max_grad_norm: float | None) -> None:
    """The same scales and skips as torch's optimizer with torch's scaler, over growth and backoff."""
    ours = AdamW(make_params(), lr=0.01, max_grad_norm=max_grad_norm)
    theirs = torch.optim.AdamW(make_params(), lr=0.01)
    options = {"init_scale": 3000.0, "growth_interval": 4}
    our_scaler, their_scaler = started(make_scaler(**options)), started(torch_scaler(**options))
    scales = []
    for grads in with_overflows(make_gradients(30), (0, 7, 8, 20)):
        scaled_step(our_scaler, ours, grads)
        set_gradients(params_of(theirs), grads, their_scaler.get_scale())
        their_scaler.unscale_(theirs)
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(params_of(theirs), max_grad_norm)
        their_scaler.step(theirs)
        their_scaler.update()
        assert our_scaler.get_scale() == their_scaler.get_scale()
        scales.append(our_scaler.get_scale())
    assert scales[0] == 1500.0
    assert {750.0, 1500.0, 3000.0, 6000.0} <= set(scales)
    for mine, other in zip(params_of(ours), params_of(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
        assert ours.state[mine]["step"].item() == theirs.state[other]["step"].item() == 26.0


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_both_scalers_give_the_same_bits(max_grad_norm: float | None) -> None:
    optimizers = [AdamW(make_params(), max_grad_norm=max_grad_norm) for _ in range(2)]
    options = {"init_scale": 3000.0, "growth_interval": 4}
    scalers = [started(own_scaler(**options)), started(torch_scaler(**options))]
    for grads in with_overflows(make_gradients(30), (0, 7, 8, 20)):
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaled_step(scaler, optimizer, grads)
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert_same_tensors(*optimizers)


@both_scalers
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_unscaling_before_the_step_gives_the_same_bits(
    make_scaler: Scaler, max_grad_norm: float | None
) -> None:
    implicit, explicit = (AdamW(make_params(), max_grad_norm=max_grad_norm) for _ in range(2))
    scalers = [started(make_scaler(init_scale=3000.0, growth_interval=4)) for _ in range(2)]
    for grads in with_overflows(make_gradients(12), (1, 6)):
        scaled_step(scalers[0], implicit, grads)
        scaled_step(scalers[1], explicit, grads, unscale=True)
        assert_same_tensors(implicit, explicit)
    assert scalers[0].state_dict() == scalers[1].state_dict()


@both_scalers
def test_overflow_leaves_all_as_it_is_and_lowers_the_scale(make_scaler: Scaler) -> None:
    for max_grad_norm in (None, 0.5):
        optimizer = AdamW(make_params(), amsgrad=True, max_grad_norm=max_grad_norm)
        scaler = started(make_scaler(init_scale=1024.0))
        good, bad = with_overflows(make_gradients(2), (1,))
        scaled_step(scaler, optimizer, good)
        before = Snapshot(tensors_of(optimizer))
        scaled_step(scaler, optimizer, bad)
        before.assert_unchanged()
        assert scaler.get_scale() == 512.0
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        scaled_step(scaler, optimizer, good)
        assert scaler.get_scale() == 512.0
        assert {state["step"].item() for state in optimizer.state.values()} == {2.0}


@both_scalers
def test_overflow_in_the_first_step(make_scaler: Scaler) -> None:
    optimizer, fresh = AdamW(make_params()), AdamW(make_params())
    scaler = started(make_scaler(init_scale=1024.0))
    bad, good = with_overflows(make_gradients(2), (0,))
    scaled_step(scaler, optimizer, bad)
    scaled_step(scaler, optimizer, good)
    set_gradients(params_of(fresh), good)
    fresh.step()
    assert_same_tensors(optimizer, fresh)


@both_scalers
def test_half_gradients(make_scaler: Scaler) -> None:
    """float16 holds 65,504 at most: a scale of 2^14 overflows what 2^10 does not."""
    optimizer, plain = (AdamW([nn.Parameter(torch.ones(40))]) for _ in range(2))
    grad = torch.linspace(-8.0, 8.0, 40)
    scaler = started(make_scaler(init_scale=2.0**14))
    scales = []
    for _ in range(6):
        (param,) = params_of(optimizer)
        param.grad_dtype = None
        param.grad = (grad * scaler.get_scale()).half()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [2.0**13, 2.0**12] + [2.0**12] * 4
    (param,) = params_of(plain)
    for _ in range(4):
        param.grad = (grad * 2.0**12).half().float() / 2.0**12
        plain.step()
    assert_same_tensors(optimizer, plain)


@both_scalers
def test_norms_are_in_unscaled_units(make_scaler: Scaler) -> None:
    optimizer = AdamW(make_params(), max_grad_norm=0.5)
    scaler = started(make_scaler(init_scale=3000.0))
    (grads,) = make_gradients(1)
    norm = stats_oracle.exact_norm(grads)
    assert norm > 0.5
    for unscale in (False, True):
        scaled_step(scaler, optimizer, grads, unscale=unscale)
        assert optimizer.last_stats.norm == pytest.approx(norm, rel=1e-6)
        assert optimizer.last_stats.clip_coefficient == pytest.approx(0.5 / norm, rel=1e-5)


@both_scalers
def test_passes_of_their_own(make_scaler: Scaler) -> None:
    """fused_step=False lets the scaler unscale the gradients first, whichever scaler it is."""
    fused = AdamW(make_params(), max_grad_norm=0.5)
    apart = AdamW(make_params(), max_grad_norm=0.5, fused_step=False)
    scalers = [started(make_scaler(init_scale=1024.0, growth_interval=4)) for _ in range(2)]
    for grads in with_overflows(make_gradients(10), (2,)):
        scaled_step(scalers[0], fused, grads)
        scaled_step(scalers[1], apart, grads)
    assert scalers[0].state_dict() == scalers[1].state_dict()
    clip = stats_oracle.clip_coefficient(stats_oracle.exact_norm(grads), 0.5)
    for param, grad in zip(params_of(apart), grads, strict=True):
        torch.testing.assert_close(param.grad, grad * clip, rtol=1e-5, atol=0.0)
    for mine, other in zip(params_of(fused), params_of(apart), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_own_scaler_reads_each_gradient_once_and_writes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    update = analyze_gradient.update

    def spy(grads: list[Tensor], *arguments: Any) -> None:
        calls.append(len(grads))
        update(grads, *arguments)

    monkeypatch.setattr(analyze_gradient, "update", spy)
    for max_grad_norm in (None, 0.5):
        optimizer = AdamW(make_params(), max_grad_norm=max_grad_norm)
        scaler = started(own_scaler(init_scale=3000.0))
        for grads in with_overflows(make_gradients(2), (1,)):
            set_gradients(params_of(optimizer), grads, scaler.get_scale())
            before = Snapshot([param.grad for param in params_of(optimizer)])
            scaler.step(optimizer)
            before.assert_unchanged()
            scaler.update()
    assert calls == [len(SHAPES)] * 4


def test_scalers_exchange_their_state() -> None:
    optimizer = AdamW(make_params())
    gradients = with_overflows(make_gradients(5), (2,))
    ours, theirs = (started(make(init_scale=512.0, growth_interval=3)) for make in (own_scaler, torch_scaler))
    for grads in gradients:
        scaled_step(ours, optimizer, grads)
    state = ours.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    assert state != theirs.state_dict()
    theirs.load_state_dict(copy.deepcopy(state))
    assert theirs.state_dict() == state
    restored = own_scaler()
    restored.load_state_dict(theirs.state_dict())
    assert restored.state_dict() == state


def test_own_scaler_serves_other_optimizers_as_torch_does() -> None:
    results = []
    for make_scaler in (own_scaler, torch_scaler):
        optimizers = [torch.optim.SGD(make_params(), lr=0.1), torch.optim.AdamW(make_params(), fused=True)]
        for optimizer in optimizers:
            scaler = started(make_scaler(init_scale=1024.0, growth_interval=3))
            for grads in with_overflows(make_gradients(8), (4,)):
                scaled_step(scaler, optimizer, grads)
        results.append([optimizers, scaler.state_dict()])
    for ours, theirs in zip(results[0][0], results[1][0], strict=True):
        assert_same_tensors(ours, theirs)
    assert results[0][1] == results[1][1]


@both_scalers
def test_two_optimizers_under_one_scaler(make_scaler: Scaler) -> None:
    """Each skips by its own gradients; the scale goes down for both."""
    first, second = AdamW(make_params()), torch.optim.SGD(make_params(), lr=0.1)
    scaler = started(make_scaler(init_scale=1024.0))
    good, bad = with_overflows(make_gradients(2), (1,))
    for optimizer, grads in ((first, bad), (second, good)):
        set_gradients(params_of(optimizer), grads, scaler.get_scale())
    before = Snapshot(params_of(first))
    changed = [param.detach().clone() for param in params_of(second)]
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    before.assert_unchanged()
    assert all(not torch.equal(a, b) for a, b in zip(params_of(second), changed, strict=True))
    assert scaler.get_scale() == 512.0


@both_scalers
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_scale_that_the_user_set_is_multiplied_in(
    make_scaler: Scaler, unscale: bool, max_grad_norm: float | None
) -> None:
    optimizer, plain = (AdamW(make_params(), max_grad_norm=max_grad_norm) for _ in range(2))
    scaler = started(make_scaler(init_scale=1024.0))
    for grads in make_gradients(3):
        optimizer.grad_scale = torch.tensor(8.0)
        scaled_step(scaler, optimizer, [8.0 * grad for grad in grads], unscale=unscale)
        set_gradients(params_of(plain), grads)
        plain.step()
    assert_same_tensors(optimizer, plain)
    if max_grad_norm is not None:
        assert optimizer.last_stats.norm == plain.last_stats.norm


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scale_and_flag_may_be_set_by_hand(shape: tuple[int, ...]) -> None:
    for max_grad_norm in (None, 0.5):
        optimizer, plain = (AdamW(make_params(), max_grad_norm=max_grad_norm) for _ in range(2))
        (grads,) = make_gradients(1)
        set_gradients(params_of(optimizer), grads, 8.0)
        optimizer.grad_scale = torch.full(shape, 8.0)
        optimizer.found_inf = torch.ones(shape)
        before = Snapshot(params_of(optimizer))
        optimizer.step()
        before.assert_unchanged()
        optimizer.found_inf = torch.zeros(shape)
        optimizer.step()
        set_gradients(params_of(plain), grads)
        plain.step()
        assert_same_tensors(optimizer, plain)


@both_scalers
def test_disabled(make_scaler: Scaler) -> None:
    optimizer, plain = (AdamW(make_params(), max_grad_norm=0.5) for _ in range(2))
    scaler = make_scaler(enabled=False)
    for grads in with_overflows(make_gradients(3), (1,)):
        set_gradients(params_of(optimizer), grads)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        set_gradients(params_of(plain), grads)
        plain.step()
    assert_same_tensors(optimizer, plain)
    assert scaler.get_scale() == 1.0


@both_scalers
def test_a_real_loss(make_scaler: Scaler) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    twin = copy.deepcopy(model)
    ours, plain = AdamW(model.parameters(), max_grad_norm=0.1), AdamW(twin.parameters(), max_grad_norm=0.1)
    scaler = make_scaler(init_scale=2.0**16)
    for _ in range(5):
        x = torch.randn(3, 8)
        ours.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(ours)
        scaler.update()
        plain.zero_grad()
        twin(x).square().mean().backward()
        plain.step()
    assert scaler.get_scale() == 2.0**16
    assert_same_tensors(ours, plain)


@both_scalers
def test_twice_without_update_is_refused_as_by_torch(make_scaler: Scaler) -> None:
    optimizer = AdamW(make_params())
    scaler = started(make_scaler())
    set_gradients(params_of(optimizer), make_gradients(1)[0])
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: 0.0)


@both_scalers
def test_explicit_unscaling_of_half_gradients_is_refused_as_by_torch(make_scaler: Scaler) -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(4))])
    (param,) = params_of(optimizer)
    param.grad_dtype = None
    param.grad = torch.ones(4, dtype=torch.float16)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        started(make_scaler()).unscale_(optimizer)


@both_scalers
def test_an_error_asked_for_is_raised_by_the_step_of_the_scaler_too(make_scaler: Scaler) -> None:
    optimizer = AdamW(make_params(), nonfinite="error")
    scaler = started(make_scaler())
    (bad,) = with_overflows(make_gradients(1), (0,))
    set_gradients(params_of(optimizer), bad, scaler.get_scale())
    before = Snapshot(params_of(optimizer))
    with pytest.raises(NonfiniteGradientError):
        scaler.step(optimizer)
    before.assert_unchanged()


def test_schedulers_see_the_steps() -> None:
    """A scheduler of torch counts on the optimizer's step being called."""
    optimizer = AdamW(make_params(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = started(own_scaler())
    for grads in make_gradients(3):
        scaled_step(scaler, optimizer, grads)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125
