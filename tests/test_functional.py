"""``adamw_step``: the update as a function."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import fused_adamw
from cases import Snapshot, assert_same_bits
from fused_adamw import AdamWOptions, AdamWState, StepControl, adamw_step
from oracle.adamw import Oracle
from training import assert_all_same_bits, compilations, make_gradients, make_params, refusal, train

# The first import of Inductor brings it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

SHAPE = (6, 7)
STEPS = 100

OPTIONS = {
    "default": AdamWOptions(),
    "no decay": AdamWOptions(lr=0.05, weight_decay=0.0),
    "amsgrad": AdamWOptions(lr=0.02, amsgrad=True, weight_decay=0.3),
    "maximize": AdamWOptions(maximize=True, betas=(0.5, 0.9), eps=1e-3),
    "amsgrad, maximize": AdamWOptions(amsgrad=True, maximize=True, betas=(0.0, 0.99)),
}


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensor_and_gradients(steps: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    [param] = make_params([SHAPE])
    return param.detach(), [grad for [grad] in make_gradients([param], steps, dtype)]


def run(
    param: Tensor,
    gradients: list[Tensor],
    options: AdamWOptions = AdamWOptions(),  # noqa: B008 (frozen)
    state: AdamWState | None = None,
) -> tuple[Tensor, AdamWState]:
    for grad in gradients:
        param, state, updated = adamw_step(param, grad, state, options)
        assert updated
    assert state is not None
    return param, state


def tensors(param: Tensor, state: AdamWState) -> list[Tensor]:
    return [param, *(part for name, part in state.to_parts().items() if name != "step")]


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_agrees_with_the_oracle_over_many_steps(name: str, dtype: torch.dtype) -> None:
    options = OPTIONS[name]
    param, gradients = tensor_and_gradients(STEPS, dtype)
    oracle = Oracle(param, **dataclasses.asdict(options))
    for grad in gradients:
        oracle.update(grad)
    new_param, state = run(param, gradients, options)

    assert state.step == STEPS
    assert (state.max_exp_avg_sq is not None) == options.amsgrad
    for part, value in {"param": new_param, **state.to_parts()}.items():
        if part != "step":
            expected = getattr(oracle, part)
            # Each step rounds a few times, to half an ulp of the element's size then.
            bound = STEPS * 2.0**-24 * expected.abs().max()
            assert (value.double() - expected).abs().max() <= bound, part


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_are_those_of_the_optimizer(name: str) -> None:
    options = OPTIONS[name]
    param, gradients = tensor_and_gradients(5)
    [trained] = params = make_params([SHAPE])
    optimizer = fused_adamw.AdamW(params, **dataclasses.asdict(options))
    train(optimizer, [[grad] for grad in gradients])
    new_param, state = run(param, gradients, options)
    assert_all_same_bits(
        tensors(new_param, state),
        [trained.detach(), *(part for name, part in optimizer.state[trained].items() if name != "step")],
    )


def test_the_first_update_takes_the_moments_as_zero() -> None:
    param, [grad] = tensor_and_gradients(1)
    zero = AdamWState(0, torch.zeros(SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE))
    options = AdamWOptions(amsgrad=True)
    assert_all_same_bits(tensors(*run(param, [grad], options)), tensors(*run(param, [grad], options, zero)))


def test_keeps_the_strides_of_the_parameter() -> None:
    param = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    grad = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    update = adamw_step(param, grad)
    assert all(t.stride() == param.stride() for t in tensors(update.parameters, update.state))
    contiguous = adamw_step(param.contiguous(), grad.contiguous())
    assert_all_same_bits(
        [t.contiguous() for t in tensors(update.parameters, update.state)],
        tensors(contiguous.parameters, contiguous.state),
    )


def test_the_gradient_scale_is_divided_out() -> None:
    param, [grad] = tensor_and_gradients(1)
    plain = adamw_step(param, grad)
    for scale in (1024.0, torch.tensor(1024.0), torch.tensor([1024.0], dtype=torch.float64)):
        scaled = adamw_step(param, grad * 1024.0, control=StepControl(gradient_scale=scale))
        assert_all_same_bits(tensors(scaled.parameters, scaled.state), tensors(plain.parameters, plain.state))
    oracle = Oracle(param)
    oracle.update(grad, grad_scale=0.3)
    third = adamw_step(param, grad, control=StepControl(gradient_scale=0.3))
    torch.testing.assert_close(third.state.exp_avg.double(), oracle.exp_avg, rtol=3e-7, atol=0.0)
    torch.testing.assert_close(third.parameters.double(), oracle.param, rtol=3e-7, atol=0.0)


def test_a_maximum_is_carried_on_without_amsgrad() -> None:
    param, gradients = tensor_and_gradients(2)
    first = adamw_step(param, gradients[0], None, AdamWOptions(amsgrad=True))
    maximum = first.state.max_exp_avg_sq
    second = adamw_step(first.parameters, gradients[1], first.state, AdamWOptions(amsgrad=False))
    assert second.state.max_exp_avg_sq is maximum


# --- the step and the options as tensors --------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64], ids=str)
def test_a_tensor_step_gives_the_bits_of_an_int(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    param, gradients = tensor_and_gradients(5)
    _, after_two = run(param, gradients[:2])
    with_int = run(param, gradients[2:], state=after_two)
    start = dataclasses.replace(after_two, step=torch.full(shape, 2, dtype=dtype))
    with_tensor = run(param, gradients[2:], state=start)

    assert_all_same_bits(tensors(*with_tensor), tensors(*with_int))
    assert with_int[1].step == 5
    assert torch.equal(with_tensor[1].step, torch.full(shape, 5, dtype=dtype))
    assert start.step.item() == 2


def test_an_int_step_counts_where_a_float32_cannot() -> None:
    param, [grad] = tensor_and_gradients(1)
    _, state = run(param, [grad])
    late = dataclasses.replace(state, step=2**24)
    assert adamw_step(param, grad, late).state.step == 2**24 + 1
    assert adamw_step(param, grad, dataclasses.replace(state, step=2**62)).state.step == 2**62 + 1


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_tensor_options_give_the_bits_of_the_numbers_they_hold(shape: tuple[int, ...]) -> None:
    param, gradients = tensor_and_gradients(3)
    names = {"lr": 0.0123, "beta1": 0.87, "beta2": 0.9876}

    def options(dtype: torch.dtype | None) -> AdamWOptions:
        lr, *betas = (
            names.values() if dtype is None else (torch.full(shape, v, dtype=dtype) for v in names.values())
        )
        return AdamWOptions(lr=lr, betas=tuple(betas))

    numbers = tensors(*run(param, gradients, options(None)))
    assert_all_same_bits(tensors(*run(param, gradients, options(torch.float64))), numbers)
    rounded = [torch.tensor(v, dtype=torch.float32).item() for v in names.values()]
    of_rounded = AdamWOptions(lr=rounded[0], betas=(rounded[1], rounded[2]))
    assert_all_same_bits(
        tensors(*run(param, gradients, options(torch.float32))), tensors(*run(param, gradients, of_rounded))
    )


# --- what is left as it is ----------------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
def test_inputs_and_their_aliases_stay_as_they_are(amsgrad: bool) -> None:
    base = torch.randn(5, 4, 6)
    param, grad, exp_avg, exp_avg_sq, maximum = base.unbind()[:2] + tuple(base[2:].abs().unbind())
    exp_avg_sq, maximum, step = exp_avg_sq.clone(), maximum.clone(), torch.tensor(3)
    state = AdamWState(step, exp_avg, exp_avg_sq, maximum)
    inputs = [param, grad, exp_avg, exp_avg_sq, maximum, step]
    before = Snapshot([base, *inputs])
    update = adamw_step(param, grad, state, AdamWOptions(amsgrad=amsgrad))

    before.assert_unchanged()
    outputs = [update.parameters, update.state.exp_avg, update.state.exp_avg_sq, update.state.step]
    if amsgrad:
        outputs.append(update.state.max_exp_avg_sq)
    assert len({t.untyped_storage().data_ptr() for t in outputs}) == len(outputs)
    assert {t.untyped_storage().data_ptr() for t in outputs}.isdisjoint(
        t.untyped_storage().data_ptr() for t in inputs
    )


def test_inputs_may_be_one_another() -> None:
    param, _ = tensor_and_gradients(1)
    value = param.abs()
    state = AdamWState(3, value, value, value)
    apart = AdamWState(3, value.clone(), value.clone(), value.clone())
    options = AdamWOptions(amsgrad=True)
    shared = adamw_step(value, value, state, options)
    cloned = adamw_step(value.clone(), value.clone(), apart, options)
    assert_all_same_bits(tensors(shared.parameters, shared.state), tensors(cloned.parameters, cloned.state))


SKIPPED = {
    "asked for": (SHAPE, StepControl(skip_update=True)),
    "empty": ((0, 3), StepControl()),
    "both": ((0, 3), StepControl(skip_update=True)),
}


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("name", SKIPPED)
def test_a_skipped_update_returns_what_it_was_given(name: str, with_state: bool) -> None:
    shape, control = SKIPPED[name]
    param, grad = torch.randn(shape), torch.randn(shape)
    state = AdamWState(torch.tensor(2.0), torch.randn(shape), torch.rand(shape)) if with_state else None
    before = Snapshot([param, grad, *(state.to_parts().values() if state else ())])

    operators = operators_run(lambda: adamw_step(param, grad, state, control=control))
    update = adamw_step(param, grad, state, control=control)

    assert update.parameters is param
    assert update.state is state
    assert update.updated is False
    before.assert_unchanged()
    assert not {name for name in operators if "empty" in name or "clone" in name or "zeros" in name}


def test_an_update_that_is_not_skipped_allocates() -> None:
    """That the list of operators in the test above would show an allocation."""
    param, [grad] = tensor_and_gradients(1)
    assert "aten::empty_like" in operators_run(lambda: adamw_step(param, grad))


def operators_run(call: Any) -> set[str]:
    with torch.autograd.profiler.profile() as profile:
        call()
    return {event.name for event in profile.function_events}


def test_a_skipped_update_is_still_checked() -> None:
    param, [grad] = tensor_and_gradients(1)
    skip = StepControl(skip_update=True)
    with pytest.raises(ValueError, match=r"lr is -1\.0"):
        adamw_step(param, grad, None, AdamWOptions(lr=-1.0), skip)
    with pytest.raises(ValueError, match="grad has shape"):
        adamw_step(param, grad[:1], control=skip)


# --- the state ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
def test_parts_round_trip(amsgrad: bool) -> None:
    param, gradients = tensor_and_gradients(2)
    _, state = run(param, gradients, AdamWOptions(amsgrad=amsgrad))
    parts = state.to_parts()
    names = ["step", "exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
    assert list(parts) == names
    again = AdamWState.from_parts(parts)
    assert all(getattr(again, name) is getattr(state, name) for name in names)


def test_a_state_of_torch_is_one() -> None:
    _, gradients = tensor_and_gradients(3)
    [trained] = params = make_params([SHAPE])
    optimizer = torch.optim.AdamW(params, amsgrad=True)
    train(optimizer, [[grad] for grad in gradients[:2]])
    state = AdamWState.from_parts(optimizer.state[trained])
    update = adamw_step(trained.detach(), gradients[2], state, AdamWOptions(amsgrad=True))
    train(optimizer, [[gradients[2]]])
    torch.testing.assert_close(update.parameters, trained.detach(), rtol=3e-7, atol=3e-7)
    assert torch.equal(update.state.step, torch.tensor(3.0))


def test_parts_that_are_missing_or_unknown_are_named() -> None:
    zero = torch.zeros(1)
    wrong: list[dict[str, Any]] = [
        {"exp_avg": zero, "step": 1},
        {"exp_avg": zero, "exp_avg_sq": zero, "step": 1, "moment": zero},
        {"master": zero, "moment": zero},
    ]
    assert_expected_inline(
        "\n".join(refusal(lambda parts=parts: AdamWState.from_parts(parts)) for parts in wrong),
        """\
ValueError: AdamWState: parts ['exp_avg_sq'] missing, [] unknown; step, exp_avg and exp_avg_sq are
required, max_exp_avg_sq and master are allowed
ValueError: AdamWState: parts [] missing, ['moment'] unknown; step, exp_avg and exp_avg_sq are
required, max_exp_avg_sq and master are allowed
ValueError: AdamWState: parts ['exp_avg', 'exp_avg_sq', 'step'] missing, ['moment'] unknown; step,
exp_avg and exp_avg_sq are required, max_exp_avg_sq and master are allowed""",
    )


def test_amsgrad_needs_its_maximum() -> None:
    param, gradients = tensor_and_gradients(2)
    _, state = run(param, gradients[:1])
    assert_expected_inline(
        refusal(lambda: adamw_step(param, gradients[1], state, AdamWOptions(amsgrad=True))),
        """\
ValueError: fused_adamw::step: exp_avg, exp_avg_sq given without max_exp_avg_sq; all of the state,
or None for all before the first update, is required""",
    )


# --- refusals -----------------------------------------------------------------------------------------------


REFUSED: dict[str, dict[str, Any]] = {
    "lr": {"options": {"lr": -0.1}},
    "lr nan": {"options": {"lr": float("nan")}},
    "lr tensor": {"options": {"lr": torch.tensor(float("inf"))}},
    "lr dtype": {"options": {"lr": torch.tensor(1)}},
    "lr shape": {"options": {"lr": torch.tensor([0.1, 0.2])}},
    "beta1": {"options": {"betas": (1.0, 0.9)}},
    "beta2": {"options": {"betas": (0.9, torch.tensor(-0.5))}},
    "eps": {"options": {"eps": -1e-8}},
    "weight_decay": {"options": {"weight_decay": float("inf")}},
    "scale 0": {"control": {"gradient_scale": 0.0}},
    "scale nan": {"control": {"gradient_scale": torch.tensor(float("nan"))}},
    "scale tiny": {"control": {"gradient_scale": 1e-45}},
    "step": {"step": -1},
    "half a step": {"step": torch.tensor(1.5)},
    "step end": {"step": 2**63 - 1},
}


def test_options_and_control_out_of_range_are_refused_and_nothing_changes() -> None:
    param, [grad] = tensor_and_gradients(1)
    messages = []
    for name, wrong in REFUSED.items():
        state = AdamWState(wrong.get("step", 3), param.clone(), param.abs())
        before = Snapshot([param, grad, *state.to_parts().values()])
        options = AdamWOptions(**wrong.get("options", {}))
        control = StepControl(**wrong.get("control", {}))
        message = refusal(lambda o=options, s=state, c=control: adamw_step(param, grad, s, o, c))
        messages.append(f"{name}:\n{message}")
        before.assert_unchanged()
    assert_expected_inline(
        "\n".join(messages),
        """\
lr:
ValueError: fused_adamw::step: lr is -0.1; a finite number of at least 0 is required
lr nan:
ValueError: fused_adamw::step: lr is nan; a finite number of at least 0 is required
lr tensor:
ValueError: fused_adamw::step: lr is inf; a finite number of at least 0 is required
lr dtype:
TypeError: fused_adamw::step: lr has dtype torch.int64; torch.float32 or torch.float64 is required
lr shape:
ValueError: fused_adamw::step: lr has shape (2,); shape () or (1,) is required
beta1:
ValueError: fused_adamw::step: beta1 is 1.0; a number of at least 0 and below 1 is required
beta2:
ValueError: fused_adamw::step: beta2 is -0.5; a number of at least 0 and below 1 is required
eps:
ValueError: fused_adamw::step: eps is -1e-08; a finite number of at least 0 is required
weight_decay:
ValueError: fused_adamw::step: weight_decay is inf; a finite number of at least 0 is required
scale 0:
ValueError: fused_adamw::step: grad_scale is 0.0; a positive finite number whose reciprocal is
finite in float32 is required
scale nan:
ValueError: fused_adamw::step: grad_scale is nan; a positive finite number whose reciprocal is
finite in float32 is required
scale tiny:
ValueError: fused_adamw::step: grad_scale is 1e-45; a positive finite number whose reciprocal is
finite in float32 is required
step:
ValueError: fused_adamw::step: step is -1; a whole number of at least 0 and below 2^63 - 1 is
required
half a step:
ValueError: fused_adamw::step: step is 1.5; a whole number of at least 0 and below 2^63 - 1 is
required
step end:
ValueError: fused_adamw::step: step is 9223372036854775807; a whole number of at least 0 and below
2^63 - 1 is required""",
    )


def test_a_tensor_that_autograd_follows_is_refused() -> None:
    param, [grad] = tensor_and_gradients(1)
    param.requires_grad_()
    assert_expected_inline(
        refusal(lambda: adamw_step(param, grad)),
        """\
RuntimeError: fused_adamw::step has no derivative, by design, and param requires grad; call it under
torch.no_grad(), or pass detached tensors""",
    )
    with torch.no_grad():
        assert adamw_step(param, grad).updated


def test_options_and_results_cannot_be_written() -> None:
    param, gradients = tensor_and_gradients(1)
    _, state = run(param, gradients)
    for value, name in ((AdamWOptions(), "lr"), (StepControl(), "skip_update"), (state, "step")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 1)


# --- torch.compile ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_compiled_bits_are_those_of_eager_and_tensors_never_recompile(
    amsgrad: bool, dtype: torch.dtype
) -> None:
    param, gradients = tensor_and_gradients(10, dtype)

    def updates(step: Any) -> list[Tensor]:
        current, state = param, None
        for i, grad in enumerate(gradients):
            lr = torch.tensor(0.1 / (1 + i), dtype=torch.float64)
            betas = (torch.tensor(0.8 + 0.01 * i), torch.tensor(0.9 + 0.005 * i))
            options = AdamWOptions(lr=lr, betas=betas, amsgrad=amsgrad)
            if state is None:
                zeros = [torch.zeros(SHAPE) for _ in range(3)]
                state = AdamWState(torch.tensor(0.0), *(zeros if amsgrad else zeros[:2]))
            update = step(current, grad, state, options)
            current, state = update.parameters, update.state
            assert update.updated
        return [*tensors(current, state), state.step]

    with compilations() as found:
        compiled = updates(torch.compile(adamw_step, fullgraph=True, backend="aot_eager"))
    assert len(found) == 1
    assert_all_same_bits(compiled, updates(adamw_step))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_with_numbers_recompiles_once() -> None:
    """The first update (no state yet) is one program, the next another; then numbers become inputs."""
    param, gradients = tensor_and_gradients(8)

    def updates(step: Any) -> list[Tensor]:
        current, state = param, None
        for i, grad in enumerate(gradients):
            current, state, _ = step(current, grad, state, AdamWOptions(lr=0.1 / (1 + i)))
        assert state.step == len(gradients)
        return tensors(current, state)

    with compilations() as found:
        compiled = updates(torch.compile(adamw_step, fullgraph=True, backend="aot_eager"))
    assert len(found) == 3
    assert_all_same_bits(compiled, updates(adamw_step))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_by_inductor_gives_the_bits_of_eager() -> None:
    param, gradients = tensor_and_gradients(2)
    lr = torch.tensor(0.1, dtype=torch.float64)
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    options = AdamWOptions(lr=lr, betas=betas)
    state = AdamWState(torch.tensor(0.0), torch.zeros(SHAPE), torch.zeros(SHAPE))
    compiled = torch.compile(adamw_step, fullgraph=True)
    before = Snapshot([param, gradients[0], *state.to_parts().values()])
    found = compiled(param, gradients[0], state, options)
    before.assert_unchanged()
    expected = adamw_step(param, gradients[0], state, options)
    assert_all_same_bits(tensors(found.parameters, found.state), tensors(expected.parameters, expected.state))
    assert_same_bits(found.state.step, expected.state.step)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_skip_returns_what_it_was_given() -> None:
    param, [grad] = tensor_and_gradients(1)
    state = AdamWState(torch.tensor(1.0), param.clone(), param.abs())
    skip = StepControl(skip_update=True)
    update = torch.compile(adamw_step, fullgraph=True, backend="aot_eager")(param, grad, state, control=skip)
    assert update.parameters is param
    assert update.state.exp_avg is state.exp_avg
    assert update.updated is False
