"""Whole training steps under ``torch.compile``: all from forward to ``zero_grad`` in one graph.

The eager twin is given the gradients that the compiled program computed, so that bits can be compared: how
Inductor rounds a model is not the optimizer's concern.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.optim import lr_scheduler

import fused_adamw
from fused_adamw import AdamW
from graphs import generated_body
from training import assert_all_same_bits, compilations, params_of, set_gradients, tensors_of

# Of Inductor's first import, of max-autotune, and of Dynamo, which reads ``.grad`` of all that it meets.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

STEPS = 50
WholeStep = Callable[[Tensor], tuple[Tensor, list[Tensor | None]]]


@pytest.fixture(autouse=True)
def fresh_dynamo(set_threads: Callable[[int], None]) -> Iterator[None]:
    set_threads(1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced_backward() -> Iterator[None]:
    """Lets Dynamo trace ``backward()``."""
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch does not trace backward()")
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


class Model(nn.Module):
    """A layer that is always used, and one that is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.extra = nn.Linear(6, 1)

    def forward(self, batch: Tensor, with_extra: bool) -> Tensor:
        result: Tensor = self.layers(batch)
        return result + self.extra(batch) if with_extra else result


def make_model(device: torch.device) -> Model:
    torch.manual_seed(0)
    return Model().to(device)


def batches(count: int, device: torch.device, size: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 6, generator=generator).to(device) for _ in range(count)]


def tensor(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=device)


def make_optimizer(device: torch.device, **options: Any) -> AdamW:
    return AdamW(make_model(device).parameters(), **{"lr": tensor(0.01, device), **options})


def make_groups(device: torch.device, **options: Any) -> AdamW:
    """Groups that differ in every option."""
    model = make_model(device)
    groups = [
        {"params": model.layers.parameters(), "weight_decay": 0.1, "amsgrad": True},
        {"params": model.extra.parameters(), "maximize": True, "eps": 1e-6, "betas": (0.8, 0.9), "lr": 0.02},
    ]
    return AdamW(groups, **{"lr": tensor(0.01, device), **options})


def loss_of(optimizer: AdamW) -> Callable[[Tensor, bool], Tensor]:
    """The loss of a model that has the optimizer's parameters."""
    model = Model()
    for name, param in zip(dict(model.named_parameters()), params_of(optimizer), strict=True):
        layer, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(layer), attribute, param)

    def loss(batch: Tensor, with_extra: bool) -> Tensor:
        return (model(batch, with_extra) - batch.sum(1, keepdim=True)).square().mean()

    return loss


def whole_step(optimizer: AdamW, *, with_extra: bool = True) -> WholeStep:
    """A training step; returns the gradients as well."""
    loss_function = loss_of(optimizer)
    params = params_of(optimizer)
    # A scheduler replaces optimizer.step by a function that Dynamo refuses to trace; this is its own.
    optimizer_step = optimizer.step

    def step(batch: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        loss = loss_function(batch, with_extra)
        loss.backward()
        grads = [param.grad for param in params]
        optimizer_step()
        optimizer.zero_grad()
        return loss.detach(), grads

    return step


def follow(twin: torch.optim.Optimizer, grads: Sequence[Tensor | None]) -> None:
    """An eager step with these gradients."""
    set_gradients(params_of(twin), grads)
    twin.step()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.5},
    "clipped AMSGrad, ascending": {"max_grad_norm": 0.5, "amsgrad": True, "maximize": True},
}


@pytest.mark.usefixtures("traced_backward")
@pytest.mark.parametrize("make", [make_optimizer, make_groups])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_one_graph_has_the_bits_of_eager(
    device: torch.device, make: Callable[..., AdamW], options: dict[str, Any]
) -> None:
    """From the first step on, which finds no states, there is one program."""
    optimizer, twin = make(device, **options), make(device, **options)
    step = torch.compile(whole_step(optimizer), fullgraph=True, backend="aot_eager")
    losses = []
    with compilations() as ids:
        for batch in batches(6, device):
            loss, grads = step(batch)
            follow(twin, grads)
            losses.append(loss.item())
            assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))
    assert len(ids) == 1
    assert all(param.grad is None for param in params_of(optimizer))
    assert len(set(losses)) == len(losses)
    if options.get("max_grad_norm"):
        assert optimizer.last_stats.norm == twin.last_stats.norm > 0.0


@pytest.mark.usefixtures("traced_backward")
def test_one_graph_is_a_training_step_of_eager(device: torch.device) -> None:
    """With eager's own gradients: to rounding, the same training."""
    optimizer, twin = (make_optimizer(device, max_grad_norm=0.5) for _ in range(2))
    step, eager_step = torch.compile(whole_step(optimizer), fullgraph=True), whole_step(twin)
    for batch in batches(10, device):
        step(batch)
        eager_step(batch)
    torch.testing.assert_close(tensors_of(optimizer), tensors_of(twin), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("traced_backward")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_generated_code_steps_on_the_tensors_themselves(device: torch.device, mode: str) -> None:
    """An op call for each group, on the program's inputs and its own gradients; none is copied."""
    optimizer, twin = (make_groups(device, max_grad_norm=0.5) for _ in range(2))
    step = torch.compile(whole_step(optimizer), fullgraph=True, mode=mode)
    first, *others = batches(4, device)
    (_, grads), codes = run_and_get_code(step, first)
    follow(twin, grads)
    [code] = codes
    body = generated_body(code)
    assert re.findall(r"torch\.ops\.fused_adamw\.([\w.]+)\(", body) == [
        "analyze_gradient.default",
        "merge_gradient_stats.default",
        "adamw_scaled.tensor",
        "adamw_scaled.tensor",
    ]
    assert not re.findall(r"\bcopy_|\bclone|\.item\(", body)
    for call in re.findall(r"adamw_scaled\.tensor\((.*)\)", body):
        params, gradients, *states = re.findall(
            r"\[(.*?)\]", re.sub(r"reinterpret_tensor\(.*?\), 0\)", "view", call)
        )
        for written in (params, *states):
            assert re.fullmatch(r"(arg\d+_1|primals_\d+)?(, (arg\d+_1|primals_\d+))*", written), written
        assert gradients
    for batch in others:
        _, grads = step(batch)
        follow(twin, grads)
        assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))
    if device.type == "cuda":
        assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.usefixtures("traced_backward")
def test_gradients_under_autocast_are_computed_once(device: torch.device) -> None:
    """They are the float32 of 16-bit products, which Inductor would otherwise compute for each op anew."""
    optimizer = make_optimizer(device, max_grad_norm=0.5)
    loss_function = loss_of(optimizer)

    def step(batch: Tensor) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_function(batch, True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    _, [code] = run_and_get_code(torch.compile(step, fullgraph=True), *batches(1, device))
    body = generated_body(code)
    [read] = re.findall(r"analyze_gradient\.default\(\[(.*?)\], buf", body)
    [used] = re.findall(r"adamw_scaled\.tensor\(\[.*?\], \[(.*?)\], \[arg", body)
    *read_twice, _, _, _ = re.split(r", (?=buf|reinterpret)", read)  # without those of one element
    assert len(read_twice) == 3
    assert used.startswith(", ".join(read_twice))


@pytest.mark.usefixtures("traced_backward")
def test_batches_of_any_size(device: torch.device) -> None:
    optimizer, twin = make_optimizer(device), make_optimizer(device)
    step = torch.compile(whole_step(optimizer), fullgraph=True, backend="aot_eager")
    with compilations() as ids:
        for size in (4, 7, 16, 33, 5):
            [batch] = batches(1, device, size)
            _, grads = step(batch)
            follow(twin, grads)
            assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))
    assert len(ids) <= 2


@pytest.mark.usefixtures("traced_backward")
def test_parameters_that_sometimes_get_no_gradient(device: torch.device) -> None:
    """Each pattern is a program of its own; a parameter without a gradient keeps its bits and its count."""
    optimizer, twin = make_optimizer(device), make_optimizer(device)
    steps = {
        extra: torch.compile(whole_step(optimizer, with_extra=extra), fullgraph=True, backend="aot_eager")
        for extra in (False, True)
    }
    with compilations() as ids:
        for extra, batch in zip((False, False, True, True, False, True), batches(6, device), strict=True):
            _, grads = steps[extra](batch)
            assert [grad is None for grad in grads] == [False] * 4 + [not extra] * 2
            follow(twin, grads)
            assert_all_same_bits(params_of(optimizer), params_of(twin))
    assert len(ids) == 2
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))
    assert [state["step"].item() for state in optimizer.state.values()] == [6.0] * 4 + [3.0] * 2


def test_zero_grad_makes_no_break(device: torch.device) -> None:
    optimizer = make_optimizer(device)
    set_gradients(params_of(optimizer), [torch.ones_like(param) for param in params_of(optimizer)])
    torch.compile(optimizer.zero_grad, fullgraph=True, backend="aot_eager")()
    assert all(param.grad is None for param in params_of(optimizer))


# --- schedules and scalers ----------------------------------------------------------------------------------


def plateau(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A scheduler that finds no progress, so that it lowers the learning rate every other step."""
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=1)
    return lambda: scheduler.step(1.0)


def one_cycle(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS + 1).step


def assign_numbers(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Numbers where tensors were, as loops do that know of no tensors."""
    counts = iter(range(1, STEPS + 1))

    def schedule() -> None:
        optimizer.param_groups[0]["lr"] = 0.01 / next(counts)

    return schedule


def warm_up(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return lr_scheduler.LinearLR(optimizer, 0.1, 1.0, STEPS).step


# The most compilations: a number that changes costs one more; so does a number in the place of a tensor.
SCHEDULES: dict[str, tuple[Callable[[torch.optim.Optimizer], Callable[[], None]], bool, int]] = {
    "warm-up of a tensor": (warm_up, True, 1),
    "warm-up of a number": (warm_up, False, 2),
    "plateau with a tensor": (plateau, True, 1),
    "plateau with a number": (plateau, False, 2),
    "numbers over a tensor": (assign_numbers, True, 3),
    "one cycle, which changes beta1 too, with a tensor": (one_cycle, True, 2),
    "one cycle with a number": (one_cycle, False, 2),
}


@pytest.mark.usefixtures("traced_backward")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_recompiles_in_each_step(name: str) -> None:
    """The scheduler comes after the first step, with keys of its own such as ``initial_lr``."""
    device = torch.device("cpu")
    scheduler_of, as_tensor, most = SCHEDULES[name]
    lr = {} if as_tensor else {"lr": 0.01}
    optimizer, twin = make_optimizer(device, **lr), make_optimizer(device, **lr)
    step = torch.compile(whole_step(optimizer), fullgraph=True, backend="aot_eager")
    rates = set()
    with compilations() as ids:
        schedules = []
        for batch in batches(STEPS, device):
            _, grads = step(batch)
            follow(twin, grads)
            schedules = schedules or [scheduler_of(each) for each in (optimizer, twin)]
            for schedule in schedules:
                schedule()
            rates.add(float(optimizer.param_groups[0]["lr"]))
    assert len(rates) > STEPS // 3
    assert len(ids) <= most
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))


SCALERS = {"torch": torch.amp.GradScaler, "fused_adamw": fused_adamw.GradScaler}


@pytest.mark.parametrize("guard", [{}, {"max_grad_norm": 0.5}], ids=["plain", "clipped"])
@pytest.mark.parametrize("scaler_of", SCALERS.values(), ids=SCALERS.keys())
def test_a_compiled_step_under_a_scaler(
    device: torch.device, scaler_of: type[torch.amp.GradScaler], guard: dict[str, Any]
) -> None:
    """50 steps of changing scale and learning rate, some of which overflow: one program."""
    optimizer, twin = make_optimizer(device, **guard), make_optimizer(device, **guard)
    optimizer.step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")  # type: ignore[method-assign]
    scalers = [scaler_of(device.type, init_scale=2.0**8, growth_interval=4) for _ in range(2)]
    loss_function = loss_of(optimizer)
    scales = set()
    with compilations() as ids:
        for i, batch in enumerate(batches(STEPS, device)):
            optimizer.zero_grad()
            scalers[0].scale(loss_function(batch, True)).backward()
            if i % 9 == 4:
                params_of(optimizer)[1].grad[3] = float("inf")
            set_gradients(params_of(twin), [param.grad for param in params_of(optimizer)])
            scalers[1].scale(torch.ones((), device=device))  # makes its scale, as the first does
            for scaler, each in zip(scalers, (optimizer, twin), strict=True):
                each.param_groups[0]["lr"].fill_(0.01 / (1 + i))
                scaler.step(each)
                scaler.update()
            scales.add(scalers[0].get_scale())
            assert scalers[0].get_scale() == scalers[1].get_scale()
    assert len(ids) == 1
    assert len(scales) > 3
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))
    assert {state["step"].item() for state in optimizer.state.values()} == {STEPS - 6.0}
