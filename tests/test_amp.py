"""``AdamW`` under ``torch.amp.GradScaler``, and the attributes that a scaler sets.

``test_grad_scaler.py`` is about this package's own scaler and about clipping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fused_adamw
from cases import Snapshot
from training import (
    assert_all_same_bits,
    make_gradients,
    make_params,
    params_of,
    refusal,
    set_gradients,
    tensors_of,
    train,
)

SCALE = 1024.0  # a power of two: scaling is exact, so that all ways must give the same bits


def make_scaler(growth_interval: int = 1000) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=growth_interval)
    scaler.scale(torch.zeros(()))  # makes the scale, as the first loss does
    return scaler


def plain_run(gradients: list[list[Tensor]], **options: Any) -> list[Tensor]:
    """Training without a scaler."""
    optimizer = fused_adamw.AdamW(make_params(), **options)
    train(optimizer, gradients)
    return tensors_of(optimizer)


def scaled(grads: list[Tensor], scale: float = SCALE) -> list[Tensor]:
    return [grad * scale for grad in grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}], ids=["default", "amsgrad"])
def test_the_scale_is_divided_out(options: dict[str, Any], dtype: torch.dtype) -> None:
    optimizer = fused_adamw.AdamW(make_params(), **options)
    scaler = make_scaler()
    gradients = [[g.clamp(-8, 8).to(dtype) for g in grads] for grads in make_gradients(make_params(), 4)]
    for grads in gradients:
        set_gradients(params_of(optimizer), scaled(grads))
        scaler.step(optimizer)
        scaler.update()
        # Divided out in the step, not in memory.
        assert all(torch.equal(p.grad, g) for p, g in zip(params_of(optimizer), scaled(grads), strict=True))
    assert_all_same_bits(tensors_of(optimizer), plain_run(gradients, **options))
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_an_explicit_unscale_is_not_repeated() -> None:
    optimizer = fused_adamw.AdamW(make_params())
    scaler = make_scaler()
    gradients = make_gradients(make_params(), 4)
    for step, grads in enumerate(gradients):
        set_gradients(params_of(optimizer), scaled(grads))
        if step % 2 == 0:
            scaler.unscale_(optimizer)
            assert all(torch.equal(p.grad, g) for p, g in zip(params_of(optimizer), grads, strict=True))
        scaler.step(optimizer)
        scaler.update()
    assert_all_same_bits(tensors_of(optimizer), plain_run(gradients))


@pytest.mark.parametrize("explicit", [False, True], ids=["implicit", "explicit"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")], ids=str)
def test_an_overflow_skips_the_step(bad: float, explicit: bool) -> None:
    """At first and later; the steps around it are those of training without it."""
    optimizer = fused_adamw.AdamW(make_params(), amsgrad=True)
    scaler = make_scaler()
    gradients = make_gradients(make_params(), 4)
    for step, grads in enumerate(gradients):
        overflow = step in (0, 2)
        set_gradients(params_of(optimizer), scaled(grads, scaler.get_scale()))
        if overflow:
            params_of(optimizer)[2].grad[5] = bad
        before, scale = Snapshot(tensors_of(optimizer)), scaler.get_scale()
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (scale / 2 if overflow else scale)
        if overflow:
            before.assert_unchanged()
        assert optimizer.state[params_of(optimizer)[0]]["step"] == (0, 1, 1, 2)[step]
    assert_all_same_bits(tensors_of(optimizer), plain_run(gradients[1::2], amsgrad=True))


def test_the_scale_grows_after_steps_without_overflow() -> None:
    optimizer = fused_adamw.AdamW(make_params())
    scaler = make_scaler(growth_interval=2)
    scales = []
    for grads in make_gradients(make_params(), 4):
        set_gradients(params_of(optimizer), grads)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [SCALE, 2 * SCALE, 2 * SCALE, 4 * SCALE]


def test_a_scale_that_the_user_set_is_divided_out_too() -> None:
    optimizer = fused_adamw.AdamW(make_params())
    scaler = make_scaler()
    gradients = make_gradients(make_params(), 3)
    for grads in gradients:
        set_gradients(params_of(optimizer), scaled(grads, 8.0 * SCALE))
        optimizer.grad_scale = torch.tensor(8.0)
        scaler.step(optimizer)
        scaler.update()
    assert_all_same_bits(tensors_of(optimizer), plain_run(gradients))


def test_one_scaler_for_two_optimizers() -> None:
    """One overflows, the other does not."""
    first, second = (fused_adamw.AdamW(make_params()) for _ in range(2))
    scaler = make_scaler()
    [grads] = make_gradients(make_params(), 1)
    for optimizer in (first, second):
        set_gradients(params_of(optimizer), scaled(grads))
    params_of(second)[0].grad[0] = float("inf")
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2
    assert_all_same_bits(tensors_of(first), plain_run([grads]))
    assert_all_same_bits(params_of(second), make_params())


def test_a_disabled_scaler_only_steps() -> None:
    optimizer = fused_adamw.AdamW(make_params())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    [grads] = make_gradients(make_params(), 1)
    set_gradients(params_of(optimizer), grads)
    scaler.step(optimizer)
    scaler.update()
    assert_all_same_bits(tensors_of(optimizer), plain_run([grads]))


def test_parameters_without_gradients() -> None:
    optimizer = fused_adamw.AdamW(make_params())
    scaler = make_scaler()
    [grads] = make_gradients(make_params(), 1)
    some = [grad if i % 2 else None for i, grad in enumerate(grads)]
    set_gradients(params_of(optimizer), [None if g is None else g * SCALE for g in some])
    scaler.step(optimizer)
    assert_all_same_bits(tensors_of(optimizer), plain_run([some]))


def test_without_any_gradient() -> None:
    optimizer = fused_adamw.AdamW(make_params())
    make_scaler().step(optimizer)
    assert not optimizer.state


def test_an_optimizer_that_does_not_unscale_itself() -> None:
    """``fused_step=False``: the scaler unscales in memory, in a pass of its own."""
    optimizer = fused_adamw.AdamW(make_params(), fused_step=False)
    scaler = make_scaler()
    gradients = make_gradients(make_params(), 2)
    for grads in gradients:
        set_gradients(params_of(optimizer), scaled(grads))
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(p.grad, g) for p, g in zip(params_of(optimizer), grads, strict=True))
    assert_all_same_bits(tensors_of(optimizer), plain_run(gradients))


# --- the attributes that a scaler sets ----------------------------------------------------------------------

FOUND_INF_FORMS: dict[str, Callable[[float], Tensor]] = {
    "float32": torch.tensor,
    "shape (1,)": lambda found: torch.tensor([found]),
    "float64": lambda found: torch.tensor(found, dtype=torch.float64),
    "bool": lambda found: torch.tensor(found > 0),
}


@pytest.mark.parametrize("form", FOUND_INF_FORMS)
def test_found_inf_is_honoured_without_a_scale(form: str) -> None:
    optimizer = fused_adamw.AdamW(make_params())
    gradients = make_gradients(make_params(), 2)
    optimizer.grad_scale = None
    optimizer.found_inf = FOUND_INF_FORMS[form](1.0)
    train(optimizer, gradients[:1])
    assert_all_same_bits(params_of(optimizer), make_params())
    optimizer.found_inf = FOUND_INF_FORMS[form](0.0)
    train(optimizer, gradients[1:])
    assert_all_same_bits(tensors_of(optimizer), plain_run(gradients[1:]))


@pytest.mark.parametrize(
    "scale",
    [8.0, torch.tensor(8.0), torch.tensor([8.0]), torch.tensor(8.0, dtype=torch.float64)],
    ids=["float", "float32", "shape (1,)", "float64"],
)
def test_a_scale_is_honoured_without_found_inf(scale: Any) -> None:
    optimizer = fused_adamw.AdamW(make_params())
    gradients = make_gradients(make_params(), 2)
    optimizer.grad_scale = scale
    train(optimizer, [scaled(grads, 8.0) for grads in gradients])
    assert_all_same_bits(tensors_of(optimizer), plain_run(gradients))


def test_scales_that_cannot_be_divided_out_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"grad_scale": torch.tensor(0.0)},
        {"grad_scale": torch.tensor(-1.0)},
        {"grad_scale": torch.tensor(float("inf"))},
        {"grad_scale": torch.tensor(float("nan"))},
        {"grad_scale": torch.tensor([1.0, 2.0])},
        {"grad_scale": torch.tensor(2)},
        {"grad_scale": torch.tensor(2.0, device="meta")},
        {"found_inf": torch.tensor([0.0, 1.0])},
        {"found_inf": torch.tensor(1.0, device="meta")},
    ]
    messages = []
    for attributes in wrong:
        optimizer = fused_adamw.AdamW(make_params())
        train(optimizer, make_gradients(make_params(), 1))
        vars(optimizer).update(attributes)
        before = Snapshot(tensors_of(optimizer))
        messages.append(refusal(optimizer.step))
        before.assert_unchanged()
    assert_expected_inline(
        "\n".join(messages),
        """\
ValueError: fused_adamw::step_: grad_scale is 0.0; a positive finite number whose reciprocal is
finite in float32 is required
ValueError: fused_adamw::step_: grad_scale is -1.0; a positive finite number whose reciprocal is
finite in float32 is required
ValueError: fused_adamw::step_: grad_scale is inf; a positive finite number whose reciprocal is
finite in float32 is required
ValueError: fused_adamw::step_: grad_scale is nan; a positive finite number whose reciprocal is
finite in float32 is required
ValueError: fused_adamw::step_: grad_scale has shape (2,); shape () or (1,) is required
TypeError: fused_adamw::step_: grad_scale has dtype torch.int64; torch.float32 or torch.float64 is
required
ValueError: fused_adamw::step_: grad_scale is on meta; cpu, where the parameters are, is required
ValueError: fused_adamw::step_: found_inf has shape (2,); shape () or (1,) is required
ValueError: fused_adamw::step_: found_inf is on meta; cpu, where the parameters are, is required""",
    )


# --- a training loop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [False, True], ids=["implicit", "explicit"])
def test_a_loop_with_autocast_agrees_with_torch(explicit: bool) -> None:
    """With clipping in between where the gradients are unscaled; the first steps overflow."""

    def run(optimizer_type: type) -> tuple[list[Tensor], list[float]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = optimizer_type(model.parameters(), lr=0.01)
        data = torch.randn(32, 6)
        scales = []
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (model(data).float() - data.sum(1, keepdim=True)).square().mean()
            scaler.scale(loss).backward()
            if explicit:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return [param.detach() for param in model.parameters()], scales

    ours, our_scales = run(fused_adamw.AdamW)
    torchs, torch_scales = run(torch.optim.AdamW)
    assert our_scales == torch_scales
    assert our_scales[0] < 2.0**20  # overflows to begin with
    assert our_scales[-2] == our_scales[-1]  # and none in the end
    torch.testing.assert_close(ours, torchs, rtol=1e-3, atol=1e-4)
