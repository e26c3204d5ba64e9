"""The guarded step under ``torch.compile``: one graph, no copies, the bits of eager."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code

from cases import Snapshot, assert_same_bits
from fused_adamw import AdamW, NonfiniteGradientError, gradient_stats, merge_stats
from oracle import gradient_stats as stats_oracle

SHAPES = ((50, 7), (), (300,), (20_000,))


@pytest.fixture(autouse=True)
def fresh_compiler(set_threads: Callable[[int], None]) -> Iterator[None]:
    set_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def make_gradients(steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[0.01 * torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(steps)]


def make_optimizer(**options: Any) -> AdamW:
    """Two groups, one of which has its learning rate in a tensor."""
    params = make_params()
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": torch.tensor(0.01, dtype=torch.float64)}]
    return AdamW(groups, **{"max_grad_norm": 0.5, **options})


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors: list[Tensor] = []
    for param in params_of(optimizer):
        state = optimizer.state[param]
        tensors += [param, *(state[name] for name in sorted(state))]
    return tensors


def assert_same_tensors(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    for i, (a, b) in enumerate(zip(tensors_of(found), tensors_of(expected), strict=True)):
        assert_same_bits(a.detach(), b.detach(), f"tensor {i}")


def set_gradients(optimizer: torch.optim.Optimizer, grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params_of(optimizer), grads, strict=True):
        param.grad = grad.clone()


class KeepingBackend:
    """Runs graphs as they are, and keeps them: one for each compilation."""

    def __init__(self) -> None:
        self.graphs: list[fx.Graph] = []

    def __call__(self, module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(module.graph)
        return module.forward


def train(optimizer: AdamW, step: Callable[[], Any], gradients: Sequence[Sequence[Tensor]]) -> None:
    for grads in gradients:
        set_gradients(optimizer, grads)
        step()


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"amsgrad": True, "maximize": True},
    {"max_grad_norm": None, "nonfinite": "skip"},
    {"max_grad_norm": 0.0},
    {"hierarchical_stats": False},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_bits_are_those_of_eager(options: dict[str, Any]) -> None:
    """20 steps with new gradients and a new learning rate in each, one not finite: one compilation."""
    eager, compiled = make_optimizer(**options), make_optimizer(**options)
    step = torch.compile(compiled.step, fullgraph=True, backend="aot_eager")
    for i, grads in enumerate(make_gradients(20)):
        if i == 7:
            grads[2][5] = math.nan
        for optimizer, take in ((eager, eager.step), (compiled, step)):
            optimizer.param_groups[1]["lr"].fill_(0.01 / (i + 1))
            train(optimizer, take, [grads])
        assert_same_tensors(compiled, eager)
        stats = compiled.last_stats
        assert_same_bits(stats.gradients.report, eager.last_stats.gradients.report)
        assert stats.norm == pytest.approx(stats_oracle.exact_norm(grads), rel=1e-7)
        assert stats.clip_coefficient == eager.last_stats.clip_coefficient
        assert stats.skipped == (i == 7)
        assert stats.nonfinite_parameters == (["param_groups[1]['params'][0]"] if i == 7 else [])
    assert all(state["step"].item() == 19.0 for state in compiled.state.values())


def test_inductor_gives_the_bits_of_eager_and_copies_nothing() -> None:
    eager, compiled = make_optimizer(), make_optimizer()
    step = torch.compile(compiled.step, fullgraph=True)
    first, *others = make_gradients(4)
    set_gradients(compiled, first)
    before = Snapshot([param.grad for param in params_of(compiled)])
    _, codes = run_and_get_code(step)
    before.assert_unchanged()
    train(compiled, step, others)
    train(eager, eager.step, [first, *others])
    assert_same_tensors(compiled, eager)
    assert compiled.last_stats.norm == eager.last_stats.norm

    (code,) = codes
    (body,) = re.findall(r"def call\(self, args\):(.*?)return \(", code, re.DOTALL)
    ops = re.findall(r"torch\.ops\.([\w.]+)\(", body)
    assert ops == [
        "fused_adamw.analyze_gradient.default",
        "fused_adamw.merge_gradient_stats.default",
        "fused_adamw.adamw_scaled.tensor",
        "fused_adamw.adamw_scaled.tensor",
    ]
    # Storage is made for the rows, the (empty) scratch, the report and float64 numbers of one element.
    storage = re.findall(r"empty_strided_cpu\((\(.*?\)), \(.*?\), (torch\.\w+)\)", body)
    rows = sum(-(-math.prod(shape) // 16384) for shape in SHAPES)
    allowed = {(f"({rows}, 3)", "torch.float32"), ("(0, )", "torch.float32"), ("(3, )", "torch.float32")}
    assert set(storage) == allowed | {("()", "torch.float64")}
    assert not re.search(r"copy_|clone|\.item\(|_local_scalar_dense", body)


def graph_text(graph: fx.Graph) -> str:
    """The calls of a graph in order; inputs and results are numbered as they first appear."""
    names: dict[fx.Node, str] = {}

    def name(node: fx.Node) -> str:
        return names.setdefault(node, f"t{len(names)}")

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return name(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        return str(value)

    lines = []
    for node in graph.nodes:
        if node.op in ("call_function", "call_method") and "_set_grad_enabled" not in str(node.target):
            target = getattr(node.target, "__name__", str(node.target))
            arguments = [*map(text, node.args), *(f"{k}={text(v)}" for k, v in node.kwargs.items())]
            result = f"{name(node)} = " if node.users else ""
            lines.append(f"{result}{target}({', '.join(arguments)})")
    (output,) = (node for node in graph.nodes if node.op == "output")
    lines.append(f"return {text(output.args[0])}")
    return "\n".join(textwrap.fill(line, 105, subsequent_indent="    ") for line in lines)


def test_graph() -> None:
    backend = KeepingBackend()
    optimizer = make_optimizer()
    set_gradients(optimizer, make_gradients(1)[0])
    torch.compile(optimizer.step, fullgraph=True, backend=backend)()
    (graph,) = backend.graphs
    assert_expected_inline(
        graph_text(graph),
        """\
t0 = empty(5, 3, dtype=torch.float32, device=cpu)
analyze_gradient([t1, t2, t3, t4], t0, grad_scale=None)
t5 = new_empty(t0, 0)
t6 = new_empty(t0, 3)
merge_gradient_stats(t0, t5, t6, hierarchical=True)
t7 = ones([], dtype=torch.float64, device=cpu)
t8 = mul(t7, 0.001)
t9 = ones([], dtype=torch.float64, device=cpu)
t10 = mul(t9, 0.9)
t11 = ones([], dtype=torch.float64, device=cpu)
t12 = mul(t11, 0.999)
adamw_scaled.tensor([t13, t14], [t1, t2], [t15, t16], [t17, t18], [], [t19, t20], t6, max_norm=0.5,
    norm_epsilon=1e-06, lr=t8, beta1=t10, beta2=t12, weight_decay=0.01, eps=1e-08, maximize=False,
    grad_scale=None, found_inf=None)
t21 = ones([], dtype=torch.float64, device=cpu)
t22 = mul(t21, 0.9)
t23 = ones([], dtype=torch.float64, device=cpu)
t24 = mul(t23, 0.999)
adamw_scaled.tensor([t25, t26], [t3, t4], [t27, t28], [t29, t30], [], [t31, t32], t6, max_norm=0.5,
    norm_epsilon=1e-06, lr=t33, beta1=t22, beta2=t24, weight_decay=0.01, eps=1e-08, maximize=False,
    grad_scale=None, found_inf=None)
return [t6, t0]""",
    )


def test_a_float_learning_rate_compiles_once_more() -> None:
    eager, compiled = (AdamW(make_params(), lr=0.1, max_grad_norm=0.5) for _ in range(2))
    backend = KeepingBackend()
    step = torch.compile(compiled.step, fullgraph=True, backend=backend)
    for i, grads in enumerate(make_gradients(8)):
        for optimizer, take in ((eager, eager.step), (compiled, step)):
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            train(optimizer, take, [grads])
        assert_same_tensors(compiled, eager)
    assert len(backend.graphs) == 2


def test_scale_and_flag_of_a_scaler() -> None:
    eager, compiled = make_optimizer(), make_optimizer()
    step = torch.compile(compiled.step, fullgraph=True, backend="aot_eager")
    for i, grads in enumerate(make_gradients(4)):
        for optimizer, take in ((eager, eager.step), (compiled, step)):
            optimizer.grad_scale = torch.tensor(3.0)
            optimizer.found_inf = torch.tensor(float(i == 2))
            train(optimizer, take, [grads])
        assert_same_tensors(compiled, eager)
        assert compiled.last_stats.skipped == (i == 2)
        norm = stats_oracle.exact_norm(grads, 3.0)
        assert compiled.last_stats.norm == pytest.approx(norm, rel=1e-7)
    assert {state["step"].item() for state in compiled.state.values()} == {3.0}


def test_given_statistics() -> None:
    eager, compiled = make_optimizer(), make_optimizer()
    step = torch.compile(compiled.step, fullgraph=True, backend="aot_eager")
    rows = torch.tensor([[3.0, 4.0, 0.0]])
    for i, grads in enumerate(make_gradients(3)):
        rows[0, 2] = float(i == 1)
        for optimizer, take in ((eager, eager.step), (compiled, step)):
            set_gradients(optimizer, grads)
            take(stats=merge_stats(rows))
        assert_same_tensors(compiled, eager)
    assert {state["step"].item() for state in compiled.state.values()} == {2.0}


def test_an_error_breaks_the_graph_and_is_raised() -> None:
    optimizer = make_optimizer(nonfinite="error")
    step = torch.compile(optimizer.step, backend="aot_eager")
    good, bad = make_gradients(2)
    train(optimizer, step, [good])
    bad[3][-1] = math.inf
    set_gradients(optimizer, bad)
    before = Snapshot(tensors_of(optimizer))
    with pytest.raises(NonfiniteGradientError, match=r"in param_groups\[1\]\['params'\]\[1\];"):
        step()
    before.assert_unchanged()


def test_statistics_of_gradients_of_any_size() -> None:
    """Sizes are symbols from the second compilation on."""
    backend = KeepingBackend()

    @torch.compile(fullgraph=True, backend=backend)
    def report(grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        stats = gradient_stats(grads)
        return stats.report, stats.rows

    generator = torch.Generator().manual_seed(0)
    for size in (100, 200, 300, 12_345):
        grads = [torch.randn(size, generator=generator), torch.randn(5, generator=generator).half()]
        found, rows = report(grads)
        assert_same_bits(rows, stats_oracle.rows_of(grads))
        assert_same_bits(found, stats_oracle.merge(rows))
    assert len(backend.graphs) <= 2


@pytest.mark.parametrize("hierarchical", [True, False])
def test_merging_any_number_of_rows(hierarchical: bool) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def merged(rows: Tensor) -> Tensor:
        return merge_stats(rows, hierarchical=hierarchical).report

    expected = stats_oracle.merge if hierarchical else stats_oracle.merge_serially
    generator = torch.Generator().manual_seed(0)
    for count in (2, 3, 1024, 1025, 1500, 2049):
        rows = torch.cat([torch.rand(count, 2, generator=generator) + 1.0, torch.zeros(count, 1)], dim=1)
        assert_same_bits(merged(rows), expected(rows))
