"""16-bit parameters that someone else writes to between steps: loaded weights, masks, edits by hand."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fused_adamw
from cases import Snapshot, bits
from master_weights import (
    FORMS,
    all_forms,
    as_params,
    assert_masters_are,
    float32_twin,
    gradients_for,
    make_rounded,
    make_values,
    master_optimizer,
    masters_of,
    train_both,
)
from training import assert_all_same_bits, params_of, set_gradients, tensors_of, train

BEFORE, AFTER = 3, 3


def load_state_dict(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Of a model."""
    model = nn.ParameterList(params)
    assert all(mine is param for mine, param in zip(model, params, strict=True))
    model.load_state_dict({str(i): value for i, value in enumerate(values)})


def load_and_assign(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """What ``swap_tensors`` leaves: the same parameter, and other memory."""
    for param, value in zip(params, values, strict=True):
        param.data = value.to(param.dtype, copy=True)


def copy_(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def copy_to_data(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.data.copy_(value)


WRITERS: dict[str, Callable[[Sequence[Tensor], Sequence[Tensor]], None]] = {
    function.__name__: function for function in (load_state_dict, load_and_assign, copy_, copy_to_data)
}

all_writers = pytest.mark.parametrize("writer", WRITERS)


def trained(form: str, **options: Any) -> tuple[fused_adamw.AdamW, torch.optim.Optimizer]:
    optimizer = master_optimizer(form, **options)
    twin = float32_twin(params_of(optimizer))
    train_both(optimizer, twin, gradients_of(form)[:BEFORE])
    return optimizer, twin


def gradients_of(form: str) -> list[list[Tensor]]:
    dtype = FORMS[form][0]
    return gradients_for(make_rounded(dtype), BEFORE + AFTER, dtype)


def go_on(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer, form: str) -> None:
    train_both(optimizer, twin, gradients_of(form)[BEFORE:])


def other_values(params: Sequence[Tensor]) -> list[Tensor]:
    """Far from the parameters in every other element, the same in the others."""
    values = []
    for param in params:
        value = param.detach().clone()
        elements = value.as_strided((value.numel(),), (1,))
        elements[::2] = -1.75 * elements[::2]
        values.append(value)
    return values


# --- resync -------------------------------------------------------------------------------------------------


@all_writers
@all_forms
def test_a_new_value_counts_and_the_other_masters_stay(form: str, writer: str) -> None:
    optimizer, twin = trained(form)
    olds = [param.detach().clone() for param in params_of(optimizer)]
    values = other_values(params_of(optimizer))
    if form == "bf16 split":
        expected = with_remainders(optimizer, values)
    else:
        expected = [
            torch.where(value == old, master, value.float())
            for value, old, master in zip(values, olds, masters_of(optimizer), strict=True)
        ]
    WRITERS[writer](params_of(optimizer), values)
    for weight, value in zip(params_of(twin), expected, strict=True):
        weight.data.copy_(value)
    go_on(optimizer, twin, form)
    assert_masters_are(optimizer, twin)


def with_remainders(optimizer: fused_adamw.AdamW, values: Sequence[Tensor]) -> list[Tensor]:
    """New parameters with the old remainders: the bits of the master weights that must come of them."""
    masters = []
    for param, value in zip(params_of(optimizer), values, strict=True):
        remainder = optimizer.state[param]["master_remainder"].to(torch.int32)
        masters.append(((bits(value).to(torch.int32) << 16) + remainder).view(torch.float32))
        # Less than half of the distance to the next number.
        assert torch.equal(
            value.abs().float() * 2.0**-8 >= (masters[-1] - value.float()).abs(), value == value
        )
    return masters


@all_forms
def test_a_whole_model_may_be_loaded(form: str) -> None:
    """At a learning rate of 0 the parameters stay what was loaded.

    By chance, a value that the master weight could have been rounded to is not told from one that it was.
    """
    optimizer, _ = trained(form)
    loaded = make_values(seed=3)
    load_state_dict(params_of(optimizer), loaded)
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, gradients_of(form)[BEFORE:])
    rounded = [value.to(FORMS[form][0]) for value in loaded]
    if FORMS[form][1].get("stochastic_rounding"):
        for param, value in zip(params_of(optimizer), rounded, strict=True):
            assert ((bits(param).int() - bits(value).int()).abs() <= 1).all()
            assert param.numel() < 100 or (param == value).float().mean() > 0.98
    else:
        assert_all_same_bits([param.detach() for param in params_of(optimizer)], rounded)


@all_forms
def test_weights_that_are_masked_stay_numbers(form: str) -> None:
    """Zeros of both signs, as pruning writes them before every step."""
    optimizer, twin = trained(form)
    generator = torch.Generator().manual_seed(2)
    masks = [torch.rand(param.shape, generator=generator) < 0.5 for param in params_of(optimizer)]
    for grads in gradients_of(form)[BEFORE:]:
        with torch.no_grad():
            for param, weight, mask in zip(params_of(optimizer), params_of(twin), masks, strict=True):
                param.mul_(mask)
                weight.mul_(mask)
                assert ((param == 0) == ~mask).all()
        # A remainder that is left of a zero is below the smallest normal number of float32.
        for master, weight in zip(masters_of(optimizer), params_of(twin), strict=True):
            if form == "bf16 split":
                assert ((master - weight).abs() <= 2.0**-133).all()
        train_both(optimizer, twin, [grads])
        assert_masters_are(optimizer, twin)


@all_forms
def test_masked_weights_without_gradients_stay_numbers(form: str) -> None:
    optimizer, _ = trained(form)
    zeros = [torch.zeros_like(param) for param in params_of(optimizer)]
    for sign in (1.0, -1.0):
        copy_(params_of(optimizer), [sign * zero for zero in zeros])
        optimizer.param_groups[0]["lr"] = 0.0
        train(optimizer, [zeros])
        assert all((master.abs() < 2.0**-126).all() for master in masters_of(optimizer))
        assert all((param == 0).all() for param in params_of(optimizer))


@all_forms
def test_resync_masters_makes_the_parameters_the_weights(form: str) -> None:
    optimizer, twin = trained(form)
    loaded = make_values(seed=3)
    load_state_dict(params_of(optimizer), loaded)
    optimizer.resync_masters()
    rounded = [value.to(FORMS[form][0]) for value in loaded]
    assert_all_same_bits([param.detach() for param in params_of(optimizer)], rounded)
    assert_all_same_bits(masters_of(optimizer), [value.float() for value in rounded])
    for weight, value in zip(params_of(twin), rounded, strict=True):
        weight.data.copy_(value)
    go_on(optimizer, twin, form)
    assert_masters_are(optimizer, twin)


def test_resync_masters_leaves_float32_parameters_and_those_without_a_state() -> None:
    params = [*as_params([torch.ones(3)], torch.float32), *make_rounded(torch.bfloat16)]
    optimizer = fused_adamw.AdamW(params)
    optimizer.resync_masters()
    assert not optimizer.state
    grads = gradients_for(params, 1, torch.float32)[0]
    train(optimizer, [[grads[0], grads[1], *[None] * (len(params) - 2)]])
    before = Snapshot([params[0], *optimizer.state[params[0]].values(), *params[2:]])
    optimizer.resync_masters()
    before.assert_unchanged()
    assert optimizer.state.keys() == {params[0], params[1]}


# --- error --------------------------------------------------------------------------------------------------


def stale_step(optimizer: torch.optim.Optimizer) -> str:
    with pytest.raises(fused_adamw.StaleMasterError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("writer", [name for name in WRITERS if name != "copy_to_data"])
@all_forms
def test_a_foreign_write_is_refused_and_nothing_is_written(form: str, writer: str) -> None:
    optimizer, twin = trained(form, stale_master="error", amsgrad=False)
    values = other_values(params_of(optimizer))
    WRITERS[writer](params_of(optimizer)[1:3], values[1:3])
    set_gradients(params_of(optimizer), gradients_of(form)[BEFORE])
    before = Snapshot(tensors_of(optimizer))
    for _ in range(2):  # and again
        message = stale_step(optimizer)
        assert "params'][1], param_groups[0]['params'][2] written to" in message
        assert "params'][0]" not in message
        assert "params'][3]" not in message
        before.assert_unchanged()
    optimizer.resync_masters()
    for weight, param in zip(params_of(twin), params_of(optimizer), strict=True):
        weight.data.copy_(param.detach())
    go_on(optimizer, twin, form)
    assert_masters_are(optimizer, twin)


@all_forms
def test_setting_the_masters_lets_it_go_on(form: str) -> None:
    """Those of the parameters that were written to; the others keep theirs."""
    optimizer, twin = trained(form, stale_master="error")
    params = params_of(optimizer)
    values = make_values(seed=4)
    load_state_dict(params[:2], values[:2])
    set_gradients(params, gradients_of(form)[BEFORE])
    stale_step(optimizer)
    optimizer.set_master_param(params[0], values[0])
    assert "params'][0]" not in stale_step(optimizer)
    optimizer.set_master_param(params[1], values[1])
    for weight, value in zip(params_of(twin)[:2], values[:2], strict=True):
        weight.data.copy_(value)
    go_on(optimizer, twin, form)
    assert_masters_are(optimizer, twin)


def test_the_parameters_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).bfloat16()
    optimizer = fused_adamw.AdamW(model.named_parameters(), stale_master="error")
    gradients = gradients_for(list(model.parameters()), 1, torch.bfloat16)
    train(optimizer, gradients)
    with torch.no_grad():
        model[1].weight.zero_()
        model[0].bias.add_(1.0)
    assert_expected_inline(
        textwrap.fill(stale_step(optimizer), 100),
        """\
fused_adamw.AdamW: 0.bias, 1.weight written to since the last step, so that a master weight is no
longer that of its parameter; resync_masters(), set_master_param() or stale_master='resync' is
required""",
    )


@all_forms
def test_what_is_no_foreign_write_is_not_refused(form: str) -> None:
    """Writes before the first step and after loading, and whatever happens to gradients and states."""
    optimizer = master_optimizer(form, stale_master="error")
    params = params_of(optimizer)
    copy_(params, other_values(params))
    twin = float32_twin(params)
    gradients = gradients_of(form)
    train_both(optimizer, twin, gradients[:2])
    optimizer.zero_grad()
    optimizer.state_dict()
    masters_of(optimizer)
    train_both(optimizer, twin, gradients[2:3])

    other = master_optimizer(form, stale_master="error")
    train(other, gradients[:1])
    copy_(params_of(other), [param.detach() for param in params])
    other.load_state_dict(optimizer.state_dict())
    train_both(other, twin, gradients[3:])
    assert_masters_are(other, twin)


def test_a_write_to_a_float32_parameter_is_not_refused() -> None:
    params = as_params([torch.ones(3)], torch.float32) + as_params([torch.ones(3)], torch.bfloat16)
    optimizer = fused_adamw.AdamW(params, stale_master="error")
    train(optimizer, [[torch.ones(3)] * 2])
    copy_(params[:1], [torch.zeros(3)])
    optimizer.step()
    copy_(params, [torch.zeros(3)] * 2)
    assert "params'][0]" not in stale_step(optimizer)


def test_a_parameter_without_a_gradient_is_refused_when_it_has_one_again() -> None:
    params = make_rounded(torch.bfloat16)[:2]
    optimizer = fused_adamw.AdamW(params, stale_master="error")
    grads = gradients_for(params, 1, torch.bfloat16)[0]
    train(optimizer, [grads])
    copy_(params[:1], [torch.zeros_like(params[0])])
    train(optimizer, [[None, grads[1]]])
    set_gradients(params, grads)
    assert "params'][0] written" in stale_step(optimizer)


def test_a_skipped_step_is_no_foreign_write_and_hides_none() -> None:
    params = make_rounded(torch.bfloat16)[:1]
    optimizer = fused_adamw.AdamW(params, stale_master="error", nonfinite="skip")
    good, bad = gradients_for(params, 2, torch.bfloat16)
    bad[0][0, 0] = float("inf")
    train(optimizer, [good, bad, good, bad])
    copy_(params, [torch.ones_like(params[0])])
    set_gradients(params, bad)
    stale_step(optimizer)


def test_turning_rounding_by_chance_on_and_off_is_no_foreign_write() -> None:
    optimizer, twin = trained("bf16 split", stale_master="error")
    gradients = gradients_for(params_of(optimizer), 6, torch.bfloat16, seed=3)
    for step, grads in enumerate(gradients):
        optimizer.param_groups[0]["rounding_seed"] = 1 if step % 2 == 0 else None
        train_both(optimizer, twin, [grads])
        assert_masters_are(optimizer, twin)


def test_a_compiled_step_is_refused_too() -> None:
    optimizer, _ = trained("bf16 split", stale_master="error")
    step = torch.compile(optimizer.step, backend="eager")
    set_gradients(params_of(optimizer), gradients_of("bf16 split")[BEFORE])
    step()
    copy_(params_of(optimizer), other_values(params_of(optimizer)))
    before = Snapshot(tensors_of(optimizer))
    with pytest.raises(fused_adamw.StaleMasterError):
        step()
    before.assert_bits_unchanged()
    torch._dynamo.reset()


@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
@all_forms
def test_a_scaler_goes_on_after_the_error(form: str, own: bool) -> None:
    scale = 1024.0
    make = fused_adamw.GradScaler if own else torch.amp.GradScaler
    scaler = make("cpu", init_scale=scale)
    scaler.scale(torch.zeros(()))
    optimizer, twin = trained(form, stale_master="error")
    gradients = gradients_for(params_of(optimizer), 3, torch.float32, seed=5)

    def scaled_step(grads: Sequence[Tensor]) -> None:
        set_gradients(params_of(optimizer), [grad * scale for grad in grads])
        scaler.step(optimizer)

    scaled_step(gradients[0])
    scaler.update()
    copy_(params_of(optimizer), other_values(params_of(optimizer)))
    before = Snapshot(tensors_of(optimizer))
    with pytest.raises(fused_adamw.StaleMasterError):
        scaled_step(gradients[1])
    before.assert_unchanged()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    optimizer.resync_masters()
    values = [param.detach().float() for param in params_of(optimizer)]
    train(twin, gradients[:1])
    for weight, value in zip(params_of(twin), values, strict=True):
        weight.data.copy_(value)
    for grads in gradients[1:]:
        scaled_step(grads)
        scaler.update()
    train(twin, gradients[1:])
    assert_masters_are(optimizer, twin)
    assert scaler.get_scale() == scale
