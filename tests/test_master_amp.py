"""16-bit models under autocast, with ``torch.amp.GradScaler`` and ``fused_adamw.GradScaler``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused_adamw
from cases import Snapshot
from master_weights import (
    FORMS,
    all_forms,
    as_params,
    assert_masters_are,
    float32_twin,
    gradients_for,
    master_optimizer,
    masters_of,
)
from training import assert_all_same_bits, params_of, set_gradients, tensors_of, train

SCALE = 1024.0  # a power of two, so that scaling is exact

both_scalers = pytest.mark.parametrize(
    "make_scaler", [torch.amp.GradScaler, fused_adamw.GradScaler], ids=["torch", "own"]
)

Scaler = Callable[..., torch.amp.GradScaler]


def started(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """The scaler with its scale on the device, as the first loss puts it there."""
    scaler.scale(torch.zeros(()))
    return scaler


def train_model(
    form: str, make_scaler: Scaler, steps: int, overflows: tuple[int, ...], **options: Any
) -> tuple[fused_adamw.AdamW, list[list[Tensor]], list[float], list[float]]:
    """The optimizer of a 16-bit model, the unscaled gradients of its steps, the scales and the losses."""
    dtype, own = FORMS[form]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    optimizer = fused_adamw.AdamW(model.parameters(), lr=0.02, **own, **options)
    scaler = make_scaler("cpu", init_scale=SCALE, growth_interval=4)
    data = torch.randn(64, 6)
    gradients, scales, losses = [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = (model(data).float() - data.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        losses.append(loss.item())
        scale = scaler.get_scale()
        scales.append(scale)
        if step in overflows:
            params_of(optimizer)[2].grad[0, step] = (math.inf, -math.inf, math.nan)[step % 3]
            before = Snapshot(tensors_of(optimizer))
        else:
            gradients.append([param.grad.float() / scale for param in params_of(optimizer)])
        scaler.step(optimizer)
        scaler.update()
        if step in overflows:
            before.assert_unchanged()
            assert scaler.get_scale() == scale / 2
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    return optimizer, gradients, scales, losses


@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True, "max_grad_norm": 0.5}], ids=["default", "clipping"]
)
@both_scalers
@all_forms
def test_autocast_training_has_the_masters_of_float32_training(
    form: str, make_scaler: Scaler, options: dict[str, Any]
) -> None:
    """On the gradients that the 16-bit model made; steps that overflow are as if they had never been."""
    optimizer, gradients, scales, losses = train_model(form, make_scaler, 14, (1, 2, 7), **options)
    assert {SCALE, SCALE / 2, SCALE / 4} <= set(scales)
    assert len(gradients) == 11
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(FORMS[form][0])
    twin = float32_twin(list(model.parameters()), lr=0.02, **options)
    train(twin, gradients)
    assert_masters_are(optimizer, twin)
    assert losses[-1] < 0.9 * losses[0]

    by_hand = float32_twin(list(model.parameters()), torch.optim.AdamW, lr=0.02, amsgrad="amsgrad" in options)
    for grads in gradients:
        set_gradients(params_of(by_hand), grads)
        if "max_grad_norm" in options:
            torch.nn.utils.clip_grad_norm_(params_of(by_hand), options["max_grad_norm"])
        by_hand.step()
    torch.testing.assert_close(
        masters_of(optimizer), [p.detach() for p in params_of(by_hand)], rtol=1e-5, atol=1e-5
    )


@both_scalers
@all_forms
def test_a_step_that_overflows_uses_no_random_bits(form: str, make_scaler: Scaler) -> None:
    """The first one included: the parameters, too, are those of training without it."""
    optimizer, without = master_optimizer(form), master_optimizer(form)
    scaler = started(make_scaler("cpu", init_scale=SCALE))
    gradients = gradients_for(params_of(optimizer), 5, torch.float32)
    for step, grads in enumerate(gradients):
        scale = scaler.get_scale()
        set_gradients(params_of(optimizer), [grad * scale for grad in grads])
        if step in (0, 3):
            params_of(optimizer)[0].grad[1, 1] = math.inf
        else:
            train(without, [grads])
        scaler.step(optimizer)
        scaler.update()
    assert_all_same_bits(tensors_of(optimizer), tensors_of(without))
    assert scaler.get_scale() == SCALE / 4


@pytest.mark.parametrize("form", ["fp16", "fp16 by chance"])
@both_scalers
def test_a_scale_too_large_for_float16_is_found(form: str, make_scaler: Scaler) -> None:
    """float16 holds 65,504 at most: gradients of 8 overflow under 2^14 and 2^13, not under 2^12."""
    dtype, own = FORMS[form]
    params = as_params([torch.linspace(-8.0, 8.0, 40)], dtype)
    optimizer, twin = fused_adamw.AdamW(params, **own), float32_twin(params)
    scaler = started(make_scaler("cpu", init_scale=2.0**14))
    scales = []
    for _ in range(5):
        optimizer.zero_grad()
        scaler.scale((params[0] * torch.linspace(-8.0, 8.0, 40).half()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [2.0**13, 2.0**12, 2.0**12, 2.0**12, 2.0**12]
    gradient = (torch.linspace(-8.0, 8.0, 40).half().double() * 2.0**12).half().float() / 2.0**12
    train(twin, [[gradient]] * 3)
    assert_masters_are(optimizer, twin)


@both_scalers
@pytest.mark.parametrize("form", [form for form in FORMS if form.startswith("bf16")])
def test_gradients_that_were_unscaled_before_are_not_unscaled_again(form: str, make_scaler: Scaler) -> None:
    """Not in float16, where torch refuses to."""
    optimizer = master_optimizer(form)
    twin = float32_twin(params_of(optimizer))
    scaler = started(make_scaler("cpu", init_scale=SCALE))
    for grads in gradients_for(params_of(optimizer), 4, torch.bfloat16):
        set_gradients(params_of(optimizer), [grad * SCALE for grad in grads])
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        train(twin, [[grad.float() for grad in grads]])
    assert_masters_are(optimizer, twin)


@both_scalers
def test_a_model_of_several_dtypes(make_scaler: Scaler) -> None:
    """An overflow of one parameter leaves those of all dtypes as they are."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    params = [nn.Parameter(torch.linspace(1.0, 2.0, 9).to(dtype)) for dtype in dtypes]
    optimizer, twin = fused_adamw.AdamW(params, lr=0.1), float32_twin(params, lr=0.1)
    scaler = started(make_scaler("cpu", init_scale=SCALE))
    for step in range(6):
        scale = scaler.get_scale()
        grads = [torch.linspace(-1.0, step, 9).to(dtype) for dtype in dtypes]
        set_gradients(params, [grad * scale for grad in grads])
        if step in (1, 3, 4):
            params[step % 3].grad[step] = math.inf
            before = Snapshot(tensors_of(optimizer))
            scaler.step(optimizer)
            before.assert_unchanged()
        else:
            scaler.step(optimizer)
            train(twin, [[grad.float() for grad in grads]])
        scaler.update()
    assert_masters_are(optimizer, twin)
    assert scaler.get_scale() == SCALE / 8
