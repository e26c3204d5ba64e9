"""Compiled steps, and replays of CUDA graphs, of 16-bit parameters: the bits of eager steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from cases import assert_same_bits, normal_gradient, normal_sample
from fused_adamw import AdamW, AdamWState, StepControl, adamw_step
from graphs import generated_body
from training import assert_all_same_bits, compilations, make_gradients, params_of, set_gradients, tensors_of

# Of Inductor's first import.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

STEPS = 20
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((5, 7), (), (33,), (2, 3, 4))

OPTIONS: dict[str, dict[str, Any]] = {
    "split": {},
    "whole": {"split_masters": False, "amsgrad": True},
    "by chance": {"stochastic_rounding": True},
    "clipped": {"max_grad_norm": 0.5},
    "clipped, by chance": {"max_grad_norm": 0.5, "stochastic_rounding": True},
}
all_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_optimizer(device: torch.device, **options: Any) -> AdamW:
    """Parameters of all dtypes, with gradients whose memory stays."""
    torch.manual_seed(7)  # of rounding by chance
    params = [
        nn.Parameter(normal_sample(shape, seed=i).param.to(device, dtype))
        for i, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True))
    ]
    for param in params:
        param.grad = torch.zeros_like(param)
    return AdamW(params, **{"lr": torch.tensor(0.01, dtype=torch.float64, device=device), **options})


def gradients_for(optimizer: AdamW, steps: int = STEPS) -> list[list[Tensor]]:
    params = params_of(optimizer)
    return [
        [grad.to(param.device, param.dtype) for grad, param in zip(grads, params, strict=True)]
        for grads in make_gradients([param.cpu() for param in params], steps)
    ]


def train(optimizer: AdamW, step: Callable[[], Any], gradients: list[list[Tensor]]) -> None:
    """Steps with a new learning rate in each."""
    for i, grads in enumerate(gradients):
        for param, grad in zip(params_of(optimizer), grads, strict=True):
            assert param.grad is not None
            param.grad.copy_(grad)
        optimizer.param_groups[0]["lr"].fill_(0.01 / (1 + i))
        step()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@all_options
def test_compiled_steps_are_eager_steps(device: torch.device, options: dict[str, Any], backend: str) -> None:
    optimizer, twin = make_optimizer(device, **options), make_optimizer(device, **options)
    gradients = gradients_for(optimizer)
    with compilations() as ids:
        train(optimizer, torch.compile(optimizer.step, fullgraph=True, backend=backend), gradients)
    assert len(ids) == 1
    train(twin, twin.step, gradients)
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))
    changed = [param for param in params_of(optimizer) if param.dtype is not torch.float32]
    assert all(not torch.equal(optimizer.master_param(param), param.float()) for param in changed)


@all_options
def test_generated_code_steps_on_the_tensors_themselves(
    device: torch.device, options: dict[str, Any]
) -> None:
    """One call for each form of the weights: float32, and float32 masters or remainders."""
    optimizer = make_optimizer(device, **options)
    optimizer.step()
    _, [code] = run_and_get_code(torch.compile(optimizer.step, fullgraph=True))
    body = generated_body(code)
    calls = re.findall(r"torch\.ops\.fused_adamw\.(?:step_|adamw_scaled)\.tensor\((.*)\)", body)
    assert len(calls) == (3 if optimizer.splits_masters(optimizer.param_groups[0]) else 2)
    assert not re.findall(r"\bcopy_|\bclone|\.item\(", body)
    for call in calls:
        for written in re.findall(r"\[(.*?)\]", call):
            assert re.fullmatch(r"((arg\d+_1|-?\d+)(, )?)*", written), written
    assert sum("masters=[" in call for call in calls) == len(calls) - 1
    assert any("rounding_seeds=[" in call for call in calls) == options.get("stochastic_rounding", False)


def test_a_compiled_functional_update(device: torch.device) -> None:
    """In one graph with other work; nothing that was given is written."""
    param = normal_sample(77).param.to(device, torch.bfloat16)
    control = StepControl(rounding_seed=3)

    def two_updates(param: Tensor, grad: Tensor) -> tuple[Tensor, AdamWState | None]:
        first = adamw_step(param, grad, None, control=control)
        second = adamw_step(first.parameters, 2.0 * grad, first.state, control=control)
        return second.parameters, second.state

    grad = normal_gradient(77, torch.bfloat16, device=device)
    compiled = torch.compile(two_updates, fullgraph=True)(param, grad)
    eager = two_updates(param, grad)
    assert compiled[1] is not None
    assert eager[1] is not None
    assert_same_bits(compiled[0], eager[0])
    for name in ("exp_avg", "exp_avg_sq", "master"):
        assert_same_bits(getattr(compiled[1], name), getattr(eager[1], name))


def test_a_compiled_training_step_of_a_bfloat16_model(device: torch.device) -> None:
    """Gradients are values of the program; the eager twin gets those that it computed."""
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch does not trace backward()")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device, torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.01, device=device), max_grad_norm=1.0)
    twin = AdamW(
        [nn.Parameter(param.detach().clone()) for param in model.parameters()],
        lr=torch.tensor(0.01, device=device),
        max_grad_norm=1.0,
    )

    def step(batch: Tensor) -> list[Tensor | None]:
        (model(batch) - batch.sum(1, keepdim=True)).float().square().mean().backward()
        grads = [param.grad for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return grads

    compiled = torch.compile(step, fullgraph=True)
    with torch._dynamo.config.patch(trace_autograd_ops=True), compilations() as ids:
        for i in range(5):
            batch = normal_sample((16, 6), seed=i).param.to(device, torch.bfloat16)
            set_gradients(params_of(twin), compiled(batch))
            twin.step()
    assert len(ids) == 1
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))


@pytest.mark.parametrize("warm_up", [True, False], ids=["warm", "first step captured"])
@all_options
def test_100_replays_are_100_eager_steps(cuda: torch.device, options: dict[str, Any], warm_up: bool) -> None:
    """Random bits are a function of the counter on the device, so each replay has its own."""
    betas = tuple(torch.tensor(beta, dtype=torch.float64, device=cuda) for beta in (0.9, 0.99))
    optimizer, twin = (make_optimizer(cuda, betas=betas, **options) for _ in range(2))
    first, *gradients = gradients_for(optimizer, 101)
    if warm_up:
        train(optimizer, optimizer.step, [first])
        train(twin, twin.step, [first])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    train(optimizer, graph.replay, gradients)
    train(twin, twin.step, gradients)
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))


def test_a_replay_takes_over_what_was_written(cuda: torch.device) -> None:
    """New weights between replays count, without a look by the host."""
    betas = tuple(torch.tensor(beta, dtype=torch.float64, device=cuda) for beta in (0.9, 0.99))
    optimizer, twin = (make_optimizer(cuda, betas=betas, split_masters=False) for _ in range(2))
    gradients = gradients_for(optimizer, 6)
    for each in (optimizer, twin):
        train(each, each.step, gradients[:2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for each, step in ((optimizer, graph.replay), (twin, twin.step)):
        train(each, step, gradients[2:4])
        for param in params_of(each):
            param.data.fill_(3.0)
        train(each, step, gradients[4:])
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))
    assert all(((param - 3.0).abs() < 0.1).all() for param in params_of(optimizer))


def test_an_error_of_stale_masters_cannot_be_captured(cuda: torch.device) -> None:
    optimizer = make_optimizer(cuda, stale_master="error")
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="stale_master is 'error'"):
        optimizer.step()
