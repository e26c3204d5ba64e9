"""``AdamW``: beside torch.optim.AdamW and the float64 oracle, in all the ways an optimizer is used."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fused_adamw
from cases import Snapshot, assert_same_bits
from fused_adamw import hooks
from training import (
    advance,
    assert_all_same_bits,
    assert_as_accurate_as_torch,
    error,
    make_gradients,
    make_params,
    oracles_of,
    params_of,
    refusal,
    set_gradients,
    tensors_of,
    train,
)

STEPS = 20

BOTH = [fused_adamw.AdamW, torch.optim.AdamW]

# --- beside torch and the oracle ----------------------------------------------------------------------------

# Options of all groups, and of each: parameter i is in group i modulo their number.
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "default": ({}, [{}]),
    "amsgrad": ({"amsgrad": True}, [{}]),
    "maximize": ({"maximize": True}, [{}]),
    "no decay": ({"weight_decay": 0.0}, [{}]),
    "strong decay": ({"weight_decay": 0.5, "lr": 0.1}, [{}]),
    "betas of 0": ({"betas": (0.0, 0.0)}, [{}]),
    "large eps": ({"eps": 0.1}, [{}]),
    "lr of 0": ({"lr": 0.0}, [{}]),
    "tensor lr": ({"lr": torch.tensor(0.02)}, [{}]),
    "tensor lr of shape (1,)": ({"lr": torch.tensor([0.02], dtype=torch.float64)}, [{}]),
    "tensor betas": ({"betas": (torch.tensor(0.8), torch.tensor(0.95))}, [{}]),
    "groups": (
        {"lr": 0.01},
        [
            {"weight_decay": 0.0, "betas": (0.5, 0.9)},
            {"lr": 0.1, "amsgrad": True},
            {"maximize": True, "eps": 1e-3},
        ],
    ),
}


def grouped(params: list[nn.Parameter], options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"params": params[i :: len(options)], **group} for i, group in enumerate(options)]


def as_numbers(group: dict[str, Any]) -> dict[str, Any]:
    """The options that the oracle takes from a group as it is now."""
    names = ("eps", "weight_decay", "amsgrad", "maximize")
    betas = tuple(map(float, group["betas"]))
    return {"lr": float(group["lr"]), "betas": betas, **{name: group[name] for name in names}}


def compare(
    defaults: dict[str, Any],
    options: list[dict[str, Any]],
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    steps: int = STEPS,
) -> None:
    """Trains with torch, with ours and with the oracle, which follows the options of torch's groups."""
    trained: dict[type, list[Tensor]] = {}
    seen: dict[type, list[list[dict[str, Any]]]] = defaultdict(list)
    gradients = make_gradients(make_params(), steps)
    for cls in BOTH:
        params = make_params()
        optimizer = cls(grouped(params, options), **copy.deepcopy(defaults))
        scheduler = None if schedule is None else schedule(optimizer)
        for step, grads in enumerate(gradients):
            set_gradients(params, grads)
            seen[cls].append([as_numbers(group) for group in optimizer.param_groups])
            optimizer.step()
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(1.0 + step // 7)
            elif scheduler is not None:
                scheduler.step()
        trained[cls] = params
    assert seen[fused_adamw.AdamW] == seen[torch.optim.AdamW]

    oracles = oracles_of(make_params())
    for step, grads in enumerate(gradients):
        for i, oracle in enumerate(oracles):
            for name, value in seen[torch.optim.AdamW][step][i % len(options)].items():
                setattr(oracle, name, value)
        advance(oracles, [grads])
    assert_as_accurate_as_torch(trained[fused_adamw.AdamW], trained[torch.optim.AdamW], oracles)


@pytest.mark.parametrize("name", CASES)
def test_as_accurate_as_torch(name: str) -> None:
    compare(*CASES[name])


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=3, gamma=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2, factor=0.3),
}


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_follows_a_scheduler_as_torch_does(name: str, lr: float | Tensor) -> None:
    compare({"lr": lr}, [{"weight_decay": 0.1}, {"amsgrad": True}], SCHEDULES[name])


def test_a_scheduler_of_betas_is_followed() -> None:
    """That the test above does change betas from step to step."""
    optimizer = fused_adamw.AdamW(make_params())
    scheduler = SCHEDULES["OneCycleLR"](optimizer)
    betas = set()
    for _ in range(STEPS):
        betas.add(optimizer.param_groups[0]["betas"])
        optimizer.step()
        scheduler.step()
    assert len(betas) > STEPS // 2


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_tensor_lr_gives_the_bits_of_the_number_it_holds(shape: tuple[int, ...]) -> None:
    def trained(lr: float | Tensor) -> list[Tensor]:
        optimizer = fused_adamw.AdamW(make_params(), lr=lr)
        train(optimizer, make_gradients(params_of(optimizer), 3))
        return tensors_of(optimizer)

    assert_all_same_bits(trained(torch.full(shape, 0.1, dtype=torch.float64)), trained(0.1))
    assert_all_same_bits(trained(torch.full(shape, 0.1)), trained(torch.tensor(0.1).item()))


def test_a_group_for_each_of_465_parameters() -> None:
    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {
                "params": [param],
                "lr": 1e-3 * (1 + i % 28),
                "weight_decay": 0.1 * (i % 3),
                "amsgrad": i % 2 == 0,
            }
            for i, param in enumerate(params)
        ]

    shapes = [(i % 5, 3) for i in range(465)]
    params = make_params(shapes)
    gradients = make_gradients(params, 3)
    oracles = [
        oracles_of([param], **group)[0]
        for param, group in zip(params, without_params(groups(params)), strict=True)
    ]
    train(fused_adamw.AdamW(groups(params)), gradients)
    advance(oracles, gradients)
    filled = [i for i, shape in enumerate(shapes) if shape[0]]
    assert error([params[i] for i in filled], [oracles[i] for i in filled]) < 1e-6


def without_params(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def test_channels_last_parameters_give_the_bits_of_contiguous_ones() -> None:
    trained = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
        optimizer = fused_adamw.AdamW(model.parameters(), amsgrad=True)
        gradients = make_gradients([torch.empty(p.shape) for p in model.parameters()], 3)
        for grads in gradients:
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = torch.empty_like(param).copy_(grad)
            optimizer.step()
        assert optimizer.state[model.weight]["exp_avg"].stride() == model.weight.stride()
        trained.append([tensor.detach().contiguous() for tensor in tensors_of(optimizer)])
    assert_all_same_bits(*trained)


# --- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_gradients_from_autograd(dtype: torch.dtype) -> None:
    """torch's optimizer gets the same gradients in float32."""
    inputs = torch.randn(STEPS, 7, generator=torch.Generator().manual_seed(3))
    params, twins = make_params([(5, 7)]), make_params([(5, 7)])
    optimizer, reference = fused_adamw.AdamW(params), torch.optim.AdamW(twins)
    params[0].grad_dtype = dtype
    oracles = oracles_of(params)
    for x in inputs:
        optimizer.zero_grad()
        (params[0] @ x).square().sum().backward()
        assert params[0].grad.dtype is dtype
        twins[0].grad = params[0].grad.float()
        advance(oracles, [[params[0].grad]])
        optimizer.step()
        reference.step()
    assert_as_accurate_as_torch(params, twins, oracles)


def test_gradients_of_different_dtypes_in_one_group() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float32)
    gradients = [
        [grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]
        for grads in make_gradients(make_params(), STEPS)
    ]
    params = make_params()
    train(fused_adamw.AdamW(params), gradients)
    twins = make_params()
    train(torch.optim.AdamW(twins), [[grad.float() for grad in grads] for grads in gradients])
    oracles = oracles_of(make_params())
    advance(oracles, gradients)
    assert_as_accurate_as_torch(params, twins, oracles)


def test_gradients_are_only_read() -> None:
    params = make_params()
    [grads] = make_gradients(params, 1)
    set_gradients(params, grads)
    before = Snapshot([param.grad for param in params])
    fused_adamw.AdamW(params).step()
    before.assert_unchanged()


def test_parameters_without_gradients_are_left_alone() -> None:
    """Gradients come and go; each parameter counts its own steps."""
    pattern = ["1010", "0110", "0000", "1111", "1110", "0001", "1111", "1111"]
    gradients = [
        [grad if present == "1" else None for grad, present in zip(grads, row, strict=True)]
        for grads, row in zip(make_gradients(make_params(), len(pattern)), pattern, strict=True)
    ]
    trained = {}
    for cls in BOTH:
        params = make_params()
        optimizer = cls(grouped(params, [{"amsgrad": True}, {"lr": 0.1}]))
        in_order = [[grads[i] for i in (0, 2, 1, 3)] for grads in gradients]  # by group
        train(optimizer, in_order[:1])
        assert [param in optimizer.state for param in params] == [True, False, True, False]
        assert_all_same_bits([params[1], params[3]], [make_params()[1], make_params()[3]])
        train(optimizer, in_order[1:])
        counts = [sum(row[i] == "1" for row in pattern) for i in range(4)]
        assert [optimizer.state[param]["step"].item() for param in params] == counts
        trained[cls] = params
    oracles = [
        oracle
        for i, param in enumerate(make_params())
        for oracle in oracles_of([param], **({"lr": 0.1} if i % 2 else {"amsgrad": True}))
    ]
    advance(oracles, gradients)
    assert_as_accurate_as_torch(*trained.values(), oracles)


def test_without_any_gradient_a_step_does_nothing() -> None:
    params = make_params()
    optimizer = fused_adamw.AdamW(grouped(params, [{}, {}]))
    before = Snapshot(params)
    assert optimizer.step() is None
    before.assert_unchanged()
    assert not optimizer.state


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    """Zero gradients are gradients: the moments decay and the steps count."""
    params = make_params()
    optimizer = fused_adamw.AdamW(params)
    [grads] = make_gradients(params, 1)
    train(optimizer, [grads])
    optimizer.zero_grad(set_to_none=set_to_none)
    before = Snapshot(tensors_of(optimizer))
    optimizer.step()
    if set_to_none:
        assert all(param.grad is None for param in params)
        before.assert_unchanged()
    else:
        oracles = oracles_of(make_params())
        advance(oracles, [grads, [torch.zeros_like(grad) for grad in grads]])
        assert error(params, oracles) < 1e-6
        assert all(optimizer.state[param]["step"] == 2 for param in params)


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
def test_lr_of_0_moves_the_moments_only(lr: float | Tensor) -> None:
    params = make_params()
    optimizer = fused_adamw.AdamW(params, lr=lr, weight_decay=0.5)
    before = [param.detach().clone() for param in params]
    zeros = [torch.zeros_like(param) for param in params]
    train(optimizer, [zeros, *make_gradients(params, 2)])
    assert_all_same_bits(params, before)
    assert all(optimizer.state[param]["exp_avg"].count_nonzero() == param.numel() for param in params)


def test_an_empty_parameter_is_left_alone() -> None:
    params = make_params([(0,), (3,), (2, 0)])
    optimizer = fused_adamw.AdamW(params)
    train(optimizer, make_gradients(params, 2))
    assert [optimizer.state[param]["step"].item() for param in params] == [0.0, 2.0, 0.0]


# --- the plan that an optimizer keeps between steps never goes stale ----------------------------------------


def set_data(optimizer: torch.optim.Optimizer) -> None:
    for param in params_of(optimizer):
        param.data = param.detach() * 2.0


def reshape_data_and_forget(optimizer: torch.optim.Optimizer) -> None:
    param = params_of(optimizer)[0]
    param.grad = None
    param.data = param.detach()[:3].clone()
    del optimizer.state[param]


def replace_entry(name: str) -> Callable[[torch.optim.Optimizer], None]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        state = optimizer.state[params_of(optimizer)[1]]
        state[name] = state[name] + 1.0

    return change


def replace_data_of_entry(optimizer: torch.optim.Optimizer) -> None:
    entry = optimizer.state[params_of(optimizer)[1]]["exp_avg"]
    entry.data = entry + 1.0


def remove_entry(name: str) -> Callable[[torch.optim.Optimizer], None]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        del optimizer.state[params_of(optimizer)[0]][name]

    return change


def replace_state_of_parameter(optimizer: torch.optim.Optimizer) -> None:
    param = params_of(optimizer)[2]
    optimizer.state[param] = {name: entry + 1.0 for name, entry in optimizer.state[param].items()}


def replace_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = defaultdict(
        dict, {p: {n: e + 1.0 for n, e in state.items()} for p, state in optimizer.state.items()}
    )


def clear_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def forget_one_parameter(optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[params_of(optimizer)[0]]


def swap_states(optimizer: torch.optim.Optimizer) -> None:
    first, second = (group["params"][0] for group in optimizer.param_groups)
    optimizer.state[first], optimizer.state[second] = optimizer.state[second], optimizer.state[first]


def swap_keys_of_states(optimizer: torch.optim.Optimizer) -> None:
    """The same states in the same order, of other parameters."""
    first, second = (group["params"][0] for group in optimizer.param_groups)
    other = {first: second, second: first}
    optimizer.state = defaultdict(dict, {other.get(p, p): state for p, state in optimizer.state.items()})


def note_of_someone_else(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[params_of(optimizer)[0]]["note"] = torch.ones(2)


def state_of_something_else(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state["note"] = 7  # type: ignore[index]


def swap_with_new_parameter(optimizer: torch.optim.Optimizer) -> None:
    """What ``Module.to`` and ``Module.load_state_dict`` can be told to do (torch.__future__)."""
    param = params_of(optimizer)[0]
    param.grad = None
    torch.utils.swap_tensors(param, nn.Parameter(param.detach() * 2.0))


def add_parameter_to_list(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] += make_params([(4, 4)], seed=5)


def remove_parameter_from_list(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop(0)


def replace_parameter_in_list(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][:1] = make_params([(5, 7)], seed=5)


def replace_list(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] = make_params([(4, 4), (3,)], seed=5)


def reverse_lists(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["params"].reverse()


def add_group(optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": make_params([(4, 4)], seed=5), "lr": 0.5})


def remove_group(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups.pop(0)


def swap_groups(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups.reverse()


def move_parameter_to_another_group(optimizer: torch.optim.Optimizer) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


def set_option(name: str, value: Any) -> Callable[[torch.optim.Optimizer], None]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group[name] = value

    return change


def load_own_state_dict(optimizer: torch.optim.Optimizer) -> None:
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        state["exp_avg"] += 1.0
    optimizer.load_state_dict(state_dict)


CHANGES: dict[str, Callable[[torch.optim.Optimizer], None]] = {
    "nothing": lambda optimizer: None,
    "data of the parameters": set_data,
    "shape of a parameter": reshape_data_and_forget,
    "exp_avg": replace_entry("exp_avg"),
    "exp_avg_sq": replace_entry("exp_avg_sq"),
    "max_exp_avg_sq": replace_entry("max_exp_avg_sq"),
    "step": replace_entry("step"),
    "data of exp_avg": replace_data_of_entry,
    "no exp_avg": remove_entry("exp_avg"),
    "no max_exp_avg_sq": remove_entry("max_exp_avg_sq"),
    "no step": remove_entry("step"),
    "state of a parameter": replace_state_of_parameter,
    "state": replace_state,
    "no state": clear_state,
    "no state of one parameter": forget_one_parameter,
    "states swapped": swap_states,
    "keys of states swapped": swap_keys_of_states,
    "a note of someone else": note_of_someone_else,
    "a state of something else": state_of_something_else,
    "parameter swapped with a new one": swap_with_new_parameter,
    "parameter added to the list": add_parameter_to_list,
    "parameter removed from the list": remove_parameter_from_list,
    "parameter replaced in the list": replace_parameter_in_list,
    "list replaced": replace_list,
    "lists reversed": reverse_lists,
    "group added": add_group,
    "group removed": remove_group,
    "groups swapped": swap_groups,
    "parameter moved to another group": move_parameter_to_another_group,
    "amsgrad off": set_option("amsgrad", False),
    "amsgrad on": set_option("amsgrad", True),
    "lr": set_option("lr", 0.5),
    "tensor lr": set_option("lr", torch.tensor(0.5)),
    "betas": set_option("betas", (0.1, 0.2)),
    "maximize": set_option("maximize", True),
    "weight decay": set_option("weight_decay", 0.9),
    "state_dict": load_own_state_dict,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_steps_is_noticed(name: str) -> None:
    """A copy of the optimizer, which has no plan, takes the same step; so does torch's optimizer."""
    amsgrad = name != "amsgrad on"
    optimizers = [
        cls(
            grouped(make_params(((5, 7), (5, 7), (33,), (2, 3))), [{"lr": 0.1}, {"maximize": True}]),
            amsgrad=amsgrad,
        )
        for cls in BOTH
    ]
    ours, torchs = optimizers
    before_change = make_gradients(params_of(ours), 3)
    for optimizer in optimizers:
        train(optimizer, before_change)
        CHANGES[name](optimizer)
    unplanned = copy.deepcopy(ours)

    after_change = make_gradients(params_of(ours), 2, seed=7)
    for optimizer in (ours, unplanned):
        train(optimizer, after_change)
    assert_all_same_bits(tensors_of(ours), tensors_of(unplanned))

    if name not in ("no exp_avg", "no max_exp_avg_sq", "no step", "amsgrad on"):  # torch: KeyError
        train(torchs, after_change)
        torch.testing.assert_close(
            [p.detach() for p in params_of(ours)],
            [p.detach() for p in params_of(torchs)],
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.parametrize("name", ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
def test_a_plan_keeps_no_storage_that_a_state_no_longer_has(name: str) -> None:
    """States are moved to the CPU and back in this way, to make room."""
    params = make_params()
    optimizer = fused_adamw.AdamW(params, amsgrad=True)
    train(optimizer, make_gradients(params, 2))
    entry = optimizer.state[params[0]][name]
    storage = StorageWeakRef(entry.untyped_storage())
    entry.data = entry.clone()
    assert storage.expired()


def attribute_of_a_parameter(optimizer: torch.optim.Optimizer) -> None:
    params_of(optimizer)[0].owner = optimizer  # type: ignore[attr-defined]


def hook_of_a_parameter(optimizer: torch.optim.Optimizer) -> None:
    params_of(optimizer)[0].register_hook(lambda _: optimizer.zero_grad())


def note_in_a_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[params_of(optimizer)[0]]["note"] = optimizer.step


@pytest.mark.parametrize("refer", [attribute_of_a_parameter, hook_of_a_parameter, note_in_a_state])
@pytest.mark.parametrize("cls", BOTH)
def test_an_optimizer_that_its_parameters_refer_to_is_collected(
    cls: type[torch.optim.Optimizer], refer: Callable[[torch.optim.Optimizer], None]
) -> None:
    """Only the garbage collector finds the cycle, so a plan must not hide from it what it holds."""

    def make() -> tuple[weakref.ref[Any], list[StorageWeakRef]]:
        params = make_params()
        optimizer = cls(params)
        train(optimizer, make_gradients(params, 2))
        tensors = tensors_of(optimizer)
        refer(optimizer)
        train(optimizer, make_gradients(params, 2))
        return weakref.ref(optimizer), [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    optimizer, storages = make()
    gc.collect()
    assert optimizer() is None
    assert all(storage.expired() for storage in storages)


def test_gradients_of_another_dtype_are_noticed() -> None:
    params, twins = make_params(), make_params()
    optimizer, twin = fused_adamw.AdamW(params), fused_adamw.AdamW(twins)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
        [grads] = make_gradients(params, 1, dtype)
        train(optimizer, [grads])
        train(twin, [[grad.float() for grad in grads]])  # exact
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))


def test_data_of_another_shape_than_the_state_is_refused() -> None:
    params = make_params()
    optimizer = fused_adamw.AdamW(params)
    train(optimizer, make_gradients(params, 2))
    params[0].grad = None
    params[0].data = torch.zeros(3, 7)
    params[0].grad = torch.ones(3, 7)
    before = Snapshot(tensors_of(optimizer))
    assert_expected_inline(
        refusal(optimizer.step),
        """\
ValueError: fused_adamw::step_: exp_avgs[0] has shape (5, 7); (3, 7), the parameter's, is required""",
    )
    before.assert_unchanged()


# --- closures and hooks -------------------------------------------------------------------------------------


def test_a_closure_runs_once_with_gradients_enabled_and_its_loss_is_returned() -> None:
    trained = {}
    for cls in BOTH:
        params = make_params([(5,)])
        optimizer = cls(params, lr=0.1)
        calls = []

        def closure(params: Any = params, optimizer: Any = optimizer, calls: Any = calls) -> Tensor:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = params[0].square().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(5)]
        assert calls == [True] * 5
        assert losses[0].item() == make_params([(5,)])[0].square().sum().item()
        trained[cls] = [params[0].detach(), *(loss.detach() for loss in losses)]
    torch.testing.assert_close(*trained.values(), rtol=1e-5, atol=1e-6)


def test_a_closure_runs_under_no_grad_too() -> None:
    params = make_params([(5,)])
    optimizer = fused_adamw.AdamW(params)

    def closure() -> Tensor:
        loss = params[0].sum()
        loss.backward()
        return loss

    with torch.no_grad():
        optimizer.step(closure)
    assert optimizer.state[params[0]]["step"] == 1


def test_step_hooks() -> None:
    params = make_params()
    optimizer = fused_adamw.AdamW(params)
    seen: list[tuple[str, Any]] = []

    def before(found: Any, args: Any, kwargs: Any) -> None:
        assert found is optimizer
        seen.append(("before", optimizer.state[params[0]]["step"].item() if optimizer.state else 0))
        for param in params:
            param.grad.mul_(2.0)

    def after(found: Any, args: Any, kwargs: Any) -> None:
        assert found is optimizer
        seen.append(("after", optimizer.state[params[0]]["step"].item()))

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    gradients = make_gradients(params, 3)
    train(optimizer, gradients[:2])
    assert seen == [("before", 0), ("after", 1), ("before", 1), ("after", 2)]
    for handle in handles:
        handle.remove()
    train(optimizer, gradients[2:])
    assert len(seen) == 4

    twins = make_params()
    train(
        fused_adamw.AdamW(twins), [[2.0 * grad for grad in grads] for grads in gradients[:2]] + gradients[2:]
    )
    assert_all_same_bits(params, twins)


@pytest.mark.parametrize("before", [True, False])
def test_step_hooks_of_all_optimizers(before: bool) -> None:
    optimizers = [fused_adamw.AdamW(make_params()) for _ in range(2)]
    seen: list[Any] = []

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        seen.append(optimizer)

    register = register_optimizer_step_pre_hook if before else register_optimizer_step_post_hook
    handle = register(hook)
    try:
        for optimizer in optimizers:
            optimizer.step()
    finally:
        handle.remove()
    assert seen == optimizers
    optimizers[0].step()
    assert len(seen) == 2


def test_a_hook_may_change_the_arguments() -> None:
    optimizer = fused_adamw.AdamW(make_params())
    optimizer.register_step_pre_hook(lambda own, args, kwargs: (args, {"closure": lambda: 7.0}))
    assert optimizer.step() == 7.0


def mark_of_two_steps(cls: type[fused_adamw.AdamW]) -> Any:
    """What a profile of two steps shows of them."""
    params = make_params()
    optimizer = cls(params)
    train(optimizer, make_gradients(params, 2))
    # Without acc_events torch 2.11 warns.
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        train(optimizer, make_gradients(params, 2))
    [mark] = [event for event in profile.key_averages() if event.key.startswith("Optimizer.step")]
    return mark


class Renamed(fused_adamw.AdamW):
    """A class of a user."""


@pytest.mark.parametrize("cls", [fused_adamw.AdamW, Renamed])
def test_a_profile_shows_the_step(cls: type[fused_adamw.AdamW]) -> None:
    mark = mark_of_two_steps(cls)
    assert (mark.key, mark.count) == (f"Optimizer.step#{cls.__name__}.step", 2)
    assert mark.is_user_annotation  # as torch marks it, not as an operator


def test_a_profile_that_python_does_not_know_of_shows_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_is_observed", lambda optimizer: False)
    mark = mark_of_two_steps(fused_adamw.AdamW)
    assert (mark.key, mark.count) == ("Optimizer.step#AdamW.step", 2)


def test_state_dict_hooks() -> None:
    params = make_params()
    optimizer = fused_adamw.AdamW(params)
    train(optimizer, make_gradients(params, 1))
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "note": 7})
    state_dict = optimizer.state_dict()
    assert state_dict["note"] == 7

    def without_note(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in state_dict.items() if name != "note"}

    loaded = []
    other = fused_adamw.AdamW(make_params())
    other.register_load_state_dict_pre_hook(without_note)
    other.register_load_state_dict_post_hook(lambda o: loaded.append(o.state[params_of(o)[0]]["step"].item()))
    other.load_state_dict(state_dict)
    assert loaded == [1.0]


# --- how parameters are given -------------------------------------------------------------------------------


def ways_to_give_parameters(model: nn.Module) -> dict[str, Any]:
    weights, biases = [model[0].weight, model[1].weight], [model[0].bias, model[1].bias]
    return {
        "generator": model.parameters(),
        "list": list(model.parameters()),
        "tuple": tuple(model.parameters()),
        "names": model.named_parameters(),
        "groups": [{"params": weights, "lr": 0.1}, {"params": iter(biases), "weight_decay": 0.0}],
        "one tensor": [{"params": model[0].weight}],
        "named groups": [{"params": [("a", weights[0]), ("b", weights[1])]}, {"params": [("c", biases[0])]}],
    }


def described(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "params": [tuple(param.shape) for param in group["params"]]} for group in groups]


@pytest.mark.parametrize("name", ways_to_give_parameters(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))))
def test_groups_are_those_of_torch(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    ours = fused_adamw.AdamW(ways_to_give_parameters(model)[name])
    torchs = torch.optim.AdamW(ways_to_give_parameters(model)[name])
    assert described(ours.param_groups) == described(torchs.param_groups)
    assert ours.defaults == torchs.defaults


def test_arguments_and_defaults_are_those_of_torch() -> None:
    ours, torchs = (inspect.signature(cls.__init__).parameters for cls in BOTH)
    assert {name: ours[name].default for name in torchs} == {name: p.default for name, p in torchs.items()}
    positional = [name for name, p in torchs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional


def test_a_group_added_after_steps_starts_at_its_first() -> None:
    params, late = make_params(), make_params([(4,)], seed=9)
    optimizer = fused_adamw.AdamW(params)
    group: dict[str, Any] = {"params": late, "lr": 0.1}
    gradients, late_gradients = make_gradients(params, 4), make_gradients(late, 2)
    oracles, late_oracles = oracles_of(params), oracles_of(late, lr=0.1)
    train(optimizer, gradients[:2])
    optimizer.add_param_group(group)
    assert optimizer.param_groups[1] is group
    train(optimizer, [a + b for a, b in zip(gradients[2:], late_gradients, strict=True)])
    advance(oracles, gradients)
    advance(late_oracles, late_gradients)
    assert error(params + late, oracles + late_oracles) < 1e-6
    assert optimizer.state[late[0]]["step"] == 2


def misuses(cls: type) -> dict[str, Callable[[], Any]]:
    a, b = make_params([(2,), (3,)])
    return {
        "empty list": lambda: cls([]),
        "a tensor": lambda: cls(a),
        "set": lambda: cls([{"params": {a, b}}]),
        "no tensor": lambda: cls([a, "b"]),
        "no leaf": lambda: cls([a * 2]),
        "two groups": lambda: cls([{"params": [a]}, {"params": [b, a]}]),
        "group without params": lambda: cls([{"lr": 1.0}]),
        "no group": lambda: cls([a]).add_param_group([b]),
        "some names": lambda: cls([("a", a), b]),
        "names in one group": lambda: cls([{"params": [("a", a)]}, {"params": [b]}]),
    }


@pytest.mark.parametrize("name", misuses(torch.optim.AdamW))
def test_misuse_is_refused_in_the_words_of_torch(name: str) -> None:
    errors = []
    for cls in BOTH:
        with pytest.raises((TypeError, ValueError, KeyError)) as caught:
            misuses(cls)[name]()
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


# --- refusals -----------------------------------------------------------------------------------------------


def test_parameters_that_cannot_be_updated_are_refused() -> None:
    tensors = {
        "float64": torch.zeros(2, dtype=torch.float64),
        "complex": torch.zeros(2, dtype=torch.complex64),
        "sparse": torch.eye(2).to_sparse(),
        "int": torch.zeros(2, dtype=torch.int32),
    }
    good = make_params([(2,)])
    optimizer = fused_adamw.AdamW(good)
    messages = []
    for name, tensor in tensors.items():
        messages.append(f"{name}:\n{refusal(lambda t=tensor: fused_adamw.AdamW([*good, t]))}")
        assert refusal(lambda t=tensor: optimizer.add_param_group({"params": t}))
        assert len(optimizer.param_groups) == 1
    assert_expected_inline(
        "\n".join(messages),
        """\
float64:
TypeError: fused_adamw.AdamW: params[1] has dtype torch.float64; torch.float32, torch.float16 or
torch.bfloat16 is required
complex:
TypeError: fused_adamw.AdamW: params[1] has dtype torch.complex64; torch.float32, torch.float16 or
torch.bfloat16 is required
sparse:
TypeError: fused_adamw.AdamW: params[1] has layout torch.sparse_coo; a dense tensor (torch.strided)
is required
int:
TypeError: fused_adamw.AdamW: params[1] has dtype torch.int32; torch.float32, torch.float16 or
torch.bfloat16 is required""",
    )


def test_options_out_of_range_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"lr": -1e-3},
        {"lr": float("nan")},
        {"lr": torch.tensor([1.0, 2.0])},
        {"lr": torch.tensor(1)},
        {"lr": torch.tensor(-1.0)},
        {"betas": (1.0, 0.999)},
        {"betas": (0.9, -0.1)},
        {"betas": (0.9, torch.tensor(1.0))},
        {"eps": -1.0},
        {"weight_decay": -0.1},
        {"differentiable": True},
    ]
    [param] = make_params([(2,)])
    optimizer = fused_adamw.AdamW([param])
    messages = []
    for options in wrong:
        messages.append(refusal(lambda o=options: fused_adamw.AdamW([param], **o)))
        if "differentiable" not in options:
            group = {"params": make_params([(2,)]), **options}
            assert refusal(lambda g=group: optimizer.add_param_group(g))
            assert len(optimizer.param_groups) == 1
    assert_expected_inline(
        "\n".join(messages),
        """\
ValueError: fused_adamw.AdamW: lr is -0.001; a finite number of at least 0 is required
ValueError: fused_adamw.AdamW: lr is nan; a finite number of at least 0 is required
ValueError: fused_adamw.AdamW: lr has shape (2,); shape () or (1,) is required
TypeError: fused_adamw.AdamW: lr has dtype torch.int64; torch.float32 or torch.float64 is required
ValueError: fused_adamw.AdamW: lr is -1.0; a finite number of at least 0 is required
ValueError: fused_adamw.AdamW: beta1 is 1.0; a number of at least 0 and below 1 is required
ValueError: fused_adamw.AdamW: beta2 is -0.1; a number of at least 0 and below 1 is required
ValueError: fused_adamw.AdamW: beta2 is 1.0; a number of at least 0 and below 1 is required
ValueError: fused_adamw.AdamW: eps is -1.0; a finite number of at least 0 is required
ValueError: fused_adamw.AdamW: weight_decay is -0.1; a finite number of at least 0 is required
ValueError: fused_adamw.AdamW: differentiable is True; the update has no derivative, False is
required""",
    )


def sparse_gradient() -> fused_adamw.AdamW:
    model = nn.Embedding(4, 3, sparse=True)
    model(torch.tensor([1])).sum().backward()
    return fused_adamw.AdamW(model.parameters())


def with_gradients(params: list[nn.Parameter]) -> fused_adamw.AdamW:
    for param in params:
        param.grad = torch.ones_like(param)
    return fused_adamw.AdamW(params)


def transposed_gradient() -> fused_adamw.AdamW:
    optimizer = with_gradients(make_params([(3,), (2, 3)]))
    params_of(optimizer)[1].grad = torch.ones(3, 2).t()
    return optimizer


def parameter_with_holes() -> fused_adamw.AdamW:
    param = nn.Parameter(torch.zeros(3, 4)[:, ::2])
    param.grad = torch.empty_strided((3, 2), param.stride()).fill_(1.0)
    return fused_adamw.AdamW([param])


def parameters_that_overlap() -> fused_adamw.AdamW:
    base = torch.zeros(10)
    return with_gradients([nn.Parameter(base[:6]), nn.Parameter(base[5:])])


def negative_lr_in_the_second_group() -> fused_adamw.AdamW:
    first, second = params = make_params([(3,), (3,)])
    set_gradients(params, [torch.ones(3)] * 2)
    optimizer = fused_adamw.AdamW([{"params": first}, {"params": second}])
    optimizer.param_groups[1]["lr"] = -1.0
    return optimizer


def step_that_is_no_count() -> fused_adamw.AdamW:
    optimizer = with_gradients(make_params([(3,)]))
    optimizer.step()
    optimizer.state[params_of(optimizer)[0]]["step"].fill_(-1.0)
    return optimizer


def on_another_device() -> fused_adamw.AdamW:
    return with_gradients([nn.Parameter(torch.zeros(2, device="meta"))])


def on_two_devices() -> fused_adamw.AdamW:
    return with_gradients([*make_params([(2,)]), nn.Parameter(torch.zeros(2, device="meta"))])


def groups_on_two_devices() -> fused_adamw.AdamW:
    return fused_adamw.AdamW(grouped(params_of(on_two_devices()), [{}, {}]))


def lr_on_another_device() -> fused_adamw.AdamW:
    optimizer = with_gradients(make_params([(2,)]))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    return optimizer


REFUSED_STEPS = (
    sparse_gradient,
    transposed_gradient,
    parameter_with_holes,
    parameters_that_overlap,
    negative_lr_in_the_second_group,
    step_that_is_no_count,
    on_another_device,
    on_two_devices,
    groups_on_two_devices,
    lr_on_another_device,
)


def test_steps_that_cannot_be_right_are_refused_and_write_nothing() -> None:
    messages = []
    for make in REFUSED_STEPS:
        optimizer = make()
        params = [param for param in params_of(optimizer) if param.device.type != "meta"]
        before = Snapshot([*params, *(param.grad for param in params)])
        messages.append(f"{make.__name__}:\n{refusal(optimizer.step)}")
        before.assert_unchanged()
        for state in optimizer.state.values():
            assert state["step"].is_meta or state["step"] <= 1
    assert_expected_inline(
        "\n".join(messages),
        """\
sparse_gradient:
TypeError: fused_adamw::step_: grads[0] has layout torch.sparse_coo; a dense tensor (torch.strided)
is required
transposed_gradient:
ValueError: fused_adamw::step_: grads[1] has strides (1, 2); (3, 1), the parameter's, are required
parameter_with_holes:
ValueError: fused_adamw::step_: params[0] has shape (3, 2) and strides (4, 2); strides without holes
or overlap (contiguous, or a permutation of it) are required
parameters_that_overlap:
ValueError: fused_adamw::step_: params[0] and params[1] share memory; a tensor that is written may
share memory with no other tensor (a gradient that is exactly a tensor of its own parameter may)
negative_lr_in_the_second_group:
ValueError: fused_adamw::step_, group 1: lr is -1.0; a finite number of at least 0 is required
step_that_is_no_count:
ValueError: fused_adamw::step_: state_steps[0] is -1.0; a whole number of at least 0 and below 2^63
- 1 is required
on_another_device:
ValueError: fused_adamw::step_: the parameters are on meta; a device of type cpu or cuda is required
on_two_devices:
ValueError: fused_adamw::step_: the parameters are on meta; a device of type cpu or cuda is required
groups_on_two_devices:
ValueError: fused_adamw::step_: the parameters are on meta; a device of type cpu or cuda is required
lr_on_another_device:
ValueError: fused_adamw::step_: lr is on meta; cpu, where the parameters are, is required""",
    )


def test_the_same_parameter_twice_in_a_group_is_refused() -> None:
    """torch warns, and updates it twice."""
    [param] = make_params([(3,)])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = fused_adamw.AdamW([param, param])
    param.grad = torch.ones(3)
    before = Snapshot([param])
    # Which of its tensors is named depends on their addresses.
    with pytest.raises(ValueError, match=r"s\[0\] and \w+s\[1\] share memory"):
        optimizer.step()
    before.assert_unchanged()


# --- autograd -----------------------------------------------------------------------------------------------


def test_a_backward_through_parameters_that_a_step_changed_is_refused() -> None:
    layer = nn.Linear(3, 3)
    optimizer = fused_adamw.AdamW(layer.parameters())
    hidden = layer(torch.ones(2, 3, requires_grad=True))
    loss = hidden.square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_step_is_the_same_in_every_grad_mode(mode: Callable[[], Any]) -> None:
    params, twins = make_params(), make_params()
    gradients = make_gradients(params, 3)
    optimizer = fused_adamw.AdamW(params)
    train(optimizer, gradients[:1])
    for grads in gradients[1:]:
        set_gradients(params, grads)
        with mode():
            optimizer.step()
    train(fused_adamw.AdamW(twins), gradients)
    assert_all_same_bits(params, twins)
    assert all(param.requires_grad and param.is_leaf for param in params)


def test_parameters_that_require_no_gradient_are_updated_where_they_have_one() -> None:
    """As torch.optim does: frozen afterwards, with a gradient left behind."""
    params, twins = make_params(), make_params()
    [grads] = make_gradients(params, 1)
    optimizer = fused_adamw.AdamW(params)
    set_gradients(params, grads)
    params[0].requires_grad_(False)
    optimizer.step()
    train(fused_adamw.AdamW(twins), [grads])
    assert_same_bits(params[0], twins[0])
