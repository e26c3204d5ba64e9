"""16-bit parameters spread over processes: FSDP2 and DTensors on two CPU processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused_adamw
import processes
from master_weights import float32_twin, masters_of
from processes import STEPS, Task, results_of
from training import assert_all_same_bits, params_of, train

OPTIONS = {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}

FORMS: dict[str, dict[str, Any]] = {
    "split": {},
    "whole": {"split_masters": False},
    "by chance": {"stochastic_rounding": True},
}


def make_model() -> nn.Module:
    return processes.make_model().bfloat16()


def make_batches() -> Tensor:
    return processes.make_batches().bfloat16()


def train_model(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Tensor) -> list[list[Tensor]]:
    """Returns the gradients."""
    gradients = []
    for batch in batches:
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        gradients.append([whole(param.grad) for param in model.parameters()])
        optimizer.step()
    return gradients


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


# --- what each process does; what they return is tested below -----------------------------------------------


def sharded(mesh: Any, form: str) -> tuple[nn.Module, fused_adamw.AdamW]:
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    fully_shard(model, mesh=mesh)
    return model, fused_adamw.AdamW(model.parameters(), **FORMS[form], **OPTIONS)


def fully_sharded_training(mesh: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
    from torch.distributed.tensor import DTensor

    results: dict[str, Any] = {}
    for form in FORMS:
        model, optimizer = sharded(mesh, form)
        gradients = train_model(model, optimizer, make_batches())
        state_dict = optimizer.state_dict()["state"]
        params = list(model.parameters())
        results[form] = {
            "gradients": gradients,
            "params": [whole(param) for param in params],
            "masters": [whole(optimizer.master_param(param)) for param in params],
            "placed": all(
                isinstance(tensor, DTensor)
                and tensor.placements == param.placements
                and tensor.shape == param.shape
                for i, param in enumerate(params)
                for tensor in (optimizer.master_param(param), state_dict[i]["master_param"])
            ),
            "dtypes": {state["master_param"].dtype for state in state_dict.values()},
            "keys": [set(state) for state in state_dict.values()],
            "parts": [tuple(param.to_local().shape) for param in params],
            "steps": [optimizer.state[param]["step"].item() for param in params],
            "state_dict": get_optimizer_state_dict(
                model, optimizer, options=StateDictOptions(full_state_dict=True)
            ),
        }
    return results


def resumed_training(mesh: Any) -> dict[str, Any]:
    """From the checkpoint of a single process; into every form that keeps the parameters."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    results: dict[str, Any] = {}
    for source, target in (("split", "split"), ("split", "whole"), ("whole", "split")):
        single = make_model()
        single_optimizer = fused_adamw.AdamW(single.parameters(), **FORMS[source], **OPTIONS)
        train_model(single, single_optimizer, make_batches()[:2])
        checkpoint = copy.deepcopy(get_optimizer_state_dict(single, single_optimizer))
        model = copy.deepcopy(single)
        fully_shard(model, mesh=mesh)
        optimizer = fused_adamw.AdamW(model.parameters(), **FORMS[target], **OPTIONS)
        set_optimizer_state_dict(model, optimizer, checkpoint, options=StateDictOptions(full_state_dict=True))
        train_model(model, optimizer, make_batches()[2:])
        results[f"{source} to {target}"] = {
            "params": [whole(param) for param in model.parameters()],
            "masters": [whole(optimizer.master_param(param)) for param in model.parameters()],
        }
    return results


def masters_set_by_hand(mesh: Any) -> dict[str, Any]:
    from torch.distributed.tensor import distribute_tensor

    results: dict[str, Any] = {}
    for form in FORMS:
        model, optimizer = sharded(mesh, form)
        train_model(model, optimizer, make_batches()[:1])
        for param, value in zip(model.parameters(), other_weights(), strict=True):
            optimizer.set_master_param(param, distribute_tensor(value, mesh, param.placements))
        set_to = [whole(optimizer.master_param(param)) for param in model.parameters()]
        rounded = [whole(param) for param in model.parameters()]
        optimizer.resync_masters()
        resynced = [whole(optimizer.master_param(param)) for param in model.parameters()]
        results[form] = {"set": set_to, "rounded": rounded, "resynced": resynced}
    return results


def other_weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(param.shape, generator=generator) for param in make_model().parameters()]


def foreign_writes(mesh: Any) -> dict[str, Any]:
    """As loading a model's weights makes them."""
    model, optimizer = sharded(mesh, "split")
    optimizer.stale_master = "error"
    train_model(model, optimizer, make_batches()[:2])
    with torch.no_grad():
        next(iter(model.parameters())).mul_(-1.0)
    try:
        optimizer.step()
    except fused_adamw.StaleMasterError as error:
        return {"message": str(error)}
    return {"message": None}


def rounding_by_chance(mesh: Any) -> dict[str, Any]:
    """Masters halfway between two numbers, in parts and in copies."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    square = init_device_mesh("cpu", (2, 1))
    value = torch.full((4000, 4), 1.0 + 2.0**-8)
    placements = {
        "rows": (mesh, [Shard(0)]),
        "columns": (mesh, [Shard(1)]),
        "replicated": (mesh, [Replicate()]),
        "replicated rows": (square, [Replicate(), Shard(0)]),
    }
    results = {}
    for name, (own_mesh, placed) in placements.items():
        param = nn.Parameter(distribute_tensor(value.bfloat16(), own_mesh, placed))
        group = {"params": [param], "rounding_seed": 6}
        optimizer = fused_adamw.AdamW([group], lr=0.0, stochastic_rounding=True)
        optimizer.set_master_param(param, distribute_tensor(value, own_mesh, placed))
        param.grad = distribute_tensor(torch.zeros_like(value).bfloat16(), own_mesh, placed)
        optimizer.step()
        results[name] = param.detach().to_local().clone()
    return results


TASKS: tuple[Task, ...] = (
    fully_sharded_training,
    resumed_training,
    masters_set_by_hand,
    foreign_writes,
    rounding_by_chance,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every process returned, by task."""
    return results_of(TASKS, tmp_path_factory.mktemp("distributed"))


# --- tests --------------------------------------------------------------------------------------------------


def single_process_training(form: str) -> fused_adamw.AdamW:
    model = make_model()
    optimizer = fused_adamw.AdamW(model.parameters(), **FORMS[form], **OPTIONS)
    train_model(model, optimizer, make_batches())
    return optimizer


@pytest.mark.parametrize("form", ["split", "whole"])
def test_the_masters_are_those_of_a_single_process(results: list[dict[str, Any]], form: str) -> None:
    """Both processes see the same batches, so that the mean of their gradients is exact."""
    single = single_process_training(form)
    for result in results:
        found = result["fully_sharded_training"][form]
        assert_all_same_bits(found["masters"], masters_of(single))
        assert_all_same_bits(found["params"], [param.detach() for param in params_of(single)])


@pytest.mark.parametrize("form", FORMS)
def test_the_masters_are_those_of_float32_training(results: list[dict[str, Any]], form: str) -> None:
    """On the gradients that the processes made together."""
    twin = float32_twin(list(make_model().parameters()), **OPTIONS)
    found = [result["fully_sharded_training"][form] for result in results]
    train(twin, [[grad.float() for grad in grads] for grads in found[0]["gradients"]])
    for each in found:
        assert_all_same_bits(each["masters"], [param.detach() for param in params_of(twin)])


@pytest.mark.parametrize("form", FORMS)
def test_a_state_dict_has_masters_that_are_placed_as_the_parameters(
    results: list[dict[str, Any]], form: str
) -> None:
    for result in results:
        found = result["fully_sharded_training"][form]
        assert found["placed"]
        assert found["dtypes"] == {torch.float32}
        assert found["keys"] == [{"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param"}] * 4
        assert found["steps"] == [STEPS] * 4
    assert results[1]["fully_sharded_training"][form]["parts"][-1] == (0,)


@pytest.mark.parametrize("form", ["split", "whole"])
def test_the_full_state_dict_is_that_of_a_single_process(results: list[dict[str, Any]], form: str) -> None:
    expected = single_process_training(form).state_dict()["state"]
    found = results[0]["fully_sharded_training"][form]["state_dict"]["state"]
    assert list(found) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for mine, other in zip(found.values(), expected.values(), strict=True):
        assert mine.keys() == other.keys()
        assert_all_same_bits([mine[name] for name in other], list(other.values()))


@pytest.mark.parametrize("name", ["split to split", "split to whole", "whole to split"])
def test_training_resumes_from_the_checkpoint_of_a_single_process(
    results: list[dict[str, Any]], name: str
) -> None:
    expected = masters_of(single_process_training("split"))
    for result in results:
        assert_all_same_bits(result["resumed_training"][name]["masters"], expected)


@pytest.mark.parametrize("form", FORMS)
def test_masters_are_set_and_resynced_part_by_part(results: list[dict[str, Any]], form: str) -> None:
    values = other_weights()
    for result in results:
        found = result["masters_set_by_hand"][form]
        assert_all_same_bits(found["set"], values)
        assert_all_same_bits(found["rounded"], [value.bfloat16() for value in values])
        assert_all_same_bits(found["resynced"], [value.bfloat16().float() for value in values])


def test_a_foreign_write_is_refused_on_all_processes(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "param_groups[0]['params'][0] written to" in result["foreign_writes"]["message"]


@pytest.mark.parametrize("name", ["rows", "columns", "replicated", "replicated rows"])
def test_parts_have_random_bits_of_their_own_and_copies_the_same(
    results: list[dict[str, Any]], name: str
) -> None:
    """Of roundings by a fair coin about half agree: between 6 standard deviations, of 8000 at least."""
    first, second = (result["rounding_by_chance"][name] for result in results)
    for part in (first, second):
        assert set(part.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
        assert abs((part == 1.0).double().mean() - 0.5) <= 6.0 * 0.5 / part.numel() ** 0.5
    if name.startswith("replicated"):
        assert torch.equal(first, second)
    else:
        assert abs((first == second).double().mean() - 0.5) <= 6.0 * 0.5 / first.numel() ** 0.5


def test_rounding_by_chance_is_within_the_neighbours(results: list[dict[str, Any]]) -> None:
    for result in results:
        found = result["fully_sharded_training"]["by chance"]
        for param, master in zip(found["params"], found["masters"], strict=True):
            assert ((param.double() - master.double()).abs() < 2.0**-7 * master.double().abs()).all()
    first, second = (result["fully_sharded_training"]["by chance"]["params"] for result in results)
    assert_all_same_bits(first, second)
