"""Steps in CUDA graphs: what is captured once and replayed has the bits of eager steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import get_container, reset_cudagraph_trees

from cases import Snapshot, call_step, normal_gradient, normal_sample
from fused_adamw import AdamW
from training import (
    assert_all_same_bits,
    copy_over,
    make_gradients,
    make_params,
    params_of,
    set_gradients,
    tensors_of,
)

# The first import of Inductor brings it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

REPLAYS = 100
Gradients = Sequence[Sequence[Tensor]]


def scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=device)


def make_optimizer(device: torch.device, **options: Any) -> AdamW:
    """Two groups, with gradients whose memory stays."""
    params = [nn.Parameter(param.detach().to(device)) for param in make_params()]
    for param in params:
        param.grad = torch.zeros_like(param)
    groups = [{"params": params[0::2]}, {"params": params[1::2], "maximize": True, "weight_decay": 0.5}]
    numbers = {"lr": scalar(0.1, device), "betas": (scalar(0.9, device), scalar(0.99, device))}
    return AdamW(groups, **{**numbers, **options})


def gradients_for(optimizer: AdamW, steps: int, *, bad: Sequence[int] = ()) -> Gradients:
    """Gradients of each step; in the bad ones, the last holds an infinity."""
    params = params_of(optimizer)
    all_grads = [
        [grad.to(param.device) for grad, param in zip(grads, params, strict=True)]
        for grads in make_gradients([param.cpu() for param in params], steps)
    ]
    for step in bad:
        all_grads[step][-1].view(-1)[-1] = math.inf
    return all_grads


def replace_gradients(optimizer: AdamW, grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params_of(optimizer), grads, strict=True):
        param.grad.copy_(grad)


def captured(step: Callable[[], Any], **options: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        step()
    return graph


def train(optimizer: AdamW, step: Callable[[], Any], gradients: Gradients) -> None:
    """Steps with a new learning rate in each, where it is a tensor."""
    for i, grads in enumerate(gradients):
        replace_gradients(optimizer, grads)
        if isinstance(optimizer.param_groups[0]["lr"], Tensor):
            optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + i))
        step()


# --- replays ------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "AMSGrad": {"amsgrad": True},
    "clipped": {"max_grad_norm": 0.5},
    "clipped AMSGrad, rows merged serially": {
        "max_grad_norm": 0.5,
        "amsgrad": True,
        "hierarchical_stats": False,
    },
    "skipping": {"nonfinite": "skip"},
    "numbers as constants": {"lr": 0.1, "betas": (0.9, 0.99), "capturable": True},
}


@pytest.mark.parametrize("warm_up", [True, False], ids=["warm", "first step captured"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_100_replays_are_100_eager_steps(cuda: torch.device, options: dict[str, Any], warm_up: bool) -> None:
    """With skipped steps among them, where the options say so; a capture itself updates nothing."""
    optimizer, twin = make_optimizer(cuda, **options), make_optimizer(cuda, **options)
    skips = options.get("max_grad_norm") is not None or options.get("nonfinite") is not None
    bad = [3, 4, 50] if skips else []
    first, *gradients = gradients_for(optimizer, 1 + REPLAYS, bad=[1 + i for i in bad])
    if warm_up:
        train(optimizer, optimizer.step, [first])
        train(twin, twin.step, [first])
    before = [param.detach().clone() for param in params_of(optimizer)]
    graph = captured(optimizer.step)
    assert_all_same_bits(params_of(optimizer), before)
    train(optimizer, graph.replay, gradients)
    train(twin, twin.step, gradients)
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))
    counts = {state["step"].item() for state in optimizer.state.values()}
    assert counts == {float(REPLAYS + warm_up - len(bad))}
    if skips:
        assert optimizer.last_stats.norm == twin.last_stats.norm
        assert not optimizer.last_stats.skipped
        train(optimizer, graph.replay, gradients[bad[0] : bad[0] + 1])
        assert optimizer.last_stats.skipped


def test_a_state_made_while_capturing_is_like_any_other(cuda: torch.device) -> None:
    """It can be saved, loaded and gone on from, and it outlives the graph."""
    optimizer, twin = make_optimizer(cuda), make_optimizer(cuda)
    gradients = gradients_for(optimizer, 5)
    graph = captured(optimizer.step)
    train(optimizer, graph.replay, gradients[:3])
    del graph
    train(optimizer, optimizer.step, gradients[3:4])
    resumed = make_optimizer(cuda)
    copy_over(optimizer, resumed)
    train(resumed, resumed.step, gradients[4:])
    train(twin, twin.step, gradients[:3])
    train(twin, twin.step, gradients[3:4])
    train(twin, twin.step, gradients[4:])
    assert_all_same_bits(tensors_of(resumed), tensors_of(twin))


def test_what_a_scaler_hands_over(cuda: torch.device) -> None:
    """The scale and the flag are read in each replay."""
    optimizer, twin = make_optimizer(cuda), make_optimizer(cuda)
    for each in (optimizer, twin):
        each.grad_scale = torch.ones((), device=cuda)
        each.found_inf = torch.zeros((), device=cuda)
    graph = captured(optimizer.step)
    for i, grads in enumerate(gradients_for(optimizer, 10)):
        for each, step in ((optimizer, graph.replay), (twin, twin.step)):
            each.grad_scale.fill_(2.0**i)
            each.found_inf.fill_(float(i % 4 == 3))
            train(each, step, [[grad * 2.0**i for grad in grads]])
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))
    assert {state["step"].item() for state in optimizer.state.values()} == {8.0}


def test_two_graphs_that_share_a_pool(cuda: torch.device) -> None:
    """Their rows and reports may lie in the same memory; replays in turn are right all the same."""
    pairs = [
        (make_optimizer(cuda, max_grad_norm=norm), make_optimizer(cuda, max_grad_norm=norm))
        for norm in (0.5, 2.0)
    ]
    first = captured(pairs[0][0].step)
    second = captured(pairs[1][0].step, pool=first.pool())
    gradients = gradients_for(pairs[0][0], 10, bad=[4])
    for i, grads in enumerate(gradients):
        for (optimizer, twin), graph in zip(pairs, (first, second), strict=True):
            train(optimizer, graph.replay, [grads])
            train(twin, twin.step, [grads])
            assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))
            assert twin.last_stats.skipped == (i == 4)


def test_an_op_out_of_place(cuda: torch.device) -> None:
    """With the count in a tensor that the graph counts up."""
    sample = normal_sample(1025, device=cuda, step=0).with_zero_moments()
    twin = sample.clone()
    step = torch.zeros((), dtype=torch.int64, device=cuda)
    numbers = {"lr": scalar(0.1, cuda), "beta1": scalar(0.9, cuda), "beta2": scalar(0.99, cuda)}

    def update() -> None:
        new = torch.ops.fused_adamw.step.tensor(*sample.tensors, step, **numbers)
        for old, result in zip(sample.state, new, strict=True):
            old.copy_(result)
        step.add_(1)

    graph = captured(update)
    for i in range(REPLAYS):
        grad = normal_gradient(1025, seed=i, device=cuda)
        sample.grad.copy_(grad)
        graph.replay()
        twin.grad.copy_(grad)
        twin = call_step(twin, lr=0.1, beta1=0.9, beta2=0.99)
    assert_all_same_bits(sample.state, twin.state)
    assert step.item() == REPLAYS


# --- with a model -------------------------------------------------------------------------------------------


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def trained_model(device: torch.device, **options: Any) -> tuple[nn.Module, AdamW, AdamW]:
    model = make_model(device)
    make = lambda params: AdamW(params, lr=1e-2, capturable=True, max_grad_norm=0.5, **options)  # noqa: E731
    return model, make(model.parameters()), make(make_model(device).parameters())


def follow(twin: AdamW, optimizer: AdamW) -> None:
    """An eager step with the gradients of another optimizer."""
    set_gradients(params_of(twin), [param.grad for param in params_of(optimizer)])
    twin.step()


def test_a_whole_training_step(cuda: torch.device) -> None:
    """Captured as torch's documentation says; the eager twin is given the gradients of each replay."""
    model, optimizer, twin = trained_model(cuda)
    batch = torch.randn(8, 16, device=cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            follow(twin, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    losses = []
    for _ in range(REPLAYS):
        batch.normal_()
        graph.replay()
        follow(twin, optimizer)
        losses.append(loss.item())
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))
    assert sum(losses[-10:]) < sum(losses[:10])


# Of torch's own warm-up, whose nodes it keeps for the capture.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
# Of torch's own backward, where it is the first work of its thread on the device.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
def test_graphed_callables(cuda: torch.device) -> None:
    model, optimizer, twin = trained_model(cuda)
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(8, 16, device=cuda),))
    for _ in range(10):
        optimizer.zero_grad()
        loss_of(graphed, torch.randn(8, 16, device=cuda)).backward()
        optimizer.step()
        follow(twin, optimizer)
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))


def test_side_streams(cuda: torch.device) -> None:
    """Two optimizers on two streams at once, one of them in a graph, have the bits of one after the other."""
    optimizers = [make_optimizer(cuda, max_grad_norm=norm) for norm in (0.5, 1.0)]
    twins = [make_optimizer(cuda, max_grad_norm=norm) for norm in (0.5, 1.0)]
    gradients = gradients_for(twins[0], 50, bad=[7])
    graph = captured(optimizers[1].step)
    streams = [torch.cuda.Stream() for _ in optimizers]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for grads in gradients:
        for optimizer, step, stream in zip(
            optimizers, (optimizers[0].step, graph.replay), streams, strict=True
        ):
            with torch.cuda.stream(stream):
                train(optimizer, step, [grads])
    torch.cuda.synchronize()
    for optimizer, twin in zip(optimizers, twins, strict=True):
        for grads in gradients:
            train(twin, twin.step, [grads])
        assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=["plain", "clipped"])
def test_a_step_waits_for_nothing(cuda: torch.device, options: dict[str, Any]) -> None:
    optimizer = make_optimizer(cuda, **options)
    train(optimizer, optimizer.step, gradients_for(optimizer, 1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- CUDA graphs of Inductor --------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    reset_cudagraph_trees()
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5, "amsgrad": True}], ids=["plain", "clipped"])
def test_reduce_overhead(cuda: torch.device, options: dict[str, Any]) -> None:
    """Inductor records a graph, and copies none of what is written: its addresses are known to be fixed."""
    optimizer, twin = make_optimizer(cuda, **options), make_optimizer(cuda, **options)
    for param in params_of(optimizer):
        torch._dynamo.mark_static_address(param.grad)  # or torch copies it before each replay
    step = torch.compile(optimizer.step, fullgraph=True, mode="reduce-overhead")
    gradients = gradients_for(optimizer, 50, bad=[20] if options else [])
    train(optimizer, step, gradients)
    train(twin, twin.step, gradients)
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = get_container(cuda.index).tree_manager
    assert manager is not None
    assert manager.new_graph_id().id == 1


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=["plain", "clipped"])
def test_a_step_takes_no_memory_for_copies(
    cuda: torch.device, options: dict[str, Any], compiled: bool
) -> None:
    params = [nn.Parameter(torch.randn(1 << 20, device=cuda)) for _ in range(4)]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = AdamW(params, lr=scalar(0.1, cuda), **options)
    step = torch.compile(optimizer.step, fullgraph=True) if compiled else optimizer.step
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < params[0].nbytes // 16


# --- refusals; their texts are in test_capture_refusals.py --------------------------------------------------


def test_a_captured_step_with_a_number_is_refused(cuda: torch.device) -> None:
    """The capture itself goes on, and nothing was written."""
    optimizer = make_optimizer(cuda, lr=0.1)
    train(optimizer, optimizer.step, gradients_for(optimizer, 1))
    before = Snapshot(tensors_of(optimizer))
    other = torch.zeros(3, device=cuda)

    def attempt() -> None:
        with pytest.raises(RuntimeError, match=r"lr of group 0 is the number 0\.1"):
            optimizer.step()
        other.add_(1.0)

    graph = captured(attempt)
    graph.replay()
    before.assert_unchanged()
    assert other.tolist() == [1.0] * 3
