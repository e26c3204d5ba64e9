"""What torch knows of the ops without running them: schemas, tags, fakes, and how transforms meet them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cases import (
    GRAD_DTYPES,
    SCALARS,
    Snapshot,
    assert_same_bits,
    assert_same_state,
    call_step,
    call_step_,
    first_sample,
    lists_of,
    normal_sample,
    option_arguments,
    scalar,
    step_inplace_op,
    step_inplace_overload,
    step_op,
    step_overload,
)

OVERLOADS = (
    step_op.default,
    step_op.tensor,
    step_op.amsgrad,
    step_op.amsgrad_tensor,
    step_op.master,
    step_op.master_tensor,
    step_op.master_amsgrad,
    step_op.master_amsgrad_tensor,
    step_inplace_op.default,
    step_inplace_op.tensor,
)


def test_schemas() -> None:
    assert set(step_op.overloads()) == {
        f"{name}{suffix}" if name else suffix.removeprefix("_") or "default"
        for name in ("", "amsgrad", "master", "master_amsgrad")
        for suffix in ("", "_tensor")
    }
    assert set(step_inplace_op.overloads()) == {"default", "tensor"}
    # One argument a line.
    schemas = [str(overload._schema).replace(", ", ",\n    ") for overload in OVERLOADS]
    assert_expected_inline(
        "\n".join(schemas),
        """\
fused_adamw::step(Tensor param,
    Tensor grad,
    Tensor? exp_avg,
    Tensor? exp_avg_sq,
    SymInt step,
    float lr=0.001,
    *,
    float beta1=0.90000000000000002,
    float beta2=0.999,
    float weight_decay=0.01,
    float eps=1e-08,
    bool maximize=False,
    Tensor? grad_scale=None,
    Tensor? found_inf=None) -> (Tensor new_param,
    Tensor new_exp_avg,
    Tensor new_exp_avg_sq)
fused_adamw::step.tensor(Tensor param,
    Tensor grad,
    Tensor? exp_avg,
    Tensor? exp_avg_sq,
    Tensor step,
    Tensor lr,
    *,
    Tensor beta1,
    Tensor beta2,
    float weight_decay=0.01,
    float eps=1e-08,
    bool maximize=False,
    Tensor? grad_scale=None,
    Tensor? found_inf=None) -> (Tensor new_param,
    Tensor new_exp_avg,
    Tensor new_exp_avg_sq)
fused_adamw::step.amsgrad(Tensor param,
    Tensor grad,
    Tensor? exp_avg,
    Tensor? exp_avg_sq,
    Tensor? max_exp_avg_sq,
    SymInt step,
    float lr=0.001,
    *,
    float beta1=0.90000000000000002,
    float beta2=0.999,
    float weight_decay=0.01,
    float eps=1e-08,
    bool maximize=False,
    Tensor? grad_scale=None,
    Tensor? found_inf=None) -> (Tensor new_param,
    Tensor new_exp_avg,
    Tensor new_exp_avg_sq,
    Tensor new_max_exp_avg_sq)
fused_adamw::step.amsgrad_tensor(Tensor param,
    Tensor grad,
    Tensor? exp_avg,
    Tensor? exp_avg_sq,
    Tensor? max_exp_avg_sq,
    Tensor step,
    Tensor lr,
    *,
    Tensor beta1,
    Tensor beta2,
    float weight_decay=0.01,
    float eps=1e-08,
    bool maximize=False,
    Tensor? grad_scale=None,
    Tensor? found_inf=None) -> (Tensor new_param,
    Tensor new_exp_avg,
    Tensor new_exp_avg_sq,
    Tensor new_max_exp_avg_sq)
fused_adamw::step.master(Tensor param,
    Tensor grad,
    Tensor? exp_avg,
    Tensor? exp_avg_sq,
    Tensor? master,
    SymInt step,
    float lr=0.001,
    *,
    float beta1=0.90000000000000002,
    float beta2=0.999,
    float weight_decay=0.01,
    float eps=1e-08,
    bool maximize=False,
    Tensor? grad_scale=None,
    Tensor? found_inf=None,
    int? rounding_seed=None) -> (Tensor new_param,
    Tensor new_exp_avg,
    Tensor new_exp_avg_sq,
    Tensor new_master)
fused_adamw::step.master_tensor(Tensor param,
    Tensor grad,
    Tensor? exp_avg,
    Tensor? exp_avg_sq,
    Tensor? master,
    Tensor step,
    Tensor lr,
    *,
    Tensor beta1,
    Tensor beta2,
    float weight_decay=0.01,
    float eps=1e-08,
    bool maximize=False,
    Tensor? grad_scale=None,
    Tensor? found_inf=None,
    int? rounding_seed=None) -> (Tensor new_param,
    Tensor new_exp_avg,
    Tensor new_exp_avg_sq,
    Tensor new_master)
fused_adamw::step.master_amsgrad(Tensor param,
    Tensor grad,
    Tensor? exp_avg,
    Tensor? exp_avg_sq,
    Tensor? max_exp_avg_sq,
    Tensor? master,
    SymInt step,
    float lr=0.001,
    *,
    float beta1=0.90000000000000002,
    float beta2=0.999,
    float weight_decay=0.01,
    float eps=1e-08,
    bool maximize=False,
    Tensor? grad_scale=None,
    Tensor? found_inf=None,
    int? rounding_seed=None) -> (Tensor new_param,
    Tensor new_exp_avg,
    Tensor new_exp_avg_sq,
    Tensor new_max_exp_avg_sq,
    Tensor new_master)
fused_adamw::step.master_amsgrad_tensor(Tensor param,
    Tensor grad,
    Tensor? exp_avg,
    Tensor? exp_avg_sq,
    Tensor? max_exp_avg_sq,
    Tensor? master,
    Tensor step,
    Tensor lr,
    *,
    Tensor beta1,
    Tensor beta2,
    float weight_decay=0.01,
    float eps=1e-08,
    bool maximize=False,
    Tensor? grad_scale=None,
    Tensor? found_inf=None,
    int? rounding_seed=None) -> (Tensor new_param,
    Tensor new_exp_avg,
    Tensor new_exp_avg_sq,
    Tensor new_max_exp_avg_sq,
    Tensor new_master)
fused_adamw::step_(Tensor(a!)[] params,
    Tensor[] grads,
    Tensor(b!)[] exp_avgs,
    Tensor(c!)[] exp_avg_sqs,
    Tensor(d!)[] max_exp_avg_sqs,
    Tensor(e!)[] state_steps,
    float lr=0.001,
    *,
    float beta1=0.90000000000000002,
    float beta2=0.999,
    float weight_decay=0.01,
    float eps=1e-08,
    bool maximize=False,
    Tensor? grad_scale=None,
    Tensor? found_inf=None,
    Tensor(f!)[]? masters=None,
    int[]? rounding_seeds=None) -> ()
fused_adamw::step_.tensor(Tensor(a!)[] params,
    Tensor[] grads,
    Tensor(b!)[] exp_avgs,
    Tensor(c!)[] exp_avg_sqs,
    Tensor(d!)[] max_exp_avg_sqs,
    Tensor(e!)[] state_steps,
    Tensor lr,
    *,
    Tensor beta1,
    Tensor beta2,
    float weight_decay=0.01,
    float eps=1e-08,
    bool maximize=False,
    Tensor? grad_scale=None,
    Tensor? found_inf=None,
    Tensor(f!)[]? masters=None,
    int[]? rounding_seeds=None) -> ()""",
    )


def test_tags() -> None:
    for overload in OVERLOADS:
        tags = {str(tag) for tag in overload.tags}
        assert {"Tag.pt2_compliant_tag", "Tag.needs_exact_strides"} <= tags


def test_what_is_mutated() -> None:
    for overload in OVERLOADS:
        written = {
            argument.name
            for argument in overload._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        in_place = {"params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps", "masters"}
        assert written == (in_place if overload.name().startswith("fused_adamw::step_") else set())
        assert overload._schema.is_mutable == bool(written)
        assert all(result.alias_info is None for result in overload._schema.returns)


# --- opcheck: schema, fake, autograd registration and AOT dispatch with dynamic shapes.


def amp_tensors(device: torch.device, given: bool) -> dict[str, Tensor]:
    if not given:
        return {}
    return {"grad_scale": scalar(8.0, device, torch.float32), "found_inf": scalar(0.0, device)}


@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("scalars", SCALARS)
def test_opcheck_step(
    device: torch.device, scalars: str, amsgrad: bool, first: bool, scaled: bool, dtype: torch.dtype
) -> None:
    make_sample = first_sample if first else normal_sample
    sample = make_sample((3, 4), dtype, amsgrad=amsgrad, device=device)
    step: Any = sample.step if scalars == "numbers" else scalar(sample.step, device, torch.int64)
    options = {**option_arguments({}, scalars, device), **amp_tensors(device, scaled)}
    torch.library.opcheck(
        step_overload(scalars, amsgrad), (sample.param, sample.grad, *sample.moments, step), options
    )


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("scalars", SCALARS)
def test_opcheck_step_(device: torch.device, scalars: str, amsgrad: bool, scaled: bool) -> None:
    samples = [
        normal_sample(shape, dtype, amsgrad=amsgrad, device=device)
        for shape, dtype in zip([(3, 4), (5,), ()], GRAD_DTYPES, strict=True)
    ]
    options = {**option_arguments({}, scalars, device), **amp_tensors(device, scaled)}
    torch.library.opcheck(step_inplace_overload(scalars), tuple(lists_of(samples)), options)


def test_opcheck_with_parameters_that_require_grad(device: torch.device) -> None:
    sample = normal_sample((3, 4), device=device)
    lists = lists_of([replace(sample, param=sample.param.requires_grad_())])
    with torch.no_grad():
        torch.library.opcheck(step_inplace_op.default, tuple(lists))


# --- Fakes.

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "permuted": lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("scalars", SCALARS)
def test_fakes_describe_the_results(
    device: torch.device, layout: Callable[[Tensor], Tensor], amsgrad: bool, first: bool, scalars: str
) -> None:
    make_sample = first_sample if first else normal_sample
    for dtype in GRAD_DTYPES:
        sample = make_sample((3, 4, 5, 6), dtype, amsgrad=amsgrad, device=device).map(layout)
        real = call_step(sample, scalars=scalars)
        with FakeTensorMode() as mode:
            described = call_step(sample.map(mode.from_tensor), scalars=scalars)
        for fake, tensor in zip(described.state, real.state, strict=True):
            assert fake.shape == tensor.shape
            assert fake.dtype == tensor.dtype
            assert fake.device == tensor.device
            assert fake.stride() == tensor.stride()
            assert not fake.requires_grad


def test_the_fake_of_step_(device: torch.device) -> None:
    samples = [normal_sample(shape, amsgrad=True, device=device) for shape in ((3, 4), (0,), ())]
    with FakeTensorMode() as mode:
        for scalars in SCALARS:
            fakes = lists_of([sample.map(mode.from_tensor) for sample in samples])
            call_step_(fakes, scalars=scalars)
            call_step_([[], [], [], [], [], []], scalars=scalars)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_symbolic_shapes_of_step(device: torch.device, layout: Callable[[Tensor], Tensor]) -> None:
    def update(*tensors: Tensor) -> tuple[Tensor, ...]:
        return step_op.amsgrad(*tensors, 5, 0.01)

    traced_with = normal_sample((3, 4, 5, 6), torch.bfloat16, amsgrad=True, device=device).map(layout)
    graph = make_fx(update, tracing_mode="symbolic")(*traced_with.tensors)
    assert [n.target for n in graph.graph.nodes if n.op == "call_function" and "adamw" in str(n.target)] == [
        step_op.amsgrad
    ]
    results = [node.meta["val"] for node in graph.graph.nodes if "getitem" in node.name]
    assert len(results) == 4
    assert all(isinstance(size, torch.SymInt) for result in results for size in result.shape)
    # The strides of the trace are those of the layout: the same formulas in the symbolic sizes.
    order = sorted(range(4), key=lambda d: traced_with.param.stride(d))
    for result in results:
        assert sorted(range(4), key=lambda d: int(result.stride()[d])) == order
    other = normal_sample((2, 7, 3, 5), torch.bfloat16, amsgrad=True, device=device).map(layout)
    expected = call_step(other, lr=0.01)
    for found, tensor in zip(graph(*other.tensors), expected.state, strict=True):
        assert_same_bits(found, tensor)
        assert found.stride() == tensor.stride()


def test_symbolic_shapes_of_step_(device: torch.device) -> None:
    def update(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor) -> None:
        step_inplace_op([param], [grad], [exp_avg], [exp_avg_sq], [], [step], 0.01)

    traced_with = normal_sample((3, 4), device=device)
    counter = torch.tensor(5.0, device=device)
    graph = make_fx(update, tracing_mode="symbolic")(*traced_with.tensors, counter)
    other = normal_sample((8, 5), device=device)
    expected = call_step(other, lr=0.01)
    counter = torch.tensor(5.0, device=device)
    graph(*other.tensors, counter)
    assert_same_state(other, expected)
    assert counter.item() == 6.0


class Update(torch.nn.Module):
    def forward(self, param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor) -> Any:
        lr, beta1, beta2 = (torch.full((), value, dtype=torch.float64) for value in (1e-3, 0.9, 0.999))
        return step_op.tensor(param, grad, exp_avg, exp_avg_sq, step, lr, beta1=beta1, beta2=beta2)


def test_export_with_dynamic_shapes() -> None:
    sample = normal_sample((3, 4))
    rows, columns = torch.export.Dim("rows"), torch.export.Dim("columns")
    shape = {0: rows, 1: columns}
    program = torch.export.export(
        Update(),
        (*sample.tensors, torch.tensor(5)),
        dynamic_shapes={
            "param": shape,
            "grad": shape,
            "exp_avg": shape,
            "exp_avg_sq": shape,
            "step": {},
        },
    )
    other = normal_sample((5, 7))
    expected = call_step(other)
    found = program.module()(*other.tensors, torch.tensor(5))
    for tensor, wanted in zip(found, expected.state, strict=True):
        assert_same_bits(tensor, wanted)


# --- Transforms. There is no derivative and no batching rule, by design.


@pytest.mark.parametrize("scalars", SCALARS)
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
def test_vmap_is_refused(device: torch.device, amsgrad: bool, scalars: str) -> None:
    sample = normal_sample(5, amsgrad=amsgrad, device=device)
    lists = lists_of([sample])
    before = Snapshot([*sample.tensors, *(tensor for tensors in lists for tensor in tensors)])
    batch = torch.rand(3, 5, device=device)
    for op, update in {
        "step": lambda param: call_step(replace(sample, param=param), scalars=scalars).param,
        "step_": lambda param: call_step_([[param], *lists[1:]], scalars=scalars),
    }.items():
        with pytest.raises(RuntimeError, match=f"^fused_adamw::{op} has no batching rule, by design"):
            torch.vmap(update)(batch)
    before.assert_unchanged()


def test_functional_grad_is_not_silent(device: torch.device) -> None:
    # Under torch.func.grad the op sees plain tensors, so it cannot refuse; torch itself warns.
    sample = normal_sample(5, device=device)

    def loss(param: Tensor) -> Tensor:
        return call_step(replace(sample, param=param)).param.sum()

    with pytest.warns(UserWarning, match="fused_adamw::step: an autograd kernel was not registered"):
        torch.func.grad(loss)(sample.param)


def test_names() -> None:
    # A graph names the overload; the name is a promise.
    assert [overload.name() for overload in OVERLOADS] == [
        "fused_adamw::step",
        "fused_adamw::step.tensor",
        "fused_adamw::step.amsgrad",
        "fused_adamw::step.amsgrad_tensor",
        "fused_adamw::step.master",
        "fused_adamw::step.master_tensor",
        "fused_adamw::step.master_amsgrad",
        "fused_adamw::step.master_amsgrad_tensor",
        "fused_adamw::step_",
        "fused_adamw::step_.tensor",
    ]
