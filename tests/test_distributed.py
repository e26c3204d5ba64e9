"""``AdamW`` with parameters spread over processes: DTensors, as FSDP2 makes them, on two CPU processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused_adamw
from processes import STEPS, WORLD_SIZE, Task, make_batches, make_model, results_of
from training import advance, assert_all_same_bits, oracles_of, refusal, tensors_of, train

OPTIONS = {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}


def train_model(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Tensor) -> None:
    for batch in batches:
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


def whole(tensors: list[Tensor]) -> list[Tensor]:
    return [t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for t in map(Tensor.detach, tensors)]


# --- what each process does; what they return is tested below -----------------------------------------------


def fully_sharded_training(mesh: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = make_model()
    fully_shard(model, mesh=mesh)
    optimizer = fused_adamw.AdamW(model.parameters(), **OPTIONS)
    train_model(model, optimizer, make_batches())
    states = [optimizer.state[param] for param in model.parameters()]
    result = {
        "tensors": whole(tensors_of(optimizer)),
        "steps": [state["step"].item() for state in states],
        "moments are placed as the parameters": all(
            isinstance(state[name], DTensor) and state[name].placements == param.placements
            for param, state in zip(model.parameters(), states, strict=True)
            for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        ),
        "parts": [tuple(param.to_local().shape) for param in model.parameters()],
        "versions": [param._version for param in model.parameters()],
    }
    everything = StateDictOptions(full_state_dict=True)
    result["state_dict"] = get_optimizer_state_dict(model, optimizer, options=everything)
    return result


def resumed_training(mesh: Any) -> dict[str, Any]:
    """From the checkpoint of a single process."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    single = make_model()
    single_optimizer = fused_adamw.AdamW(single.parameters(), **OPTIONS)
    train_model(single, single_optimizer, make_batches()[:2])
    checkpoint = copy.deepcopy(get_optimizer_state_dict(single, single_optimizer))

    model = copy.deepcopy(single)
    fully_shard(model, mesh=mesh)
    optimizer = fused_adamw.AdamW(model.parameters(), **OPTIONS)
    set_optimizer_state_dict(model, optimizer, checkpoint, options=StateDictOptions(full_state_dict=True))
    train_model(model, optimizer, make_batches()[2:])
    return {"tensors": whole(tensors_of(optimizer))}


def scaled_training(mesh: Any) -> dict[str, Any]:
    """Under a scaler; in one step the gradients of one process alone overflow."""
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    fully_shard(model, mesh=mesh)
    optimizer = fused_adamw.AdamW(model.parameters(), **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step, batch in enumerate(make_batches()):
        optimizer.zero_grad()
        scaler.scale((model(batch) - batch.sum(1, keepdim=True)).square().mean()).backward()
        if step == 1 and mesh.get_rank() == 1:
            next(iter(model.parameters())).grad.to_local().fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"tensors": whole(tensors_of(optimizer)), "scales": scales}


def mixed_training(mesh: Any) -> dict[str, Any]:
    """Plain tensors and DTensors of several meshes and placements in one optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    square = init_device_mesh("cpu", (2, 1))
    values, gradients = mixed_values()
    placed = [
        values[0],
        distribute_tensor(values[1], mesh, [Shard(0)]),
        distribute_tensor(values[2], mesh, [Shard(1)]),
        distribute_tensor(values[3], square, [Replicate(), Shard(0)]),
        distribute_tensor(values[4], mesh, [Replicate()]),
    ]
    params = [nn.Parameter(value) for value in placed]
    optimizer = fused_adamw.AdamW(params, **OPTIONS)
    for grads in gradients:
        params[0].grad = grads[0].clone()
        params[1].grad = distribute_tensor(grads[1], mesh, [Shard(0)])
        params[2].grad = distribute_tensor(grads[2], mesh, [Shard(1)])
        params[3].grad = distribute_tensor(grads[3], square, [Replicate(), Shard(0)])
        # A sum that is not reduced yet: a quarter from one process, the rest from the other.
        part = grads[4] * (0.25 if mesh.get_rank() == 0 else 0.75)
        params[4].grad = type(params[1].grad).from_local(part, mesh, [Partial()])
        optimizer.step()
    return {"tensors": whole(tensors_of(optimizer))}


def mixed_values() -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(3,), (5, 2), (4, 6), (2, 3), (4,)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    # Of few bits, so that sums of parts are exact.
    grads = [[torch.randint(-64, 64, s, generator=generator) / 16.0 for s in shapes] for _ in range(STEPS)]
    return values, grads


def compiled_training(mesh: Any) -> dict[str, Any]:
    from torch.distributed.tensor import Shard, distribute_tensor

    values, gradients = mixed_values()
    params = [nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values]
    optimizer = fused_adamw.AdamW(params, **OPTIONS)
    step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    for grads in gradients:
        for param, grad in zip(params, grads, strict=True):
            param.grad = distribute_tensor(grad, mesh, [Shard(0)])
        step()
    return {"tensors": whole(tensors_of(optimizer))}


def replicated_training(mesh: Any) -> dict[str, Any]:
    """DistributedDataParallel, compiled, with other batches in each process; ``step`` is compiled too."""
    from torch.nn.parallel import DistributedDataParallel

    model = make_model()
    optimizer = fused_adamw.AdamW(model.parameters(), max_grad_norm=0.5, **OPTIONS)
    forward = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    gradients = []
    for batch in make_batches() + mesh.get_rank():
        optimizer.zero_grad()
        (forward(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        gradients.append([param.grad.clone() for param in model.parameters()])
        step()
    return {"tensors": whole(tensors_of(optimizer)), "gradients": gradients}


def refusals(mesh: Any) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def make(**options: Any) -> tuple[Any, fused_adamw.AdamW]:
        param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        param.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        return param, fused_adamw.AdamW([param], **options)

    messages = []
    param, optimizer = make()
    optimizer.step()
    optimizer.state[param]["exp_avg"] = distribute_tensor(torch.zeros(4, 4), mesh, [Replicate()])
    before = whole([param])
    messages.append(refusal(optimizer.step))
    assert_all_same_bits(whole([param]), before)

    param, optimizer = make(max_grad_norm=1.0)
    messages.append(refusal(optimizer.step))
    assert_all_same_bits(whole([param]), [torch.ones(4, 4)])
    return {"messages": messages}


TASKS: tuple[Task, ...] = (
    fully_sharded_training,
    resumed_training,
    scaled_training,
    mixed_training,
    compiled_training,
    replicated_training,
    refusals,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every process returned, by task."""
    return results_of(TASKS, tmp_path_factory.mktemp("distributed"))


# --- tests --------------------------------------------------------------------------------------------------


def single_process_training(cls: type = fused_adamw.AdamW) -> torch.optim.Optimizer:
    model = make_model()
    optimizer = cls(model.parameters(), **OPTIONS)
    train_model(model, optimizer, make_batches())
    return optimizer


def test_fsdp_training_has_the_bits_of_a_single_process(results: list[dict[str, Any]]) -> None:
    """Both processes see the same batches, so that the mean of their gradients is exact."""
    expected = tensors_of(single_process_training())
    for result in results:
        assert_all_same_bits(result["fully_sharded_training"]["tensors"], expected)
    torchs = [tensor.detach() for tensor in tensors_of(single_process_training(torch.optim.AdamW))]
    torch.testing.assert_close(results[0]["fully_sharded_training"]["tensors"], torchs, rtol=1e-4, atol=1e-6)


def test_states_are_placed_as_their_parameters(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["fully_sharded_training"]["moments are placed as the parameters"]


def test_a_process_without_a_part_counts_the_steps(results: list[dict[str, Any]]) -> None:
    assert results[1]["fully_sharded_training"]["parts"][-1] == (0,)
    for result in results:
        assert result["fully_sharded_training"]["steps"] == [STEPS] * 4


def test_autograd_is_told_of_the_change(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert all(version >= STEPS for version in result["fully_sharded_training"]["versions"])


def test_the_full_state_dict_is_that_of_a_single_process(results: list[dict[str, Any]]) -> None:
    expected = single_process_training().state_dict()["state"]
    found = results[0]["fully_sharded_training"]["state_dict"]["state"]
    assert list(found) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for mine, other in zip(found.values(), expected.values(), strict=True):
        assert mine.keys() == other.keys()
        assert_all_same_bits([mine[name] for name in other], list(other.values()))


def test_training_resumes_from_the_checkpoint_of_a_single_process(results: list[dict[str, Any]]) -> None:
    expected = tensors_of(single_process_training())
    for result in results:
        assert_all_same_bits(result["resumed_training"]["tensors"], expected)


def test_an_overflow_on_one_process_skips_the_step_on_all(results: list[dict[str, Any]]) -> None:
    model = make_model()
    optimizer = fused_adamw.AdamW(model.parameters(), **OPTIONS)
    batches = make_batches()
    train_model(model, optimizer, torch.cat([batches[:1], batches[2:]]))
    for result in results:
        assert result["scaled_training"]["scales"] == [1024.0, 512.0, 512.0, 512.0, 512.0]
        assert_all_same_bits(result["scaled_training"]["tensors"], tensors_of(optimizer))


@pytest.mark.parametrize("task", ["mixed_training", "compiled_training"])
def test_placements_do_not_change_the_bits(task: str, results: list[dict[str, Any]]) -> None:
    values, gradients = mixed_values()
    params = [nn.Parameter(value) for value in values]
    optimizer = fused_adamw.AdamW(params, **OPTIONS)
    train(optimizer, gradients)
    for result in results:
        assert_all_same_bits(result[task]["tensors"], tensors_of(optimizer))
    oracles = oracles_of(mixed_values()[0], **OPTIONS)
    advance(oracles, gradients)
    for param, oracle in zip(params, oracles, strict=True):
        torch.testing.assert_close(param.detach().double(), oracle.param, rtol=1e-5, atol=1e-6)


def test_replicas_have_the_bits_of_a_single_process(results: list[dict[str, Any]]) -> None:
    """On the gradients that DistributedDataParallel made, which are the mean over both processes."""
    model = make_model()
    optimizer = fused_adamw.AdamW(model.parameters(), max_grad_norm=0.5, **OPTIONS)
    train(optimizer, results[0]["replicated_training"]["gradients"])
    for result in results:
        assert_all_same_bits(result["replicated_training"]["tensors"], tensors_of(optimizer))
    first = make_model()
    for rank in range(WORLD_SIZE):
        batch = make_batches()[0] + rank
        ((first(batch) - batch.sum(1, keepdim=True)).square().mean() / WORLD_SIZE).backward()
    gradients = results[0]["replicated_training"]["gradients"][0]
    torch.testing.assert_close(gradients, [param.grad for param in first.parameters()])


def test_what_cannot_be_right_is_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        moment, norm = result["refusals"]["messages"]
        assert "exp_avgs[0] is placed as (Replicate(),)" in moment
        assert "(Shard(dim=0),)" in moment
        assert "gradients are DTensors" in norm
