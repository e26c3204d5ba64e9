"""The ops themselves inside compiled programs: functional loops, memory, dead code, aliases, export."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.func import functional_call, grad_and_value

from cases import assert_same_bits, normal_gradient, normal_sample
from graphs import generated_body
from training import assert_all_same_bits, compilations

# The first import of Inductor brings it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

ops = torch.ops.fused_adamw
BACKENDS = ("aot_eager", "inductor")
SIZE = 1000


@pytest.fixture(autouse=True)
def fresh_dynamo(set_threads: Callable[[int], None]) -> Iterator[None]:
    set_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def numbers(device: torch.device) -> dict[str, Tensor]:
    values = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99}
    return {name: torch.tensor(v, dtype=torch.float64, device=device) for name, v in values.items()}


def counter(device: torch.device) -> Tensor:
    return torch.tensor(5.0, device=device)


# --- functional training ------------------------------------------------------------------------------------

States = dict[str, tuple[Tensor, ...]]


def functional_step(
    model: nn.Module, states: States, step: Tensor, batch: Tensor, options: dict[str, Tensor]
) -> tuple[States, Tensor, dict[str, Tensor]]:
    """New parameters and moments, the new count, and the gradients."""

    def loss_of(params: dict[str, Tensor]) -> Tensor:
        return (functional_call(model, params, (batch,)) - batch.sum(1, keepdim=True)).square().mean()

    grads, _ = grad_and_value(loss_of)({name: state[0] for name, state in states.items()})
    return update(states, grads, step, options), step + 1, grads


def update(states: States, grads: dict[str, Tensor], step: Tensor, options: dict[str, Tensor]) -> States:
    return {
        name: ops.step.tensor(param, grads[name], *moments, step, **options)
        for name, (param, *moments) in states.items()
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_functional_loop(device: torch.device, backend: str) -> None:
    """One program for all steps; each update has the bits of eager on the same gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    states: States = {
        name: (param.detach(), torch.zeros_like(param), torch.zeros_like(param))
        for name, param in model.named_parameters()
    }
    options = numbers(device)
    step = torch.zeros((), device=device)
    compiled = torch.compile(functional_step, fullgraph=True, backend=backend)
    before = [param.detach().clone() for param in model.parameters()]
    with compilations() as ids:
        for i in range(5):
            options["lr"] = torch.full_like(options["lr"], 0.1 / (1 + i))
            batch = torch.randn(16, 6, device=device)
            new, new_step, grads = compiled(model, states, step, batch, options)
            expected = update(states, grads, step, options)
            for name in states:
                assert_all_same_bits(new[name], expected[name])
            states, step = new, new_step
    assert len(ids) == 1
    assert step.item() == 5.0
    assert_all_same_bits([param.detach() for param in model.parameters()], before)


def steps_in_a_row(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, options: dict[str, Tensor]
) -> Tensor:
    """Two updates, and an operation after them."""
    state = ops.step.tensor(param, grad, exp_avg, exp_avg_sq, step, **options)
    param, _, _ = ops.step.tensor(state[0], grad, *state[1:], step + 1, **options)
    return param * 3.0


def test_inductor_reuses_memory(device: torch.device) -> None:
    """What an op has read is free after its last use; results are no copies."""
    arguments = (*normal_sample(SIZE, device=device).tensors, counter(device), numbers(device))
    found, [code] = run_and_get_code(torch.compile(steps_in_a_row, fullgraph=True), *arguments)
    assert_same_bits(found, steps_in_a_row(*arguments))
    body = generated_body(code)
    first, second = re.finditer(r"(buf\d+) = torch\.ops\.fused_adamw\.step\.tensor\((\w+),", body)
    between, after = second[2], body[second.end() :]
    assert f"{between} = {first[1]}[0]" in body
    assert f"del {between}\n" in after
    # The operation at the end writes over the result of the second.
    [result] = re.findall(rf"(buf\d+) = {second[1]}\[0\]", after)
    assert re.search(rf"= {result}; del {result}  # reuse", after)
    assert "empty_strided" not in after
    assert not re.search(r"copy_|clone", body)


# --- dead code ----------------------------------------------------------------------------------------------


def unused_functional_op(*arguments: Any) -> Tensor:
    *tensors, options = arguments
    ops.step.tensor(*tensors, **options)
    return tensors[0] + 1.0


def unused_inplace_ops(*arguments: Any) -> Tensor:
    """Nothing that they write is read by the program."""
    param, grad, exp_avg, exp_avg_sq, step, rows, scratch, report, options = arguments
    ops.analyze_gradient([grad], rows)
    ops.merge_gradient_stats(rows, scratch, report)
    ops.adamw_scaled.tensor(
        [param], [grad], [exp_avg], [exp_avg_sq], [], [step], report, max_norm=1.0, **options
    )
    ops.step_.tensor([param], [grad], [exp_avg], [exp_avg_sq], [], [step], **options)
    return options["lr"] + 1.0


def test_an_unused_functional_op_is_dropped(device: torch.device) -> None:
    arguments = (*normal_sample(SIZE, device=device).tensors, counter(device), numbers(device))
    found, [code] = run_and_get_code(torch.compile(unused_functional_op, fullgraph=True), *arguments)
    assert "fused_adamw" not in generated_body(code)
    assert_same_bits(found, arguments[0] + 1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ops_in_place_are_never_dropped(device: torch.device, backend: str) -> None:
    def arguments() -> list[Any]:
        storage = [torch.empty(shape, device=device) for shape in ((1, 3), (0,), (3,))]
        return [*normal_sample(SIZE, device=device).tensors, counter(device), *storage, numbers(device)]

    found, expected = arguments(), arguments()
    torch.compile(unused_inplace_ops, fullgraph=True, backend=backend)(*found)
    unused_inplace_ops(*expected)
    assert_all_same_bits(found[:-1], expected[:-1])
    assert found[4].item() == 7.0


# --- aliases ------------------------------------------------------------------------------------------------

# Which argument of an update of two parameters is a clone of which, inside the program. Inductor may remove a
# clone, so that one tensor is passed twice, where that cannot change what is computed.
CLONES = {
    "a gradient of its parameter": ("grad0", "param0"),
    "a parameter of its gradient": ("param0", "grad0"),
    "a gradient of its moment": ("grad1", "exp_avg1"),
    "a gradient of another parameter": ("grad0", "param1"),
    "a gradient of another gradient": ("grad1", "grad0"),
    "a moment of its parameter": ("exp_avg_sq0", "exp_avg0"),
    "a parameter of another parameter": ("param1", "param0"),
    "a counter of another counter": ("step1", "step0"),
}


def tensors_of_two(device: torch.device) -> dict[str, Tensor]:
    tensors = {}
    for i in range(2):
        sample = normal_sample(SIZE, seed=i, device=device)
        names = ("param", "grad", "exp_avg", "exp_avg_sq")
        tensors |= {f"{name}{i}": value for name, value in zip(names, sample.tensors, strict=True)}
        tensors[f"exp_avg{i}"].abs_()  # for it may become a second moment
        tensors[f"step{i}"] = torch.tensor(5.0 + i, device=device)
    return tensors


def step_of_two(tensors: dict[str, Tensor], options: dict[str, Tensor]) -> None:
    lists = [[tensors[f"{name}{i}"] for i in range(2)] for name in ("param", "grad", "exp_avg", "exp_avg_sq")]
    ops.step_.tensor(*lists, [], [tensors["step0"], tensors["step1"]], **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CLONES)
def test_a_clone_among_the_arguments(device: torch.device, name: str, backend: str) -> None:
    clone, original = CLONES[name]

    def program(tensors: dict[str, Tensor], options: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        changed = {**tensors, clone: tensors[original].clone()}
        step_of_two(changed, options)
        return changed[clone], tensors[original] + 1.0

    found, expected = tensors_of_two(device), tensors_of_two(device)
    options = numbers(device)
    results = torch.compile(program, fullgraph=True, backend=backend)(found, options)
    assert_all_same_bits(results, program(expected, options))
    assert_all_same_bits(list(found.values()), list(expected.values()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_that_are_views_of_one_input(device: torch.device, backend: str) -> None:
    """Flat buffers, and the counters of all parameters in one tensor; nothing is copied."""
    shapes = ((20, 20), (0,), (7,), (SIZE - 407,))

    def views(flat: Tensor) -> list[Tensor]:
        sizes = [torch.Size(shape).numel() for shape in shapes]
        return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]

    def program(buffers: Sequence[Tensor], steps: Tensor, options: dict[str, Tensor]) -> None:
        params, grads, exp_avgs, exp_avg_sqs = map(views, buffers)
        ops.step_.tensor(params, grads, exp_avgs, exp_avg_sqs, [], list(steps.unbind()), **options)

    found, expected = ([*normal_sample(SIZE, device=device).tensors] for _ in range(2))
    found_steps, expected_steps = (torch.arange(4.0, device=device) for _ in range(2))
    compiled = torch.compile(program, fullgraph=True, backend=backend)
    for i in range(2):
        for grad in (found[1], expected[1]):
            grad.copy_(normal_gradient(SIZE, seed=i, device=device))
        _, codes = run_and_get_code(compiled, found, found_steps, numbers(device))
        program(expected, expected_steps, numbers(device))
        assert not any(re.search(r"copy_|clone", generated_body(code)) for code in codes)
    assert_all_same_bits([*found, found_steps], [*expected, expected_steps])
    assert found_steps.tolist() == [2.0, 1.0, 4.0, 5.0]  # an empty parameter's count stays


# --- shapes, export, refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_of_any_shape(device: torch.device, backend: str) -> None:
    """Both kinds of op in one program with symbolic shapes."""

    def program(tensors: Sequence[Tensor], step: Tensor, options: dict[str, Tensor]) -> tuple[Tensor, ...]:
        new: tuple[Tensor, ...] = ops.step.tensor(*tensors, step, **options)
        param, grad, *moments = tensors
        ops.step_.tensor([param], [grad], *([moment] for moment in moments), [], [step], **options)
        return new

    compiled = torch.compile(program, fullgraph=True, backend=backend, dynamic=True)
    with compilations() as ids:
        for shape in ((3, 4), (8, 5), (100, 33), (2, 2)):
            tensors, step = list(normal_sample(shape, device=device).tensors), counter(device)
            new = compiled(tensors, step, numbers(device))
            param, _, *moments = tensors
            assert_all_same_bits(new, [param, *moments])
            expected, step = list(normal_sample(shape, device=device).tensors), counter(device)
            assert_all_same_bits(new, program(expected, step, numbers(device)))
    assert len(ids) == 1


class Training(nn.Module):
    """An update of what it holds."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        sample = normal_sample(SIZE, device=device)
        for name, tensor in zip(("param", "exp_avg", "exp_avg_sq"), sample.state, strict=True):
            self.register_buffer(name, tensor)
        self.register_buffer("step", counter(device))

    def forward(self, grad: Tensor, lr: Tensor, beta1: Tensor, beta2: Tensor) -> Tensor:
        lists = ([self.param], [grad], [self.exp_avg], [self.exp_avg_sq], [], [self.step])
        ops.step_.tensor(*lists, lr, beta1=beta1, beta2=beta2)
        return self.param.sum()


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")
@pytest.mark.parametrize("decomposed", [False, True], ids=["as exported", "functional"])
def test_an_exported_step_writes_the_buffers(device: torch.device, decomposed: bool) -> None:
    grads = [normal_gradient(SIZE, seed=i, device=device) for i in range(3)]
    options = numbers(device).values()
    program = torch.export.export(Training(device), (grads[0], *options))
    if decomposed:
        program = program.run_decompositions({})
        written = set(program.graph_signature.buffers_to_mutate.values())
        assert written == {"param", "exp_avg", "exp_avg_sq", "step"}
    found, expected = program.module(), Training(device)
    for grad in grads:
        assert_same_bits(found(grad, *options), expected(grad, *options))
    buffers = dict(found.named_buffers())
    for name, buffer in expected.named_buffers():
        assert_same_bits(buffers[name], buffer, name)
    assert expected.step.item() == 8.0


@pytest.mark.parametrize("in_place", [False, True], ids=["step", "step_"])
def test_what_cannot_be_right_is_refused_while_it_is_traced(device: torch.device, in_place: bool) -> None:
    """A parameter that requires grad, and a batch of parameters."""

    def program(param: Tensor, *others: Tensor) -> None:
        options = numbers(device)
        if in_place:
            ops.step_.tensor([param], *([other] for other in others[:-1]), [], [others[-1]], **options)
        else:
            ops.step.tensor(param, *others, **options)

    param, *others = normal_sample(SIZE, device=device).tensors
    before = [tensor.clone() for tensor in (param, *others)]

    def refused(function: Callable[..., Any], argument: Tensor) -> str:
        with pytest.raises(Exception, match="fused_adamw::step") as caught:
            torch.compile(function, fullgraph=True, backend="aot_eager")(argument, *others, counter(device))
        return str(caught.value)

    def batch_of(params: Tensor, *others: Tensor) -> Any:
        return torch.vmap(lambda one: program(one, *others))(params)

    assert "has no derivative, by design" in refused(program, param.clone().requires_grad_())
    assert "has no batching rule, by design" in refused(batch_of, param.expand(3, -1).contiguous())
    assert_all_same_bits([param, *others], before)
