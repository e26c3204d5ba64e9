"""Steps where something watches, replaces or recomputes: dispatch modes, functionalization, checkpointing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cases import Snapshot, call_step, lists_of, normal_sample, option_arguments, step_inplace_op, step_op
from fused_adamw import AdamW, adamw_step, gradient_stats
from training import (
    assert_all_same_bits,
    compilations,
    make_gradients,
    make_params,
    params_of,
    set_gradients,
    tensors_of,
)

OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "clipped": {"max_grad_norm": 0.5}}
CALLS = {
    "plain": ["step_.tensor"] * 2,
    "clipped": ["analyze_gradient.default", "merge_gradient_stats.default", *["adamw_scaled.tensor"] * 2],
}


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_optimizer(device: torch.device, **options: Any) -> AdamW:
    params = [nn.Parameter(param.detach().to(device)) for param in make_params()]
    groups = [{"params": params[0::2]}, {"params": params[1::2], "maximize": True}]
    optimizer = AdamW(groups, **options)
    set_gradients(params, [grad.to(device) for grad in make_gradients(make_params(), 1)[0]])
    return optimizer


# --- modes --------------------------------------------------------------------------------------------------


class DispatchRecorder(TorchDispatchMode):
    """Notes the ops of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "fused_adamw":
            self.calls.append(
                op.name().removeprefix("fused_adamw::") + ("" if "." in op.name() else ".default")
            )
        return op(*args, **(kwargs or {}))


class FunctionRecorder(TorchFunctionMode):
    """Notes the ops of this package as Python calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "fused_adamw" in str(op):
            name = str(op).removeprefix("fused_adamw.")
            self.calls.append(name if "." in name else f"{name}.default")
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("recorder", [DispatchRecorder, FunctionRecorder])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_mode_sees_each_op_once(device: torch.device, name: str, recorder: Any) -> None:
    """Between steps that no mode sees; the bits are those without one."""
    optimizer, twin = (make_optimizer(device, **OPTIONS[name]) for _ in range(2))
    optimizer.step()
    with recorder() as recorded:
        optimizer.step()
    optimizer.step()
    for _ in range(3):
        twin.step()
    assert recorded.calls == CALLS[name]
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))


# --- functionalization --------------------------------------------------------------------------------------


def test_functionalize_of_an_op_out_of_place(device: torch.device) -> None:
    """Around writes to its results and to a view of its input, which it must see."""
    sample = normal_sample((4, 5), device=device)
    options = option_arguments({}, "tensors", device)
    step = torch.tensor(5, device=device)

    def program(param: Tensor, *others: Tensor) -> Tensor:
        param = param.clone()
        param[1].mul_(2.0)
        new = step_op.tensor(param, *others, step, **options)
        new[0][2].add_(1.0)
        result: Tensor = new[0] + new[1]
        return result

    expected = program(*sample.tensors)
    before = Snapshot(sample.tensors)
    assert_all_same_bits([functionalize(program)(*sample.tensors)], [expected])
    graph = make_fx(functionalize(program))(*sample.tensors)
    assert_all_same_bits([graph(*sample.tensors)], [expected])
    before.assert_unchanged()
    targets = [str(node.target) for node in graph.graph.nodes]
    assert targets.count("fused_adamw.step.tensor") == 1
    assert "aten.add_.Tensor" not in targets


def test_functionalize_of_an_op_in_place_is_refused_by_torch(device: torch.device) -> None:
    """torch.compile and torch.export functionalize such ops; torch.func.functionalize does for none."""
    lists = lists_of([normal_sample(5, device=device)])
    before = Snapshot(tensor for tensors in lists for tensor in tensors)

    def program(param: Tensor) -> Tensor:
        step_inplace_op([param], *lists[1:])
        return param

    with pytest.raises(RuntimeError, match=r"fused_adamw::step_"):
        functionalize(program)(lists[0][0])
    before.assert_unchanged()


# --- checkpointing ------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two blocks, recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_checkpointed_model(device: torch.device, name: str, compiled: bool) -> None:
    """A parameter that is updated between its forward and backward pass is noticed; otherwise it trains."""
    torch.manual_seed(0)
    model = Model().to(device)
    twin_params = copy.deepcopy(list(model.parameters()))
    optimizer, twin = AdamW(model.parameters(), **OPTIONS[name]), AdamW(twin_params, **OPTIONS[name])
    forward: Callable[[Tensor], Tensor] = model
    step: Callable[[], Any] = optimizer.step
    if compiled:
        forward = torch.compile(model, fullgraph=True, backend="aot_eager")
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    with compilations() as ids:
        for _ in range(3):
            optimizer.zero_grad()
            forward(torch.randn(4, 6, device=device)).square().sum().backward()
            set_gradients(twin_params, [param.grad for param in model.parameters()])
            step()
            twin.step()
            assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))
    assert len(ids) == (2 if compiled else 0)
    if not compiled:
        loss = model(torch.randn(4, 6, device=device)).square().sum()
        loss.backward(retain_graph=True)
        weight = model.blocks[0][0].weight
        loss = (weight @ weight).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- devices without kernels --------------------------------------------------------------------------------


def meta_optimizer(**options: Any) -> AdamW:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), **options)
    for param in params_of(optimizer):
        param.grad = torch.empty_like(param)
    return optimizer


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_model_without_storage_is_refused(name: str, backend: str | None) -> None:
    """Compiled, it would otherwise do nothing, silently."""
    optimizer = meta_optimizer(**OPTIONS[name])
    step = optimizer.step
    if backend is not None:
        step = torch.compile(step, fullgraph=True, backend=backend)
    with pytest.raises(
        Exception, match="the parameters are on meta; a device of type cpu or cuda is required"
    ):
        step()


def test_functions_of_tensors_without_storage_are_refused() -> None:
    tensor = torch.empty(3, device="meta")
    for call in (lambda: adamw_step(tensor, tensor), lambda: gradient_stats([tensor])):
        with pytest.raises(ValueError, match="the parameters are on meta; a device of type cpu or cuda"):
            call()


def test_an_optimizer_made_before_its_storage(device: torch.device) -> None:
    """``to_empty`` after the optimizer was made, as large models are made."""
    sample = normal_sample((2, 3), device=device, step=0).with_zero_moments()
    with torch.device("meta"):
        model = nn.Linear(3, 2, bias=False)
    model.to_empty(device=device)
    optimizer = AdamW(model.parameters())
    with torch.no_grad():
        model.weight.copy_(sample.param)
    model.weight.grad = sample.grad.clone()
    optimizer.step()
    assert_all_same_bits([model.weight.detach()], [call_step(sample).param])
