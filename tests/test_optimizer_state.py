"""The state of ``AdamW``: its ``state_dict``, exchange with torch.optim.AdamW, copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fused_adamw
from cases import Snapshot
from training import (
    advance,
    assert_all_same_bits,
    assert_as_accurate_as_torch,
    copy_over,
    make_gradients,
    make_params,
    oracles_of,
    params_of,
    set_gradients,
    tensors_of,
    train,
)

BOTH = {"ours": fused_adamw.AdamW, "torch": torch.optim.AdamW}
SWITCH = 7
STEPS = 20


def trained(cls: type, steps: int = 3, **options: Any) -> torch.optim.Optimizer:
    optimizer = cls(make_params(), **options)
    train(optimizer, make_gradients(params_of(optimizer), steps))
    return optimizer


def go_on(optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    train(optimizer, make_gradients(params_of(optimizer), steps, seed=11))


def changed(state_dict: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """A copy of a state_dict with ``change`` applied to the state of each parameter."""
    state_dict = copy.deepcopy(state_dict)
    for state in state_dict["state"].values():
        change(state)
    return state_dict


# --- the same as torch's ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True, "lr": torch.tensor(0.1)}], ids=["default", "amsgrad"]
)
def test_the_state_dict_is_laid_out_as_torchs(options: dict[str, Any]) -> None:
    ours, torchs = (trained(cls, **options).state_dict() for cls in BOTH.values())
    assert ours["param_groups"] == torchs["param_groups"]
    assert list(ours) == list(torchs)
    assert ours["state"].keys() == torchs["state"].keys()
    for index, state in torchs["state"].items():
        described = {name: (t.dtype, t.shape, t.device) for name, t in ours["state"][index].items()}
        assert described == {name: (t.dtype, t.shape, t.device) for name, t in state.items()}
        assert ours["state"][index]["step"] == state["step"]


def test_only_parameters_that_had_gradients_have_a_state() -> None:
    dicts = []
    for cls in BOTH.values():
        params = make_params()
        optimizer = cls(params)
        set_gradients(params, [torch.ones_like(params[0]), None, torch.ones_like(params[2]), None])
        optimizer.step()
        dicts.append(optimizer.state_dict())
    assert dicts[0]["state"].keys() == dicts[1]["state"].keys() == {0, 2}
    fused_adamw.AdamW(make_params()).load_state_dict(dicts[1])
    torch.optim.AdamW(make_params()).load_state_dict(dicts[0])


@pytest.mark.parametrize("torch_options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("first", BOTH)
def test_training_goes_on_with_the_other(
    first: str, options: dict[str, Any], torch_options: dict[str, Any]
) -> None:
    second = "torch" if first == "ours" else "ours"
    make = {
        name: lambda n=name: BOTH[n](make_params(), **options, **(torch_options if n == "torch" else {}))
        for name in BOTH
    }
    gradients = make_gradients(make_params(), STEPS)

    before, after = make[first](), make[second]()
    train(before, gradients[:SWITCH])
    copy_over(before, after)
    train(after, gradients[SWITCH:])

    not_switched = make["torch"]()
    train(not_switched, gradients)
    oracles = oracles_of(make_params(), **options)
    advance(oracles, gradients)
    assert_as_accurate_as_torch(params_of(after), params_of(not_switched), oracles)
    assert all(after.state[param]["step"] == STEPS for param in params_of(after))


@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True, "lr": torch.tensor([0.1])}], ids=["default", "amsgrad"]
)
def test_training_goes_on_with_another_of_ours_in_the_same_bits(options: dict[str, Any]) -> None:
    optimizer, other = trained(fused_adamw.AdamW, **options), fused_adamw.AdamW(make_params())
    copy_over(optimizer, other)
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for each in (optimizer, other):
        go_on(each)
    assert_all_same_bits(tensors_of(other), tensors_of(optimizer))


# --- foreign checkpoints ------------------------------------------------------------------------------------

STEP_FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "int": int,
    "float": float,
    "int64": lambda step: step.to(torch.int64),
    "float64": lambda step: step.to(torch.float64),
    "shape (1,)": lambda step: step.reshape(1),
    "int64 of shape (1, 1)": lambda step: step.to(torch.int64).reshape(1, 1),
}


@pytest.mark.parametrize("name", STEP_FORMS)
def test_a_step_in_any_form_is_loaded(name: str) -> None:
    optimizer, other = trained(fused_adamw.AdamW), fused_adamw.AdamW(make_params())
    copy_over(optimizer, other)
    form = STEP_FORMS[name]
    other.load_state_dict(changed(optimizer.state_dict(), lambda s: s.update(step=form(s["step"]))))
    for param in params_of(other):
        step = other.state[param]["step"]
        assert (step.dtype, step.shape, step.item()) == (torch.float32, (), 3.0)
    for each in (optimizer, other):
        go_on(each)
    assert_all_same_bits(tensors_of(other), tensors_of(optimizer))


def test_a_missing_maximum_is_made_when_amsgrad_needs_it() -> None:
    """As the maximum over the steps to come: torch's optimizer, given zeros, agrees."""
    without = trained(torch.optim.AdamW)
    ours = fused_adamw.AdamW(make_params(), amsgrad=True)
    copy_over(without, ours)
    for group in ours.param_groups:
        group["amsgrad"] = True
    torchs = torch.optim.AdamW(make_params(), amsgrad=True)
    with_zeros = changed(
        without.state_dict(), lambda s: s.update(max_exp_avg_sq=torch.zeros_like(s["exp_avg_sq"]))
    )
    copy_over(without, torchs)
    torchs.load_state_dict(with_zeros)
    for group in torchs.param_groups:
        group["amsgrad"] = True
    for each in (ours, torchs):
        go_on(each)
    torch.testing.assert_close(
        [t.detach() for t in tensors_of(ours)], [t.detach() for t in tensors_of(torchs)], rtol=1e-5, atol=1e-6
    )


def test_a_checkpoint_with_amsgrad_and_no_maximum_is_completed_on_load() -> None:
    state_dict = changed(
        trained(fused_adamw.AdamW, amsgrad=True).state_dict(), lambda state: state.pop("max_exp_avg_sq")
    )
    optimizer = fused_adamw.AdamW(make_params(), amsgrad=True)
    optimizer.load_state_dict(state_dict)
    for param in params_of(optimizer):
        assert optimizer.state[param]["max_exp_avg_sq"].count_nonzero() == 0


@pytest.mark.parametrize(
    "switches",
    [
        {"fused": True},
        {"fused": False},
        {"foreach": True},
        {"foreach": False},
        {"capturable": True},
        {"differentiable": True},
        {"decoupled_weight_decay": False},
    ],
    ids=str,
)
def test_a_checkpoint_does_not_switch_the_implementation(switches: dict[str, bool]) -> None:
    optimizer, other = trained(fused_adamw.AdamW), fused_adamw.AdamW(make_params())
    copy_over(optimizer, other)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for group in state_dict["param_groups"]:
        group.update(switches)
    other.load_state_dict(state_dict)
    for each in (optimizer, other):
        go_on(each)
    assert_all_same_bits(tensors_of(other), tensors_of(optimizer))
    for name in switches.keys() - {"capturable"}:  # a property of the tensors, which torch reads
        assert other.param_groups[0][name] == optimizer.param_groups[0][name]


def test_groups_of_an_old_checkpoint_are_completed() -> None:
    optimizer, other = trained(fused_adamw.AdamW), fused_adamw.AdamW(make_params(), maximize=True)
    copy_over(optimizer, other)
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for name in (
            "maximize",
            "foreach",
            "capturable",
            "differentiable",
            "fused",
            "decoupled_weight_decay",
        ):
            del group[name]
    other.load_state_dict(old)
    assert other.param_groups[0].keys() == optimizer.param_groups[0].keys()
    go_on(other)


def test_moments_in_another_order_of_memory_are_brought_to_the_parameters() -> None:
    """A checkpoint of a contiguous model for a channels_last one."""
    weights = [nn.Parameter(torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)))]
    optimizer = fused_adamw.AdamW(weights, amsgrad=True)
    gradients = make_gradients(weights, 4)
    train(optimizer, gradients[:2])
    channels_last = [nn.Parameter(weights[0].detach().clone(memory_format=torch.channels_last))]
    other = fused_adamw.AdamW(channels_last, amsgrad=True)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, gradients[2:])
    train(other, [[grad.to(memory_format=torch.channels_last) for grad in grads] for grads in gradients[2:]])
    assert channels_last[0].is_contiguous(memory_format=torch.channels_last)
    assert_all_same_bits([t.contiguous() for t in tensors_of(other)], tensors_of(optimizer))


def test_a_checkpoint_of_another_model_is_refused_in_the_words_of_torch() -> None:
    state_dict = trained(fused_adamw.AdamW).state_dict()
    messages = []
    for cls in BOTH.values():
        with pytest.raises(ValueError, match="parameter group") as caught:
            cls(make_params([(2,)])).load_state_dict(state_dict)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


# --- files, copies and pickles ------------------------------------------------------------------------------


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")


@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True, "lr": torch.tensor(0.1)}], ids=["default", "amsgrad"]
)
@pytest.mark.parametrize("source", BOTH)
def test_a_file_holds_the_state(source: str, options: dict[str, Any]) -> None:
    optimizer = trained(BOTH[source], **options)
    others = [fused_adamw.AdamW(make_params()), fused_adamw.AdamW(make_params())]
    for other in others:
        copy_over(optimizer, other)
    others[0].load_state_dict(through_a_file(optimizer.state_dict()))
    for other in others:
        go_on(other)
    assert_all_same_bits(*map(tensors_of, others))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True, "lr": torch.tensor(0.1)}], ids=["default", "amsgrad"]
)
def test_a_copy_goes_on_in_the_same_bits(duplicate: Callable[[Any], Any], options: dict[str, Any]) -> None:
    optimizer = trained(fused_adamw.AdamW, max_grad_norm=1e9, fused_step=False, **options)
    other = duplicate(optimizer)
    assert type(other) is fused_adamw.AdamW
    assert not {t.data_ptr() for t in tensors_of(other)} & {t.data_ptr() for t in tensors_of(optimizer)}
    settings = ("max_grad_norm", "nonfinite", "fused_step", "hierarchical_stats", "defaults")
    assert all(getattr(other, name) == getattr(optimizer, name) for name in settings)
    before = Snapshot(tensors_of(optimizer))
    go_on(other)
    before.assert_unchanged()
    go_on(optimizer)
    assert_all_same_bits(tensors_of(other), tensors_of(optimizer))


def test_a_copy_of_an_optimizer_before_its_first_step() -> None:
    optimizer = fused_adamw.AdamW(make_params())
    other = copy.deepcopy(optimizer)
    for each in (optimizer, other):
        go_on(each)
    assert_all_same_bits(tensors_of(other), tensors_of(optimizer))


# --- steps that change nothing ------------------------------------------------------------------------------


def test_a_skipped_first_step_leaves_a_state_that_torch_goes_on_from() -> None:
    skipping, reference = (
        fused_adamw.AdamW(make_params(), amsgrad=True),
        torch.optim.AdamW(make_params(), amsgrad=True),
    )
    skipping.found_inf = torch.tensor(1.0)
    train(skipping, make_gradients(params_of(skipping), 1))
    assert_all_same_bits(params_of(skipping), make_params())
    states = [t for param in params_of(skipping) for t in skipping.state[param].values()]
    assert len(states) == 4 * len(params_of(skipping))
    assert not any(t.count_nonzero() for t in states)

    other = torch.optim.AdamW(make_params(), amsgrad=True)
    copy_over(skipping, other)
    for each in (other, reference):
        go_on(each)
    assert_all_same_bits(tensors_of(other), tensors_of(reference))


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
def test_a_step_with_zero_gradients_at_lr_0_leaves_the_parameters(lr: Any) -> None:
    """Loaders of checkpoints make one, so that there is a state to load into."""
    optimizer = fused_adamw.AdamW(make_params())
    optimizer.load_state_dict(trained(torch.optim.AdamW).state_dict())
    for group in optimizer.param_groups:
        group["lr"] = lr
    train(optimizer, [[torch.zeros_like(param) for param in params_of(optimizer)]])
    assert_all_same_bits(params_of(optimizer), make_params())


def test_the_state_dict_of_a_distributed_checkpoint() -> None:
    """torch.distributed.checkpoint makes such a step, and gives the states the parameters' names."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def model_and_optimizer() -> tuple[nn.Module, fused_adamw.AdamW]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        return model, fused_adamw.AdamW(model.parameters(), amsgrad=True)

    (model, optimizer), (other_model, other) = model_and_optimizer(), model_and_optimizer()
    train(optimizer, make_gradients(params_of(optimizer), 2))
    state_dict = get_optimizer_state_dict(model, optimizer)
    assert set(state_dict["state"]["0.weight"]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}

    before = [param.detach().clone() for param in other_model.parameters()]
    set_optimizer_state_dict(other_model, other, copy.deepcopy(state_dict))
    assert_all_same_bits(list(other_model.parameters()), before)
    other_model.load_state_dict(model.state_dict())
    for each in (optimizer, other):
        go_on(each)
    assert_all_same_bits(tensors_of(other), tensors_of(optimizer))
