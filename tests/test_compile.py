"""``AdamW`` under torch.compile: the same bits, one op call for each group, no copies, no recompilation."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import lr_scheduler

import fused_adamw
from fused_adamw import tracing
from graphs import graph_of, small, tensor_options
from training import (
    assert_all_same_bits,
    compilations,
    make_gradients,
    make_params,
    params_of,
    set_gradients,
    tensors_of,
)

# The first import of Inductor brings it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

STEPS = 20
Gradients = list[list[Tensor | None]]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_step(optimizer: torch.optim.Optimizer, backend: Any = "aot_eager") -> Callable[[], Any]:
    return torch.compile(optimizer.step, fullgraph=True, backend=backend)


def two_groups(params: list[nn.Parameter], **options: Any) -> fused_adamw.AdamW:
    groups = [{"params": params[0::2]}, {"params": params[1::2], "maximize": True, "weight_decay": 0.5}]
    return fused_adamw.AdamW(groups, **options)


def run(
    optimizer: torch.optim.Optimizer,
    step: Callable[[], Any],
    gradients: Gradients,
    schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None,
) -> list[Tensor]:
    for i, grads in enumerate(gradients):
        set_gradients(params_of(optimizer), grads)
        step()
        if schedule is not None:
            schedule(optimizer, i)
    return tensors_of(optimizer)


def gradients_in_groups(steps: int, dtype: torch.dtype = torch.float32) -> Gradients:
    """Gradients in the order of ``two_groups``."""
    return make_gradients(params_of(two_groups(make_params())), steps, dtype)


def assert_compiled_is_eager(
    make: Callable[[], fused_adamw.AdamW],
    gradients: Gradients,
    schedule: Callable[[], Callable[[torch.optim.Optimizer, int], Any]] = lambda: lambda *_: None,
    backend: str = "aot_eager",
) -> int:
    """Trains compiled and eager, compares the bits, and returns how often was compiled."""
    optimizer, twin = make(), make()
    with compilations() as ids:
        found = run(optimizer, compiled_step(optimizer, backend), gradients, schedule())
    assert_all_same_bits(found, run(twin, twin.step, gradients, schedule()))
    return len(ids)


# --- what is compiled ---------------------------------------------------------------------------------------


def test_the_graph_of_a_step() -> None:
    """Numbers become tensors of one element; nothing else is there but the op on the optimizer's tensors."""
    assert_expected_inline(
        graph_of(fused_adamw.AdamW(small(), lr=torch.tensor(0.1))),
        """\
%0 = ones((), dtype=torch.float64, device=device(type='cpu'))
%1 = mul(%0, 0.9)
%2 = ones((), dtype=torch.float64, device=device(type='cpu'))
%3 = mul(%2, 0.999)
%4 = fused_adamw.step_.tensor([param0, param1], [grad0, grad1], [exp_avg0, exp_avg1], [exp_avg_sq0,
    exp_avg_sq1], [], [step0, step1], lr=lr_0, beta1=%1, beta2=%3, weight_decay=0.01, eps=1e-08,
    maximize=False, grad_scale=None, found_inf=None)""",
    )


def test_the_graph_of_a_clipped_step() -> None:
    """Rows of 12 bytes per gradient, merged into a report that the update reads."""
    assert_expected_inline(
        graph_of(fused_adamw.AdamW(small(), max_grad_norm=1.0, **tensor_options())),
        """\
%0 = empty(2, 3, dtype=torch.float32, device=device(type='cpu'))
%1 = fused_adamw.analyze_gradient([grad0, grad1], %0, grad_scale=None)
%2 = new_empty(%0, 0)
%3 = new_empty(%0, 3)
%4 = fused_adamw.merge_gradient_stats(%0, %2, %3, hierarchical=True)
%5 = fused_adamw.adamw_scaled.tensor([param0, param1], [grad0, grad1], [exp_avg0, exp_avg1],
    [exp_avg_sq0, exp_avg_sq1], [], [step0, step1], %3, max_norm=1.0, norm_epsilon=1e-06, lr=lr_0,
    beta1=beta1_0, beta2=beta2_0, weight_decay=0.01, eps=1e-08, maximize=False, grad_scale=None,
    found_inf=None)""",
    )


def test_the_graph_of_groups() -> None:
    params = small(3)
    groups = [{"params": params[::2], "amsgrad": True}, {"params": params[1:2], "maximize": True}]
    assert_expected_inline(
        graph_of(fused_adamw.AdamW(groups, **tensor_options())),
        """\
%0 = fused_adamw.step_.tensor([param0, param1], [grad0, grad1], [exp_avg0, exp_avg1], [exp_avg_sq0,
    exp_avg_sq1], [max_exp_avg_sq0, max_exp_avg_sq1], [step0, step1], lr=lr_0, beta1=beta1_0,
    beta2=beta2_0, weight_decay=0.01, eps=1e-08, maximize=False, grad_scale=None, found_inf=None)
%1 = fused_adamw.step_.tensor([param2], [grad2], [exp_avg2], [exp_avg_sq2], [], [step2], lr=lr_0,
    beta1=beta1_0, beta2=beta2_0, weight_decay=0.01, eps=1e-08, maximize=True, grad_scale=None,
    found_inf=None)""",
    )


def test_inductor_calls_the_op_on_the_tensors_themselves() -> None:
    """The generated code allocates nothing and copies nothing."""
    params = make_params([(5, 7), (33,), (2, 3, 4)])
    set_gradients(params, make_gradients(params, 1)[0])
    optimizer = two_groups(params, amsgrad=True, **tensor_options())
    _, codes = run_and_get_code(compiled_step(optimizer, "inductor"))
    [code] = codes
    body = code[code.index("def call(") : code.index("runner = Runner")]
    body = re.sub(r"#.*", "", body)
    assert body.count("torch.ops.fused_adamw.step_.tensor(") == len(optimizer.param_groups)
    assert not re.findall(r"copy|clone|empty|cpp_fused|aten\.|as_strided|reinterpret_tensor", body)


# --- bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_steps_have_the_bits_of_eager_ones(backend: str) -> None:
    gradients = gradients_in_groups(3)
    options = {"amsgrad": True, **tensor_options()}
    assert (
        assert_compiled_is_eager(lambda: two_groups(make_params(), **options), gradients, backend=backend)
        == 1
    )


@pytest.mark.xfail(
    raises=(torch._dynamo.exc.InternalTorchDynamoError, torch._dynamo.exc.Unsupported),
    reason="Dynamo takes no parameter whose gradient has another dtype, whatever its grad_dtype",
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_gradients(dtype: torch.dtype) -> None:
    gradients = gradients_in_groups(3, dtype)
    assert_compiled_is_eager(lambda: two_groups(make_params()), gradients)


def test_parameters_with_and_without_gradients() -> None:
    """A parameter that gets its first gradient later costs a compilation, and is right."""
    all_gradients = gradients_in_groups(5)
    pattern = ["1010", "1010", "1110", "1110", "0001"]
    gradients = [
        [grad if present == "1" else None for grad, present in zip(grads, row, strict=True)]
        for grads, row in zip(all_gradients, pattern, strict=True)
    ]
    count = assert_compiled_is_eager(lambda: two_groups(make_params()), gradients)
    assert count == 3


def test_without_any_gradient_a_step_does_nothing() -> None:
    assert_compiled_is_eager(lambda: fused_adamw.AdamW(make_params()), [[None] * len(make_params())] * 2)


def views_of_one_buffer() -> fused_adamw.AdamW:
    [flat] = make_params([(60,)])
    views = [flat.detach()[:20].view(4, 5), flat.detach()[20:33], flat.detach()[33:]]
    return fused_adamw.AdamW([nn.Parameter(view) for view in views], amsgrad=True, **tensor_options())


@pytest.mark.skipif(
    not tracing.INDUCTOR_KNOWS_SHARED_STORAGE, reason="this torch confuses them, so they are refused"
)
def test_parameters_that_are_views_of_one_buffer() -> None:
    gradients = make_gradients(params_of(views_of_one_buffer()), 3)
    assert_compiled_is_eager(views_of_one_buffer, gradients, backend="inductor")


def test_parameters_that_are_views_of_one_buffer_before_torch_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused: Inductor would compute from wrong values."""
    monkeypatch.setattr(tracing, "INDUCTOR_KNOWS_SHARED_STORAGE", False)
    optimizer = views_of_one_buffer()
    set_gradients(params_of(optimizer), make_gradients(params_of(optimizer), 1)[0])
    before = [param.detach().clone() for param in params_of(optimizer)]
    with pytest.raises(
        Exception, match=r"parameters or states are parts of one buffer, which torch\.compile"
    ):
        compiled_step(optimizer)()
    assert_all_same_bits(params_of(optimizer), before)


def test_compiled_and_eager_steps_in_turn() -> None:
    """Neither the plan of eager steps nor the program of compiled ones goes stale."""
    optimizer, twin = (two_groups(make_params(), amsgrad=True) for _ in range(2))
    step = compiled_step(optimizer)
    for i, grads in enumerate(gradients_in_groups(9)):
        if i in (3, 6):
            for each in (optimizer, twin):
                state_dict = copy.deepcopy(each.state_dict())
                for state in state_dict["state"].values():
                    state["exp_avg"] *= 2.0
                each.load_state_dict(state_dict)
        set_gradients(params_of(optimizer), grads)
        set_gradients(params_of(twin), grads)
        (step if i % 3 else optimizer.step)()
        twin.step()
        assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))


def test_data_of_the_parameters_and_states_replaced_between_compiled_steps() -> None:
    optimizer, twin = (two_groups(make_params()) for _ in range(2))
    step = compiled_step(optimizer)
    for i, grads in enumerate(gradients_in_groups(6)):
        for each in (optimizer, twin):
            set_gradients(params_of(each), grads)
            if i == 2:
                param = params_of(each)[0]
                param.data = param.detach() * 2.0
            if i == 4:
                state = each.state[params_of(each)[1]]
                state["exp_avg_sq"] = state["exp_avg_sq"] + 1.0
        step()
        twin.step()
        assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))


def test_the_attributes_of_a_gradient_scaler() -> None:
    optimizer, twin = (two_groups(make_params()) for _ in range(2))
    step = compiled_step(optimizer)
    for grads, found in zip(gradients_in_groups(4), (0.0, 1.0, 0.0, 1.0), strict=True):
        for each in (optimizer, twin):
            set_gradients(params_of(each), [grad * 8.0 for grad in grads])
            each.grad_scale, each.found_inf = torch.tensor(8.0), torch.tensor(found)
        step()
        twin.step()
        assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))
    assert all(optimizer.state[param]["step"] == 2 for param in params_of(optimizer))


def test_a_training_step_with_a_compiled_model() -> None:
    """The eager twin is given the gradients of the compiled model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    optimizer = fused_adamw.AdamW(model.parameters(), lr=torch.tensor(0.01))
    twin_optimizer = fused_adamw.AdamW(twin.parameters(), lr=torch.tensor(0.01))
    data = torch.randn(16, 6)
    losses = []

    def loss_of(batch: Tensor) -> Tensor:
        return (model(batch) - batch.sum(1, keepdim=True)).square().mean()

    loss_function = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    step = compiled_step(optimizer)
    with compilations() as ids:
        for _ in range(10):
            loss = loss_function(data)
            loss.backward()
            set_gradients(list(twin.parameters()), [param.grad for param in model.parameters()])
            step()
            twin_optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin_optimizer))
    assert losses[-1] < losses[0]
    assert len(ids) == 2  # the loss, the step


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_training_step_as_one_compiled_function() -> None:
    """``backward`` splits it in two; what comes out is that of eager."""

    def make() -> tuple[fused_adamw.AdamW, Callable[[Tensor], Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(6, 1)
        optimizer = fused_adamw.AdamW(model.parameters(), lr=torch.tensor(0.01))

        def training_step(batch: Tensor) -> Tensor:
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return optimizer, training_step

    optimizer, training_step = make()
    twin, eager_step = make()
    compiled = torch.compile(training_step, backend="aot_eager")
    for batch in torch.randn(4, 16, 6):
        assert torch.equal(compiled(batch), eager_step(batch))
    assert_all_same_bits(tensors_of(optimizer), tensors_of(twin))


# --- recompilation ------------------------------------------------------------------------------------------


def set_lr(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (2 + step)


def fill_lr(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"].fill_(0.1 / (2 + step))


def scheduled(scheduler_of: Callable[[torch.optim.Optimizer], Any]) -> Callable[[], Callable[..., Any]]:
    """A schedule that makes its scheduler after the first step."""

    def make() -> Callable[[torch.optim.Optimizer, int], None]:
        schedulers: list[Any] = []

        def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
            if not schedulers:
                schedulers.append(scheduler_of(optimizer))
            schedulers[0].step()

        return schedule

    return make


# Schedule, options, and the most compilations: one, and one more where a number changes, which then is an
# input of the program. The keys that a scheduler adds to the groups after the first step cost none.
RECOMPILATION: dict[str, tuple[Callable[[], Callable[..., Any]], dict[str, Any], int]] = {
    "constant numbers": (lambda: lambda *_: None, {}, 1),
    "tensor lr, filled": (lambda: fill_lr, {"lr": torch.tensor(0.1)}, 1),
    "float lr": (lambda: set_lr, {"lr": 0.1}, 2),
    "StepLR, tensor lr": (
        scheduled(lambda o: lr_scheduler.StepLR(o, 2, 0.9)),
        {"lr": torch.tensor(0.1)},
        1,
    ),
    "CosineAnnealingLR, float lr": (
        scheduled(lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS)),
        {"lr": 0.1},
        2,
    ),
    "OneCycleLR": (
        scheduled(lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1)),
        {"lr": 0.1},
        2,
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", RECOMPILATION)
def test_steps_are_not_recompiled(name: str) -> None:
    schedule, options, most = RECOMPILATION[name]
    gradients = gradients_in_groups(STEPS)
    count = assert_compiled_is_eager(
        lambda: two_groups(make_params(), **copy.deepcopy(options)), gradients, schedule
    )
    assert count <= most


# --- refusals and fakes -------------------------------------------------------------------------------------


def test_a_step_that_cannot_be_right_is_refused_while_it_is_traced() -> None:
    params = make_params([(2, 3)])
    params[0].grad = torch.ones(3, 2).t()
    optimizer = fused_adamw.AdamW(params)
    with pytest.raises(Exception, match=r"grads\[0\] has strides \(1, 2\); \(3, 1\), the parameter"):
        compiled_step(optimizer)()
    assert_all_same_bits(params, make_params([(2, 3)]))


def test_a_value_that_cannot_be_right_is_refused_while_it_runs() -> None:
    params = make_params([(2, 3)])
    set_gradients(params, [torch.ones(2, 3)])
    optimizer = fused_adamw.AdamW(params, lr=torch.tensor(0.1))
    step = compiled_step(optimizer)
    step()
    before = [tensor.detach().clone() for tensor in tensors_of(optimizer)]
    optimizer.param_groups[0]["lr"].fill_(-1.0)
    with pytest.raises(ValueError, match=r"lr is -1\.0; a finite number of at least 0 is required"):
        step()
    assert_all_same_bits(tensors_of(optimizer), before)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"max_grad_norm": 1.0}], ids=str)
def test_fake_tensors(options: dict[str, Any]) -> None:
    """A dry run of a parameter of 16 GB without its memory: the states are made, and are fakes."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(1 << 16, 1 << 16)), nn.Parameter(torch.empty(3))]
        optimizer = fused_adamw.AdamW(params, **options)
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
        optimizer.step()
    for param in params:
        state = optimizer.state[param]
        assert all(isinstance(tensor, FakeTensor) for tensor in state.values())
        assert {t.shape for name, t in state.items() if name != "step"} == {param.shape}
        assert ("max_exp_avg_sq" in state) == options.get("amsgrad", False)
