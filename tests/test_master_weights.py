"""``AdamW`` with 16-bit parameters: the master weights are those of float32 training, bit by bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fused_adamw
from cases import Snapshot, assert_same_bits
from master_weights import (
    FORMS,
    all_forms,
    as_params,
    assert_masters_are,
    assert_rounding,
    float32_twin,
    gradients_for,
    make_rounded,
    make_values,
    master_optimizer,
    masters_of,
    train_both,
)
from training import (
    advance,
    assert_all_same_bits,
    assert_as_accurate_as_torch,
    error,
    oracles_of,
    params_of,
    refusal,
    set_gradients,
    tensors_of,
    train,
)

STEPS = 6

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "strong decay": {"weight_decay": 0.5, "lr": 0.1},
    "tensor lr": {"lr": torch.tensor(0.02)},
    "clipping": {"max_grad_norm": 1.0},
    "serial statistics": {"max_grad_norm": 1.0, "hierarchical_stats": False},
    "clipping amsgrad": {"max_grad_norm": 1.0, "amsgrad": True, "lr": 0.1},
}

GRADIENTS = pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


# --- the bits of float32 training ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
@all_forms
def test_masters_are_those_of_float32_training(form: str, name: str) -> None:
    optimizer = master_optimizer(form, **OPTIONS[name])
    twin = float32_twin(params_of(optimizer), **OPTIONS[name])
    gradients = gradients_for(params_of(optimizer), STEPS, FORMS[form][0])
    for grads in gradients:
        train_both(optimizer, twin, [grads])
        assert_masters_are(optimizer, twin)
    assert any((m != p).any() for m, p in zip(masters_of(optimizer), params_of(optimizer), strict=True))


@GRADIENTS
@all_forms
def test_gradients_may_be_of_another_dtype(form: str, grad_dtype: torch.dtype) -> None:
    optimizer = master_optimizer(form, max_grad_norm=10.0)
    twin = float32_twin(params_of(optimizer), max_grad_norm=10.0)
    train_both(optimizer, twin, gradients_for(params_of(optimizer), STEPS, grad_dtype))
    assert_masters_are(optimizer, twin)


@all_forms
def test_clipping_in_a_pass_of_its_own(form: str) -> None:
    """Of float32 gradients, which it changes: 16-bit ones would be rounded."""
    options: dict[str, Any] = {"max_grad_norm": 1.0, "fused_step": False}
    optimizer = master_optimizer(form, **options)
    twin = float32_twin(params_of(optimizer), **options)
    train_both(optimizer, twin, gradients_for(params_of(optimizer), STEPS, torch.float32))
    assert_masters_are(optimizer, twin)


@all_forms
def test_dtypes_mixed_in_one_group_and_over_groups(form: str) -> None:
    """float32 parameters among those of both 16-bit dtypes, some without a gradient at times."""
    dtype, own = FORMS[form]
    others = [torch.float32, dtype, torch.float16, torch.bfloat16, dtype, dtype]

    def grouped(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": params[:4]},
            {"params": params[4:], "lr": 0.1, "amsgrad": True, "betas": (0.5, 0.9)},
        ]

    params = [nn.Parameter(v.to(d)) for v, d in zip(make_values(), others, strict=True)]
    optimizer = fused_adamw.AdamW(grouped(params), **own)
    twin = fused_adamw.AdamW(grouped(as_params(params, torch.float32)))
    gradients: list[list[Any]] = [list(grads) for grads in gradients_for(params, 2 * STEPS, dtype)]
    for step, grads in enumerate(gradients):
        for i in range(len(grads)):
            if (step + i) % 3 == 0 and step > 1:
                grads[i] = None
    for grads in gradients:
        train_both(optimizer, twin, [grads])
        assert_masters_are(optimizer, twin)
    assert [p.dtype for p in params] == others
    assert len({optimizer.state[param]["step"].item() for param in params}) > 1


@all_forms
def test_float32_parameters_take_16_bit_gradients_beside_them(form: str) -> None:
    """Each parameter a gradient of the other width."""
    dtype, own = FORMS[form]
    params = [nn.Parameter(v.to(dtype if i % 2 else torch.float32)) for i, v in enumerate(make_values())]
    optimizer, twin = fused_adamw.AdamW(params, **own), float32_twin(params)
    grad_dtypes = [torch.float32 if i % 2 else dtype for i in range(len(params))]
    gradients = [
        [grad.to(d) for grad, d in zip(grads, grad_dtypes, strict=True)]
        for grads in gradients_for(params, STEPS, torch.float32)
    ]
    train_both(optimizer, twin, gradients)
    assert_masters_are(optimizer, twin)


@pytest.mark.parametrize("grad_dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_from_autograd_may_be_wider_than_its_parameter(grad_dtype: torch.dtype | None) -> None:
    """Or narrower: ``grad_dtype`` says which autograd keeps."""
    param_dtype = torch.float32 if grad_dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    param = nn.Parameter(torch.linspace(-2.0, 2.0, 9).to(param_dtype))
    factor = torch.linspace(0.1, 0.9, 9)
    param.grad_dtype = grad_dtype
    optimizer = fused_adamw.AdamW([param], lr=0.1)
    twin = float32_twin([param], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (param.float() * factor).sum().backward()
        assert param.grad.dtype == (grad_dtype or torch.bfloat16)
        set_gradients(params_of(twin), [param.grad.float()])
        optimizer.step()
        twin.step()
    assert_masters_are(optimizer, twin)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
@all_forms
def test_a_gradient_that_is_not_finite_skips_the_step(form: str, bad: float) -> None:
    """At first and later; nothing moves, the random bits of the steps to come neither."""
    optimizer = master_optimizer(form, nonfinite="skip", amsgrad=True)
    without = master_optimizer(form, amsgrad=True)
    twin = float32_twin(params_of(without), amsgrad=True)
    gradients = gradients_for(params_of(optimizer), 5, FORMS[form][0])
    for step, grads in enumerate(gradients):
        if step in (0, 3):
            grads[2][1, 1, 1, 1] = bad
            before = Snapshot(tensors_of(optimizer))
            train(optimizer, [grads])
            before.assert_unchanged()
        else:
            train(optimizer, [grads])
            train_both(without, twin, [grads])
    assert_masters_are(optimizer, twin)
    assert_all_same_bits(tensors_of(optimizer), tensors_of(without))


@pytest.mark.parametrize("bad", [math.inf, math.nan], ids=str)
def test_a_gradient_that_is_not_finite_raises_and_writes_nothing(bad: float) -> None:
    for form in FORMS:
        optimizer = master_optimizer(form, nonfinite="error")
        good, grads = gradients_for(params_of(optimizer), 2, FORMS[form][0])
        train(optimizer, [good])
        grads[0][0, 0] = bad
        set_gradients(params_of(optimizer), grads)
        before = Snapshot(tensors_of(optimizer))
        with pytest.raises(fused_adamw.NonfiniteGradientError, match=r"param_groups\[0\]\['params'\]\[0\]"):
            optimizer.step()
        before.assert_unchanged()


@all_forms
def test_masters_are_those_of_float32_training_with_many_threads(form: str) -> None:
    """Parameters large enough to be shared out."""
    dtype, own = FORMS[form]
    values = [torch.randn(100_003, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    params = as_params(values, dtype)
    optimizer, twin = fused_adamw.AdamW(params, lr=0.1, **own), float32_twin(params, lr=0.1)
    gradients = [[torch.sin(1e-3 * step * v).to(dtype) for v in values] for step in (1, 2, 3)]
    train_both(optimizer, twin, gradients)
    for param, other in zip(params, params_of(twin), strict=True):
        assert_same_bits(optimizer.master_param(param), other.detach())


# --- beside torch and the oracle ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "amsgrad", "maximize", "strong decay"])
@all_forms
def test_as_accurate_as_torch_with_masters_by_hand(form: str, name: str) -> None:
    """The usual way: torch's optimizer on float32 copies, copied back after each step."""
    dtype, options = FORMS[form][0], OPTIONS[name]
    optimizer = master_optimizer(form, **options)
    by_hand = float32_twin(params_of(optimizer), torch.optim.AdamW, **options)
    oracles = oracles_of(params_of(optimizer), **options)
    gradients = gradients_for(params_of(optimizer), 20, dtype)
    train_both(optimizer, by_hand, gradients)
    advance(oracles, gradients)
    filled = [i for i, param in enumerate(params_of(optimizer)) if param.numel() > 0]
    ours, torchs = ([tensors[i] for i in filled] for tensors in (masters_of(optimizer), params_of(by_hand)))
    assert_as_accurate_as_torch(ours, torchs, [oracles[i] for i in filled])
    if options.get("lr", 1e-3) < 0.1 and not FORMS[form][1].get("stochastic_rounding"):
        copies = [param.detach().to(dtype) for param in params_of(by_hand)]
        different = sum(
            (a.detach() != b).sum().item() for a, b in zip(params_of(optimizer), copies, strict=True)
        )
        assert different <= 3  # where torch's master and ours are on either side of a middle


@all_forms
def test_updates_too_small_for_the_parameter_add_up(form: str) -> None:
    """Each moves a weight by 2^-12 of itself; torch without masters loses them all in bfloat16."""
    dtype, own = FORMS[form]
    options: dict[str, Any] = {"lr": 2.0**-12, "weight_decay": 0.0}
    params = as_params([torch.ones(100)], dtype)
    optimizer = fused_adamw.AdamW(params, **options, **own)
    plain = torch.optim.AdamW(as_params(params, dtype), **options)
    oracles = oracles_of(params, **options)
    gradients = [[torch.full((100,), -1.0, dtype=dtype)] for _ in range(200)]
    train(optimizer, gradients)
    train(plain, gradients)
    advance(oracles, gradients)
    assert error(masters_of(optimizer), oracles) < 1e-5
    ulp = torch.finfo(dtype).eps
    assert error(params, oracles) <= (ulp if own.get("stochastic_rounding") else ulp / 2) + 1e-5
    if dtype == torch.bfloat16:
        assert (params_of(plain)[0] == 1.0).all()
        assert error(params_of(plain), oracles) > 0.04


@all_forms
def test_weight_decay_too_small_for_the_parameter_acts(form: str) -> None:
    """A decay of 1e-5 a step, 500 times, is far below the spacing of 16-bit numbers."""
    dtype, own = FORMS[form]
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 1e-2}
    params = as_params([torch.linspace(1.0, 2.0, 50)], dtype)
    optimizer = fused_adamw.AdamW(params, **options, **own)
    before = params[0].detach().clone()
    oracles = oracles_of(params, **options)
    gradients = [[torch.zeros(50, dtype=dtype)] for _ in range(500)]
    train(optimizer, gradients)
    advance(oracles, gradients)
    if dtype == torch.bfloat16:  # in float16 its eps is 0, and so is a denominator
        plain = torch.optim.AdamW(as_params([before], dtype), **options)
        train(plain, gradients)
        assert torch.equal(params_of(plain)[0], before)
    assert error(masters_of(optimizer), oracles) < 500 * 2.0**-23
    assert (oracles[0].param < before.double() * 0.996).all()
    assert (optimizer.master_param(params[0]) < before.float() * 0.996).all()
    assert (params[0] < before).float().mean() > 0.2


# --- what the optimizer shows -------------------------------------------------------------------------------


@all_forms
def test_the_state_is_in_float32_or_in_16_bits_that_are_missing(form: str) -> None:
    optimizer = master_optimizer(form, amsgrad=True)
    train(optimizer, gradients_for(params_of(optimizer), 1, torch.float32))
    name, dtype = (
        ("master_remainder", torch.int16) if form == "bf16 split" else ("master_param", torch.float32)
    )
    for param in params_of(optimizer):
        state = optimizer.state[param]
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", name}
        assert state[name].dtype == dtype
        assert {state[key].dtype for key in state.keys() - {name}} == {torch.float32}
        assert all(state[key].stride() == param.stride() for key in state.keys() - {"step"})


def test_a_float32_parameter_is_its_own_master() -> None:
    (param,) = params = as_params([torch.ones(3)], torch.float32)
    optimizer = fused_adamw.AdamW(params)
    train(optimizer, [[torch.ones(3)]])
    assert optimizer.master_param(param).data_ptr() == param.data_ptr()
    assert optimizer.state[param].keys() == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.set_master_param(param, torch.full((3,), 1.0 + 2.0**-20))
    assert (param == 1.0 + 2.0**-20).all()


@all_forms
def test_before_the_first_step_a_master_is_the_parameter(form: str) -> None:
    optimizer = master_optimizer(form)
    assert_all_same_bits(masters_of(optimizer), [p.detach().float() for p in params_of(optimizer)])
    assert not optimizer.state


@pytest.mark.parametrize("steps", [0, 2])
@all_forms
def test_a_master_that_was_set_is_kept_to_the_bit(form: str, steps: int) -> None:
    optimizer = master_optimizer(form)
    gradients = gradients_for(params_of(optimizer), steps + 3, FORMS[form][0])
    twin = float32_twin(params_of(optimizer))
    train_both(optimizer, twin, gradients[:steps])
    for param, other, value in zip(params_of(optimizer), params_of(twin), make_values(seed=5), strict=True):
        version = param._version
        optimizer.set_master_param(param, value)
        assert param._version > version
        assert_same_bits(optimizer.master_param(param), value)
        assert_rounding(param, value, by_chance=False)
        other.data.copy_(value)
    train_both(optimizer, twin, gradients[steps:])
    assert_masters_are(optimizer, twin)


@all_forms
def test_setting_a_master_to_itself_changes_nothing(form: str) -> None:
    optimizer = master_optimizer(form)
    train(optimizer, gradients_for(params_of(optimizer), 2, torch.float32))
    masters = [master.clone() for master in masters_of(optimizer)]
    for param in params_of(optimizer):
        optimizer.set_master_param(param, optimizer.master_param(param))
    assert_all_same_bits(masters_of(optimizer), masters)


def test_masters_that_cannot_be_set_are_refused() -> None:
    for form in FORMS:
        optimizer = master_optimizer(form)
        train(optimizer, gradients_for(params_of(optimizer), 1, torch.float32))
        before = Snapshot(tensors_of(optimizer))
        param = params_of(optimizer)[0]
        shape = refusal(lambda o=optimizer, p=param: o.set_master_param(p, torch.zeros(7, 5)))
        other = refusal(
            lambda o=optimizer, p=param: o.set_master_param(nn.Parameter(p.detach()), torch.zeros(5, 7))
        )
        before.assert_unchanged()
        assert_expected_inline(
            f"{shape}\n{other}",
            """\
ValueError: fused_adamw.AdamW: weight has shape (7, 5); (5, 7), the parameter's, is required
ValueError: fused_adamw.AdamW: param is in no group; a parameter of this optimizer is required""",
        )


# --- refusals -----------------------------------------------------------------------------------------------


def test_parameters_that_have_no_master_form_are_refused() -> None:
    wrong: dict[str, Tensor] = {
        "complex64": torch.zeros(2, dtype=torch.complex64),
        "float64": torch.zeros(2, dtype=torch.float64),
        "sparse": torch.eye(2, dtype=torch.bfloat16).to_sparse(),
        "float8": torch.zeros(2).to(torch.float8_e4m3fn),
    }
    optimizer = fused_adamw.AdamW(make_rounded(torch.bfloat16))
    messages = []
    for tensor in wrong.values():
        param = tensor.requires_grad_()
        messages.append(refusal(lambda p=param: fused_adamw.AdamW([torch.ones(1).bfloat16(), p])))
        with pytest.raises(TypeError):
            optimizer.add_param_group({"params": [param]})
    assert len(optimizer.param_groups) == 1
    assert_expected_inline(
        "\n".join(messages),
        """\
TypeError: fused_adamw.AdamW: params[1] has dtype torch.complex64; torch.float32, torch.float16 or
torch.bfloat16 is required
TypeError: fused_adamw.AdamW: params[1] has dtype torch.float64; torch.float32, torch.float16 or
torch.bfloat16 is required
TypeError: fused_adamw.AdamW: params[1] has layout torch.sparse_coo; a dense tensor (torch.strided)
is required
TypeError: fused_adamw.AdamW: params[1] has dtype torch.float8_e4m3fn; torch.float32, torch.float16
or torch.bfloat16 is required""",
    )


def test_gradients_and_masters_of_another_form_are_refused_and_nothing_is_written() -> None:
    changes: dict[str, Any] = {
        "float64 gradient": lambda p, s: setattr(p, "grad", p.grad.double()),
        "sparse gradient": lambda p, s: setattr(p, "grad", p.grad.to_sparse()),
        "16-bit moment": lambda p, s: s.update(exp_avg=s["exp_avg"].bfloat16()),
        "16-bit master": lambda p, s: s.update(master_param=s["master_param"].bfloat16()),
        "master of another shape": lambda p, s: s.update(master_param=s["master_param"][:1]),
    }
    messages = []
    for change in changes.values():
        params = as_params([torch.ones(2, 2)], torch.bfloat16)
        optimizer = fused_adamw.AdamW(params, split_masters=False)
        train(optimizer, [[torch.ones(2, 2)]])
        set_gradients(params, [torch.ones(2, 2)])
        change(params[0], optimizer.state[params[0]])
        before = Snapshot(tensors_of(optimizer))
        messages.append(refusal(optimizer.step))
        before.assert_unchanged()
    assert_expected_inline(
        "\n".join(messages),
        """\
TypeError: fused_adamw::step_: grads[0] has dtype torch.float64; torch.float32, torch.float16 or
torch.bfloat16 is required
TypeError: fused_adamw::step_: grads[0] has layout torch.sparse_coo; a dense tensor (torch.strided)
is required
TypeError: fused_adamw::step_: exp_avgs[0] has dtype torch.bfloat16; torch.float32 is required
TypeError: fused_adamw::step_: masters[0] has dtype torch.bfloat16; torch.float32 or torch.int16 is
required
ValueError: fused_adamw::step_: masters[0] has shape (1, 2); (2, 2), the parameter's, is required""",
    )


@pytest.mark.parametrize("setting", ["split", None, True], ids=repr)
def test_a_setting_that_does_not_exist_is_refused(setting: Any) -> None:
    with pytest.raises(ValueError, match=r"stale_master is .*; 'resync' or 'error' is required"):
        fused_adamw.AdamW(make_rounded(torch.bfloat16), stale_master=setting)


def test_a_seed_that_is_no_number_is_refused() -> None:
    group = {"params": make_rounded(torch.bfloat16), "rounding_seed": "seven"}
    message = refusal(lambda: fused_adamw.AdamW([group], stochastic_rounding=True))
    assert_expected_inline(
        message,
        """TypeError: fused_adamw.AdamW: rounding_seed is 'seven'; a whole number, or None, is required""",
    )
