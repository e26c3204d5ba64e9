"""Checkpoints of master weights: what a ``state_dict`` shows, and where it can be loaded."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fused_adamw
from cases import Snapshot, assert_same_bits
from master_weights import (
    FORMS,
    all_forms,
    as_params,
    assert_masters_are,
    bfloat16_forms,
    float32_twin,
    gradients_for,
    make_rounded,
    make_values,
    master_optimizer,
    masters_of,
    moments_of,
    train_both,
)
from training import assert_all_same_bits, params_of, tensors_of, train

BEFORE, AFTER = 3, 3


def gradients_of(form: str) -> list[list[Tensor]]:
    dtype = FORMS[form][0]
    return gradients_for(make_rounded(dtype), BEFORE + AFTER, dtype)


def trained(form: str, **options: Any) -> tuple[fused_adamw.AdamW, torch.optim.Optimizer]:
    """An optimizer after some steps, and its float32 twin."""
    optimizer = master_optimizer(form, **options)
    twin = float32_twin(params_of(optimizer), **options)
    train_both(optimizer, twin, gradients_of(form)[:BEFORE])
    return optimizer, twin


def go_on(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer, form: str) -> None:
    train_both(optimizer, twin, gradients_of(form)[BEFORE:])


def copy_weights(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """What loading a model's weights does."""
    with torch.no_grad():
        for mine, other in zip(params_of(target), params_of(source), strict=True):
            mine.copy_(other)


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")


# --- what a state_dict shows --------------------------------------------------------------------------------


@all_forms
def test_a_state_dict_shows_float32_masters(form: str) -> None:
    optimizer, twin = trained(form, amsgrad=True)
    before = Snapshot(tensors_of(optimizer))
    states = optimizer.state_dict()["state"]
    before.assert_unchanged()
    assert list(states) == list(range(len(params_of(optimizer))))
    for i, (param, weight) in enumerate(zip(params_of(optimizer), params_of(twin), strict=True)):
        state = states[i]
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param"}
        assert_same_bits(state["master_param"], weight.detach())
        assert {t.dtype for t in state.values()} == {torch.float32}
        assert all(state[name].stride() == param.stride() for name in state.keys() - {"step"})


@all_forms
def test_only_what_was_updated_has_a_master_in_the_state_dict(form: str) -> None:
    optimizer = master_optimizer(form)
    [grads] = gradients_for(params_of(optimizer), 1, torch.float32)
    train(optimizer, [[grad if i in (1, 3) else None for i, grad in enumerate(grads)]])
    assert optimizer.state_dict()["state"].keys() == {1, 3}


@all_forms
def test_state_dict_hooks_see_float32_masters(form: str) -> None:
    """Those before saving, after saving, before loading and after loading."""
    optimizer, twin = trained(form)
    seen: list[str] = []

    def look(state_dict: dict[str, Any], name: str) -> None:
        seen.append(name)
        for i, weight in enumerate(params_of(twin)):
            assert_same_bits(state_dict["state"][i]["master_param"], weight.detach(), name)
            assert "master_remainder" not in state_dict["state"][i]
            assert all(type(value) is Tensor for value in state_dict["state"][i].values())

    def after_loading(loaded: torch.optim.Optimizer) -> None:
        seen.append("after loading")
        assert_all_same_bits(masters_of(loaded), [p.detach() for p in params_of(twin)])
        assert all(type(t) is Tensor for s in loaded.state.values() for t in s.values())

    optimizer.register_state_dict_pre_hook(lambda o: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda o, s: look(s, "after saving"))
    optimizer.register_state_dict_post_hook(lambda o, s: look(s, "after saving, first"), prepend=True)
    target = master_optimizer(form)
    target.register_load_state_dict_pre_hook(lambda o, s: look(s, "before loading"))
    target.register_load_state_dict_post_hook(after_loading)
    target.load_state_dict(optimizer.state_dict())
    assert seen == ["before saving", "after saving, first", "after saving", "before loading", "after loading"]
    for each, hooks in ((optimizer, 2), (target, 0)):
        assert len(each._optimizer_state_dict_post_hooks) == hooks
    assert len(target._optimizer_load_state_dict_pre_hooks) == 1


@all_forms
def test_a_hook_may_change_the_masters_that_are_loaded(form: str) -> None:
    optimizer, twin = trained(form)
    doubled = [2.0 * param.detach() for param in params_of(twin)]

    def double(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {i: {**s, "master_param": 2.0 * s["master_param"]} for i, s in state_dict["state"].items()}
        return {**state_dict, "state": states}

    target = master_optimizer(form)
    target.register_load_state_dict_pre_hook(double)
    target.load_state_dict(optimizer.state_dict())
    assert_all_same_bits(masters_of(target), doubled)
    continued = float32_twin(doubled)
    continued.load_state_dict(twin.state_dict())
    copy_weights(continued, target)
    go_on(target, continued, form)
    assert_masters_are(target, continued)


# --- round trips --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights_first", [True, False], ids=["weights first", "state first"])
@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True, "lr": torch.tensor(0.01)}], ids=["default", "amsgrad"]
)
@all_forms
def test_training_resumes_in_the_same_bits(form: str, options: dict[str, Any], weights_first: bool) -> None:
    optimizer, twin = trained(form, **options)
    dtype, own = FORMS[form]
    resumed = fused_adamw.AdamW(make_rounded(dtype, seed=7), **own)
    if weights_first:
        copy_weights(optimizer, resumed)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    if not weights_first:
        copy_weights(optimizer, resumed)
    assert_all_same_bits(masters_of(resumed), [p.detach() for p in params_of(twin)])
    gradients = gradients_of(form)[BEFORE:]
    go_on(optimizer, twin, form)
    train(resumed, gradients)
    assert_masters_are(resumed, twin)
    assert_all_same_bits(tensors_of(resumed), tensors_of(optimizer))


@pytest.mark.parametrize("weights_first", [True, False], ids=["weights first", "state first"])
@pytest.mark.parametrize("target", [form for form in FORMS if form.startswith("bf16")])
@bfloat16_forms
def test_training_goes_on_in_another_form(form: str, target: str, weights_first: bool) -> None:
    """The switches are those of the target, whatever the checkpoint's groups say."""
    optimizer, twin = trained(form, amsgrad=True)
    other = master_optimizer(target)
    seed = other.param_groups[0].get("rounding_seed")
    if weights_first:
        copy_weights(optimizer, other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.param_groups[0]["rounding_seed"] = seed
    if not weights_first:
        copy_weights(optimizer, other)
    assert_all_same_bits(masters_of(other), [p.detach() for p in params_of(twin)])
    go_on(other, twin, target)
    assert_masters_are(other, twin)
    kept = "master_remainder" if target == "bf16 split" else "master_param"
    for param in params_of(other):
        assert {name for name in other.state[param] if name.startswith("master_")} == {kept}


@pytest.mark.parametrize("how", ["by a checkpoint", "between steps"])
@pytest.mark.parametrize("form", ["bf16 by chance", "fp16 by chance"])
def test_training_goes_on_rounding_to_the_nearest(form: str, how: str) -> None:
    """What was rounded by chance is no weight that someone else wrote."""
    optimizer, twin = trained(form)
    if how == "by a checkpoint":
        other = fused_adamw.AdamW(as_params(params_of(optimizer), FORMS[form][0]), split_masters=False)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer = other
    else:
        optimizer.split_masters = False
    optimizer.param_groups[0]["rounding_seed"] = None
    go_on(optimizer, twin, form)
    assert_masters_are(optimizer, twin)


def test_a_tie_beside_a_remainder_goes_on_as_a_whole_master() -> None:
    """Halfway between two numbers a remainder goes with the greater, a float32 master with the even one."""
    ties = ((torch.arange(1, 2001, dtype=torch.int32) << 16) + 0x3F808000).view(torch.float32)
    optimizer = fused_adamw.AdamW([nn.Parameter(torch.zeros(2000, dtype=torch.bfloat16))], lr=0.0)
    [param] = params_of(optimizer)
    optimizer.set_master_param(param, ties)
    other = fused_adamw.AdamW(as_params([param], torch.bfloat16), lr=0.0, split_masters=False)
    other.load_state_dict(optimizer.state_dict())
    train(other, [[torch.zeros(2000, dtype=torch.bfloat16)]])
    assert_same_bits(other.master_param(params_of(other)[0]), ties)
    assert_same_bits(params_of(other)[0].detach(), ties.bfloat16())


@pytest.mark.parametrize("target", [form for form in FORMS if form.startswith("bf16")])
@bfloat16_forms
def test_a_loaded_checkpoint_is_saved_again_as_it_was(form: str, target: str) -> None:
    """Before the first step, which is when the form of the masters changes."""
    optimizer, _ = trained(form)
    other = master_optimizer(target)
    copy_weights(optimizer, other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    saved, again = optimizer.state_dict(), other.state_dict()
    # Rounding by chance is the optimizer's choice where the checkpoint has no seed.
    seeds = [sd["param_groups"][0].pop("rounding_seed", None) for sd in (saved, again)]
    assert seeds[0] in (None, seeds[1])
    assert saved["param_groups"] == again["param_groups"]
    for i, state in saved["state"].items():
        assert state.keys() == again["state"][i].keys()
        assert_all_same_bits([again["state"][i][name] for name in state], list(state.values()))


@all_forms
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_a_copy_goes_on_in_the_same_bits(duplicate: Callable[[Any], Any], form: str) -> None:
    optimizer, twin = trained(form)
    optimizer.stale_master = "error"
    other = duplicate(optimizer)
    assert (other.split_masters, other.stale_master) == (optimizer.split_masters, "error")
    before = Snapshot(tensors_of(optimizer))
    go_on(other, twin, form)
    assert_masters_are(other, twin)
    before.assert_unchanged()
    train(optimizer, gradients_of(form)[BEFORE:])
    assert_all_same_bits(tensors_of(other), tensors_of(optimizer))


@all_forms
def test_a_model_and_its_optimizer_are_copied_together(form: str) -> None:
    dtype, own = FORMS[form]
    model = nn.ParameterList(make_rounded(dtype))
    optimizer = fused_adamw.AdamW(model.parameters(), **own)
    train(optimizer, gradients_of(form)[:BEFORE])
    other_model, other = copy.deepcopy((model, optimizer))
    assert all(a is b for a, b in zip(params_of(other), other_model, strict=True))
    for each in (optimizer, other):
        train(each, gradients_of(form)[BEFORE:])
    assert_all_same_bits(tensors_of(other), tensors_of(optimizer))


@pytest.mark.parametrize("name", ["missing", "of 16 bits"])
@all_forms
def test_a_state_without_masters_goes_on_from_the_parameters(form: str, name: str) -> None:
    """One in which someone rounded them too: they are float32 again then."""
    optimizer, twin = trained(form)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state, param in zip(state_dict["state"].values(), params_of(optimizer), strict=True):
        del state["master_param"]
        if name == "of 16 bits":
            state["master_param"] = param.detach().clone()
    other = master_optimizer(form)
    copy_weights(optimizer, other)
    other.load_state_dict(state_dict)
    copy_weights(optimizer, twin)
    go_on(other, twin, form)
    assert_masters_are(other, twin)


def test_masters_in_another_order_of_memory_are_brought_to_the_parameters() -> None:
    for split in (True, False):
        value = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
        contiguous = as_params([value], torch.bfloat16)
        gradients = gradients_for(contiguous, 4, torch.bfloat16)
        optimizer = fused_adamw.AdamW(contiguous, split_masters=split)
        train(optimizer, gradients[:2])
        last = as_params([contiguous[0].detach().to(memory_format=torch.channels_last)], torch.bfloat16)
        other = fused_adamw.AdamW(last, split_masters=split)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(optimizer, gradients[2:])
        train(other, [[g.to(memory_format=torch.channels_last) for g in grads] for grads in gradients[2:]])
        assert last[0].is_contiguous(memory_format=torch.channels_last)
        assert_same_bits(*(o.master_param(params_of(o)[0]).contiguous() for o in (other, optimizer)))
        assert_same_bits(last[0].detach().contiguous(), contiguous[0].detach())


# --- float32 training and torch.optim.AdamW -----------------------------------------------------------------


@pytest.mark.parametrize("cls", [torch.optim.AdamW, fused_adamw.AdamW], ids=["torch", "ours"])
@all_forms
def test_from_float32_training(form: str, cls: type) -> None:
    """The moments by the state_dict, the weights by ``set_master_param``."""
    dtype, own = FORMS[form]
    source = cls(as_params(make_values(), torch.float32), lr=0.01)
    train(source, gradients_for(params_of(source), BEFORE, torch.float32))
    twin = float32_twin(params_of(source))
    optimizer = fused_adamw.AdamW(as_params(make_values(seed=9), dtype), **own)
    for each in (twin, optimizer):
        each.load_state_dict(copy.deepcopy(source.state_dict()))
    assert ("rounding_seed" in optimizer.param_groups[0]) == own.get("stochastic_rounding", False)
    for param, weight in zip(params_of(optimizer), params_of(source), strict=True):
        optimizer.set_master_param(param, weight)
    go_on(optimizer, twin, form)
    assert_masters_are(optimizer, twin)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, fused_adamw.AdamW], ids=["torch", "ours"])
@all_forms
def test_back_to_float32_training(form: str, cls: type) -> None:
    """The same as from a float32 run: torch's update of equal values has equal bits."""
    optimizer, twin = trained(form, amsgrad=True)
    results = []
    for source, weights in ((optimizer, masters_of(optimizer)), (twin, params_of(twin))):
        target = cls(as_params(weights, torch.float32), amsgrad=True)
        target.load_state_dict(through_a_file(source.state_dict()))
        train(target, [[g.float() for g in grads] for grads in gradients_of(form)[BEFORE:]])
        results.append([*params_of(target), *moments_of(target)])
    assert_all_same_bits(*results)


def test_a_float32_parameter_keeps_no_master_of_a_checkpoint() -> None:
    """Nothing would bring it up to date, and 16-bit training would go on from it."""
    optimizer, _ = trained("bf16 split")
    target = float32_twin(params_of(optimizer))
    target.load_state_dict(optimizer.state_dict())
    for state in target.state_dict()["state"].values():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
@all_forms
def test_from_torch_with_16_bit_moments(form: str, options: dict[str, Any]) -> None:
    """Which become float32, and the parameters are the weights to go on from."""
    dtype, own = FORMS[form]
    source = torch.optim.AdamW(make_rounded(dtype), eps=1e-4, **options)
    train(source, gradients_of(form)[:BEFORE])
    assert {m.dtype for m in moments_of(source)} == {torch.float32, dtype}
    optimizer = fused_adamw.AdamW(as_params(params_of(source), dtype), **own)
    optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    twin = float32_twin(params_of(source))
    twin.load_state_dict(copy.deepcopy(source.state_dict()))
    assert_all_same_bits(moments_of(optimizer), [m.float() for m in moments_of(source)])
    go_on(optimizer, twin, form)
    assert_masters_are(optimizer, twin)
    assert ("rounding_seed" in optimizer.param_groups[0]) == own.get("stochastic_rounding", False)


@all_forms
def test_back_to_torch_with_16_bit_parameters(form: str) -> None:
    """It rounds the moments; the weights are the parameters."""
    dtype = FORMS[form][0]
    optimizer, _ = trained(form)
    target = torch.optim.AdamW(as_params(params_of(optimizer), dtype))
    target.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, other in zip(params_of(optimizer), params_of(target), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(target.state[other][name], optimizer.state[param][name].to(dtype))
        assert target.state[other]["step"] == optimizer.state[param]["step"]
    train(target, gradients_of(form)[BEFORE:])


# --- never in 16 bits ---------------------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Counts the calls that make a 16-bit floating-point tensor of a wider one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        narrow = (torch.float16, torch.bfloat16)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if any(t.dtype in narrow for t in made) and any(t.dtype not in narrow for t in given):
            self.count += 1
        return result


@contextmanager
def no_casts() -> Iterator[None]:
    with Casts() as casts:
        yield
    assert casts.count == 0


@all_forms
def test_nothing_is_ever_cast_to_16_bits(form: str) -> None:
    """But the parameters, by a step; torch's own loading casts all moments, which shows that it is seen."""
    optimizer, _ = trained(form, amsgrad=True)
    with no_casts():
        state_dict = optimizer.state_dict()
    with no_casts():
        copy.deepcopy(optimizer)
    other = master_optimizer(form)
    with no_casts():
        other.load_state_dict(state_dict)
    with no_casts():
        masters_of(other)
    torchs = torch.optim.AdamW(make_rounded(FORMS[form][0]))
    with Casts() as casts:
        torchs.load_state_dict(state_dict)
    assert casts.count >= 3 * len(params_of(torchs))
