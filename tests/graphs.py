"""The graph of a step as text, for tests and for the documentation."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import torch
from torch import Tensor, nn

import fused_adamw
from training import make_params, params_of, set_gradients


class Label(str):
    """What a node is called; printed without quotes."""

    __repr__ = str.__str__


def names_of_tensors(optimizer: fused_adamw.AdamW) -> dict[int, str]:
    """What the tensors of an optimizer are to it, by their addresses."""
    named: list[tuple[Any, str]] = []
    for g, group in enumerate(optimizer.param_groups):
        for name, value in zip(("lr", "beta1", "beta2"), (group["lr"], *group["betas"]), strict=True):
            named.append((value, f"{name}_{g}"))
    for i, param in enumerate(params_of(optimizer)):
        named += [(param, f"param{i}"), (param.grad, f"grad{i}")]
        named += [(value, f"{name}{i}") for name, value in optimizer.state.get(param, {}).items()]
    # The first name of a tensor that has several.
    return {value.data_ptr(): name for value, name in reversed(named) if isinstance(value, Tensor)}


def graph_of(optimizer: fused_adamw.AdamW) -> str:
    """The graph of one step as text; tensors are called what they are to the optimizer."""
    graphs: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append((module, inputs))
        return module.forward

    torch.compile(optimizer.step, fullgraph=True, backend=backend)()
    [(module, inputs)] = graphs
    names = names_of_tensors(optimizer)
    placeholders = iter(inputs)
    labels: dict[torch.fx.Node, Label] = {}
    lines: list[str] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            labels[node] = Label(names[next(placeholders).data_ptr()])
        elif node.op == "get_attr":
            labels[node] = Label(names[getattr(module, node.target).data_ptr()])
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), labels.__getitem__)
            arguments = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
            labels[node] = Label(f"%{len(lines)}")
            operator = isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
            target = str(node.target) if operator else getattr(node.target, "__name__", node.target)
            if target in ("_set_grad_enabled", "output"):
                continue
            lines.append(f"{labels[node]} = {target}({', '.join(arguments)})")
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="    ") for line in lines)


def small(count: int = 2) -> list[nn.Parameter]:
    params = make_params([(2, 3)] * count)
    set_gradients(params, [torch.ones(2, 3)] * count)
    return params


def tensor_options() -> dict[str, Any]:
    return {"lr": torch.tensor(0.1), "betas": (torch.tensor(0.9), torch.tensor(0.99))}


def generated_body(code: str) -> str:
    """What Inductor's code does with tensors, without its comments on where a line comes from."""
    # With CUDA graphs, the work is done in partitions, and ``call`` only calls these.
    start = min(i for i in map(code.find, ("def partition_0(", "def call(")) if i >= 0)
    return re.sub(r"# (?!reuse).*", "", code[start : code.index("runner = Runner")])
