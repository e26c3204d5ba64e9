"""``adamw_scaled``: the step under the control of a report.

Bits are those of ``oracle/adamw_float32.py`` for gradients multiplied by the clip coefficient; numbers are
those of ``oracle/adamw.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from cases import (
    GRAD_DTYPES,
    LISTS,
    Sample,
    Snapshot,
    assert_same_bits,
    lists_of,
    normal_sample,
    option_arguments,
    scalar,
)
from fused_adamw import gradient_stats
from oracle import gradient_stats as stats_oracle
from oracle.adamw import Oracle
from oracle.adamw_float32 import adamw_float32
from refusals import refuse

op = torch.ops.fused_adamw.adamw_scaled
OVERLOADS = ("numbers", "tensors")
STATE_LISTS = (0, 2, 3, 4)  # params and moments among the lists of ``lists_of``
SIZES = (1, 33, 20_000)


def call(
    lists: Sequence[Sequence[Tensor]], report: Tensor, overload: str = "numbers", **options: Any
) -> None:
    """The op, with its options as numbers or as tensors."""
    device = report.device
    chosen = op.default if overload == "numbers" else op.tensor
    assert chosen(*lists, report, **option_arguments(options, overload, device)) is None


def samples_of(
    dtype: torch.dtype = torch.float32, *, amsgrad: bool = False, device: Any = "cpu"
) -> list[Sample]:
    """Parameters of several sizes after different numbers of updates."""
    return [
        normal_sample(size, dtype, amsgrad=amsgrad, step=i, seed=size, device=device)
        for i, size in enumerate(SIZES)
    ]


def report_of(samples: Sequence[Sample], grad_scale: float | None = None) -> Tensor:
    return gradient_stats([sample.grad for sample in samples], grad_scale=grad_scale).report


def norm_of(report: Tensor) -> float:
    max_abs, squares, _ = report.tolist()
    return max_abs * math.sqrt(squares)


def assert_updated(
    samples: Sequence[Sample],
    lists: Sequence[Sequence[Tensor]],
    factors: Sequence[float] = (),
    grad_scale: float = 1.0,
    **options: Any,
) -> None:
    """The lists must hold the update of the samples, with gradients multiplied by each of the factors."""
    for i, sample in enumerate(samples):
        grad = sample.grad.cpu().float() * (torch.tensor(1.0) / torch.tensor(grad_scale))
        for factor in factors:
            grad = grad * torch.tensor(factor, dtype=torch.float64).float()
        expected = adamw_float32(
            sample.param,
            grad,
            sample.exp_avg,
            sample.exp_avg_sq,
            sample.max_exp_avg_sq,
            sample.step,
            amsgrad=sample.amsgrad,
            **options,
        )
        for k, tensor in zip(STATE_LISTS, expected, strict=True):
            if lists[k]:
                assert_same_bits(lists[k][i].cpu(), tensor, f"{LISTS[k]}[{i}]")
        assert lists[5][i].item() == sample.step + 1


def clone(lists: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("ratio", [None, 0.01, 0.999, 1.0, 5.0, math.inf])
def test_update_has_the_promised_bits(
    device: torch.device, ratio: float | None, dtype: torch.dtype, amsgrad: bool, overload: str
) -> None:
    samples = samples_of(dtype, amsgrad=amsgrad, device=device)
    report = report_of(samples)
    max_norm = None if ratio is None else ratio * norm_of(report)
    lists = clone(lists_of(samples))
    before = Snapshot([*lists[1], report])
    versions = [tensor._version for tensors in lists for tensor in tensors if tensors is not lists[1]]
    call(lists, report, overload, max_norm=max_norm, lr=0.01, weight_decay=0.1)
    before.assert_unchanged()
    clip = stats_oracle.clip_coefficient(norm_of(report), max_norm)
    assert (clip < 1.0) == (ratio in (0.01, 0.999, 1.0))  # epsilon makes even 1.0 clip a little
    assert_updated(samples, lists, [clip], lr=0.01, weight_decay=0.1)
    after = [tensor._version for tensors in lists for tensor in tensors if tensors is not lists[1]]
    assert all(new > old for new, old in zip(after, versions, strict=True))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("overload", OVERLOADS)
def test_scale_is_divided_out_before_clipping(device: torch.device, overload: str, maximize: bool) -> None:
    samples = samples_of(torch.float16, device=device)
    grad_scale = 1.0 / 3.0
    report = report_of(samples, grad_scale)
    max_norm = 0.1 * norm_of(report)
    lists = clone(lists_of(samples))
    scale = scalar(grad_scale, device, torch.float32)
    call(lists, report, overload, max_norm=max_norm, grad_scale=scale, maximize=maximize)
    clip = stats_oracle.clip_coefficient(norm_of(report), max_norm)
    assert clip == pytest.approx(0.1, rel=1e-5)
    assert_updated(samples, lists, [clip], scale.item(), maximize=maximize)


def test_epsilon_is_added_to_the_norm(device: torch.device) -> None:
    samples = samples_of(device=device)
    report = report_of(samples)
    norm = norm_of(report)
    lists = clone(lists_of(samples))
    call(lists, report, max_norm=norm, norm_epsilon=norm)
    assert_updated(samples, lists, [norm / (norm + norm)])
    lists = clone(lists_of(samples))
    call(lists, report, max_norm=norm, norm_epsilon=0.0)
    assert_updated(samples, lists)


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 100.0])
def test_coefficient_is_that_of_torch(max_norm: float) -> None:
    """One update from nothing: exp_avg is 0.1 times the clipped gradient."""
    samples = [sample.with_zero_moments() for sample in samples_of()]
    lists = clone(lists_of(samples))
    params = [torch.nn.Parameter(sample.param.double()) for sample in samples]
    for param, sample in zip(params, samples, strict=True):
        param.grad = sample.grad.double()
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    assert (norm > max_norm) == (max_norm < 100.0)
    call(lists, report_of(samples), max_norm=max_norm)
    for exp_avg, param in zip(lists[2], params, strict=True):
        torch.testing.assert_close(exp_avg.double(), 0.1 * param.grad, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("max_norm", [None, 0.0, 1.0])
def test_nonfinite_report_leaves_everything_as_it_is(
    device: torch.device, max_norm: float | None, overload: str
) -> None:
    samples = samples_of(amsgrad=True, device=device)
    report = report_of(samples)
    report[2] = 1.0
    lists = lists_of(samples)
    before = Snapshot([report, *(tensor for tensors in lists for tensor in tensors)])
    call(lists, report, overload, max_norm=max_norm)
    before.assert_skipped()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_max_norm_0_takes_the_gradient_for_0(device: torch.device, amsgrad: bool) -> None:
    samples = samples_of(amsgrad=amsgrad, device=device)
    lists = clone(lists_of(samples))
    call(lists, report_of(samples), max_norm=0.0, weight_decay=0.1)
    assert_updated(samples, lists, [0.0], weight_decay=0.1)
    for sample, exp_avg, param in zip(samples, lists[2], lists[0], strict=True):
        torch.testing.assert_close(exp_avg, 0.9 * sample.exp_avg)
        assert not torch.equal(param, sample.param)


@pytest.mark.parametrize("max_norm", [None, 0.0, 1.0, math.inf])
def test_zero_gradients_are_not_clipped(device: torch.device, max_norm: float | None) -> None:
    samples = [sample.map(torch.clone) for sample in samples_of(device=device)]
    for sample in samples:
        sample.grad.zero_()
    lists = clone(lists_of(samples))
    call(lists, report_of(samples), max_norm=max_norm)
    assert_updated(samples, lists)


SMALL_CLIPS = (1e-1, 1e-3, 1e-5, 1e-7, 1e-8, 1e-10)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("max_norm", SMALL_CLIPS)
def test_coefficients_below_the_normal_float32_numbers(
    max_norm: float, flush: bool, flush_denormals: Callable[[], None]
) -> None:
    """Gradients near the end of float32, so that the coefficient is 1e-39 to 1e-48 but the result is not."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(size, generator=generator).mul(1e36).clamp(-3e38, 3e38) for size in (1, 33, 9966)]
    norm = stats_oracle.exact_norm(grads)
    assert 0.9e38 < norm < 1.1e38
    clip = stats_oracle.clip_coefficient(norm, max_norm)
    assert clip < torch.finfo(torch.float32).smallest_normal
    params = [torch.randn(grad.shape, generator=generator) for grad in grads]
    oracles = [Oracle(param) for param in params]
    for oracle, grad in zip(oracles, grads, strict=True):
        oracle.update(grad.double() * clip)
    zeros = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    steps = [torch.zeros(()) for _ in params]
    report = gradient_stats(grads).report
    if flush:
        flush_denormals()
    call([params, grads, *zeros, [], steps], report, max_norm=max_norm)
    torch.set_flush_denormal(False)
    for i, oracle in enumerate(oracles):
        torch.testing.assert_close(zeros[0][i].double(), oracle.exp_avg, rtol=1e-6, atol=1e-44)
        # The square of 1e-15 or less leaves the normal numbers.
        torch.testing.assert_close(zeros[1][i].double(), oracle.exp_avg_sq, rtol=1e-6, atol=1e-44)
        torch.testing.assert_close(params[i].double(), oracle.param, rtol=0.0, atol=2e-6)


def test_two_factors_have_the_promised_bits(device: torch.device) -> None:
    """A coefficient below 2^-126 is applied as one of normal size, then 2^-126."""
    sample = normal_sample(1000).with_zero_moments().map(lambda tensor: tensor.to(device))
    sample.grad.mul_(3e37)
    report = report_of([sample])
    clip = stats_oracle.clip_coefficient(norm_of(report), 1e-8)
    assert clip < 2.0**-126
    lists = clone(lists_of([sample]))
    call(lists, report, max_norm=1e-8)
    assert_updated([sample], lists, [clip * 2.0**126, 2.0**-126])


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
def test_found_inf_skips(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], overload: str
) -> None:
    samples = samples_of(device=device)
    report = report_of(samples)
    lists = clone(lists_of(samples))
    found_inf = torch.ones(shape, dtype=dtype, device=device)
    before = Snapshot([found_inf, report, *(tensor for tensors in lists for tensor in tensors)])
    call(lists, report, overload, max_norm=1.0, found_inf=found_inf)
    before.assert_skipped()
    call(lists, report, overload, max_norm=math.inf, found_inf=torch.zeros_like(found_inf))
    assert_updated(samples, lists)


@pytest.mark.parametrize("overload", OVERLOADS)
def test_empty_lists_and_empty_tensors(device: torch.device, overload: str) -> None:
    call([[], [], [], [], [], []], torch.zeros(3, device=device), overload, max_norm=1.0)
    empty, full = (normal_sample(size, device=device) for size in (0, 5))
    lists = clone(lists_of([empty, full, empty]))
    call(lists, report_of([full]), overload, max_norm=math.inf)
    assert_updated([full], [tensors[1:2] for tensors in lists])
    assert [step.item() for step in lists[5]] == [5.0, 6.0, 5.0]


def test_a_gradient_may_be_its_parameter(device: torch.device) -> None:
    sample = normal_sample(100, device=device)
    sample = sample.map(torch.clone)
    lists = clone(lists_of([sample]))
    lists[1] = lists[0]
    report = gradient_stats(lists[1]).report
    same = Sample(sample.param, sample.param, sample.exp_avg, sample.exp_avg_sq, None, sample.step, False)
    clip = stats_oracle.clip_coefficient(norm_of(report), 1.0)
    assert clip < 1.0
    call(lists, report, max_norm=1.0)
    assert_updated([same], lists, [clip])


def refusals() -> dict[str, tuple[list[list[Tensor]], Tensor, dict[str, Any]]]:
    """Arguments that must be refused: the lists, the report, the options."""

    def lists(**replaced: list[Tensor]) -> list[list[Tensor]]:
        given = lists_of([normal_sample(4), normal_sample(6)])
        return [replaced.get(name, own) for name, own in zip(LISTS, given, strict=True)]

    report = torch.tensor([1.0, 1.0, 0.0])
    one, other, store = torch.zeros(4), torch.zeros(6), torch.zeros(12)
    leaf = torch.zeros(4, requires_grad=True)
    return {
        "report of 4 values": (lists(), torch.zeros(4), {}),
        "report as a row": (lists(), report[None], {}),
        "report dtype": (lists(), report.double(), {}),
        "report strides": (lists(), torch.zeros(6)[::2], {}),
        "report on another device": (lists(), report.to("meta"), {}),
        "max_norm -1": (lists(), report, {"max_norm": -1.0}),
        "max_norm NaN": (lists(), report, {"max_norm": math.nan}),
        "norm_epsilon -1": (lists(), report, {"max_norm": 1.0, "norm_epsilon": -1.0}),
        "norm_epsilon infinite": (lists(), report, {"max_norm": 1.0, "norm_epsilon": math.inf}),
        "lr -1": (lists(), report, {"lr": -1.0}),
        "beta2 1": (lists(), report, {"beta2": 1.0}),
        "weight_decay NaN": (lists(), report, {"weight_decay": math.nan}),
        "grad_scale 0": (lists(), report, {"grad_scale": torch.tensor(0.0)}),
        "found_inf of 2": (lists(), report, {"found_inf": torch.zeros(2)}),
        "a list too short": (lists(grads=[one]), report, {}),
        "grads shape": (lists(grads=[one, torch.zeros(5)]), report, {}),
        "grads dtype": (lists(grads=[one, other.double()]), report, {}),
        "params dtype": (lists(params=[one.half(), other]), report, {}),
        "state_steps dtype": (lists(state_steps=[torch.tensor(1), torch.tensor(1.0)]), report, {}),
        "state_steps fraction": (lists(state_steps=[torch.tensor(1.5), torch.tensor(1.0)]), report, {}),
        "params share": (lists(params=[store[:4], store[3:9]]), report, {}),
        "params and grads overlap": (
            lists(params=[store[:4], other], grads=[store[1:5], other.clone()]),
            report,
            {},
        ),
        "exp_avgs is params": (lists(params=[one, other], exp_avgs=[one, torch.zeros(6)]), report, {}),
        "params require grad": (lists(params=[leaf, other]), report, {}),
        "grads require grad": (lists(grads=[leaf, other]), report, {}),
    }


def test_refusals_are_sentences_and_nothing_is_written() -> None:
    lines = [
        refuse(name, functools.partial(op, *lists, report, **options), [lists, report])
        for name, (lists, report, options) in refusals().items()
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
report of 4 values: ValueError: fused_adamw::adamw_scaled: report has shape (4,); (3,) is required
report as a row: ValueError: fused_adamw::adamw_scaled: report has shape (1, 3); (3,) is required
report dtype: TypeError: fused_adamw::adamw_scaled: report has dtype torch.float64; torch.float32 is
    required
report strides: ValueError: fused_adamw::adamw_scaled: report has strides (2,); a contiguous tensor is
    required
report on another device: ValueError: fused_adamw::adamw_scaled: report is on meta; cpu, where the
    parameters are, is required
max_norm -1: ValueError: fused_adamw::adamw_scaled: max_norm is -1.0; a number of at least 0, or None, is
    required
max_norm NaN: ValueError: fused_adamw::adamw_scaled: max_norm is nan; a number of at least 0, or None, is
    required
norm_epsilon -1: ValueError: fused_adamw::adamw_scaled: epsilon is -1.0; a finite number of at least 0 is
    required
norm_epsilon infinite: ValueError: fused_adamw::adamw_scaled: epsilon is inf; a finite number of at least
    0 is required
lr -1: ValueError: fused_adamw::adamw_scaled: lr is -1.0; a finite number of at least 0 is required
beta2 1: ValueError: fused_adamw::adamw_scaled: beta2 is 1.0; a number of at least 0 and below 1 is
    required
weight_decay NaN: ValueError: fused_adamw::adamw_scaled: weight_decay is nan; a finite number of at least
    0 is required
grad_scale 0: ValueError: fused_adamw::adamw_scaled: grad_scale is 0.0; a positive finite number whose
    reciprocal is finite in float32 is required
found_inf of 2: ValueError: fused_adamw::adamw_scaled: found_inf has shape (2,); shape () or (1,) is
    required
a list too short: ValueError: fused_adamw::adamw_scaled: grads has 1 tensors; 2, as params, is required
grads shape: ValueError: fused_adamw::adamw_scaled: grads[1] has shape (5,); (6,), the parameter's, is
    required
grads dtype: TypeError: fused_adamw::adamw_scaled: grads[1] has dtype torch.float64; torch.float32,
    torch.float16 or torch.bfloat16 is required
params dtype: TypeError: fused_adamw::adamw_scaled: params[0] has dtype torch.float16 and no master
    weight; torch.float32, or a master weight, is required
state_steps dtype: TypeError: fused_adamw::adamw_scaled: state_steps[0] has dtype torch.int64;
    torch.float32 is required
state_steps fraction: ValueError: fused_adamw::adamw_scaled: state_steps[0] is 1.5; a whole number of at
    least 0 and below 2^63 - 1 is required
params share: ValueError: fused_adamw::adamw_scaled: params[0] and params[1] share memory; a tensor that
    is written may share memory with no other tensor (a gradient that is exactly a tensor of its own
    parameter may)
params and grads overlap: ValueError: fused_adamw::adamw_scaled: params[0] and grads[0] share memory; a
    tensor that is written may share memory with no other tensor (a gradient that is exactly a tensor of
    its own parameter may)
exp_avgs is params: ValueError: fused_adamw::adamw_scaled: params[0] and exp_avgs[0] share memory; a
    tensor that is written may share memory with no other tensor (a gradient that is exactly a tensor of
    its own parameter may)
params require grad: RuntimeError: fused_adamw::adamw_scaled has no derivative, by design, and params[0]
    requires grad; call it under torch.no_grad(), or pass detached tensors
grads require grad: RuntimeError: fused_adamw::adamw_scaled has no derivative, by design, and grads[0]
    requires grad; call it under torch.no_grad(), or pass detached tensors""",
    )


@pytest.mark.parametrize("name", [name for name in refusals() if not name.startswith("report")])
def test_a_nonfinite_report_does_not_hide_a_refusal(name: str) -> None:
    lists, report, options = refusals()[name]
    report[2] = 1.0
    refuse(name, functools.partial(op, *lists, report, **options), [lists, report])


def test_schemas() -> None:
    text = "\n".join(str(getattr(op, overload)._schema) for overload in op.overloads())
    assert_expected_inline(
        text.replace(", ", ",\n    "),
        """\
fused_adamw::adamw_scaled(Tensor(a!)[] params,
    Tensor[] grads,
    Tensor(b!)[] exp_avgs,
    Tensor(c!)[] exp_avg_sqs,
    Tensor(d!)[] max_exp_avg_sqs,
    Tensor(e!)[] state_steps,
    Tensor report,
    float lr=0.001,
    *,
    float beta1=0.90000000000000002,
    float beta2=0.999,
    float weight_decay=0.01,
    float eps=1e-08,
    bool maximize=False,
    Tensor? grad_scale=None,
    Tensor? found_inf=None,
    float? max_norm=None,
    float norm_epsilon=9.9999999999999995e-07,
    Tensor(f!)[]? masters=None,
    int[]? rounding_seeds=None) -> ()
fused_adamw::adamw_scaled.tensor(Tensor(a!)[] params,
    Tensor[] grads,
    Tensor(b!)[] exp_avgs,
    Tensor(c!)[] exp_avg_sqs,
    Tensor(d!)[] max_exp_avg_sqs,
    Tensor(e!)[] state_steps,
    Tensor report,
    Tensor lr,
    *,
    Tensor beta1,
    Tensor beta2,
    float weight_decay=0.01,
    float eps=1e-08,
    bool maximize=False,
    Tensor? grad_scale=None,
    Tensor? found_inf=None,
    float? max_norm=None,
    float norm_epsilon=9.9999999999999995e-07,
    Tensor(f!)[]? masters=None,
    int[]? rounding_seeds=None) -> ()""",
    )


@pytest.mark.parametrize(
    "test", ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
)
@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_opcheck(device: torch.device, amsgrad: bool, overload: str, test: str) -> None:
    samples = [normal_sample(size, amsgrad=amsgrad, device=device) for size in (5, 40)]
    extras = {"grad_scale": scalar(2.0, device), "found_inf": scalar(0.0, device)} if amsgrad else {}
    options = option_arguments({"max_norm": 0.1, **extras}, overload, device)
    chosen = op.default if overload == "numbers" else op.tensor
    lists = clone(lists_of(samples))
    torch.library.opcheck(chosen, (*lists, report_of(samples)), options, test_utils=test)


def test_fakes_refuse_what_the_kernels_refuse() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        lists = lists_of([normal_sample(4)])
        op(*lists, torch.empty(3), max_norm=1.0)
        with pytest.raises(ValueError, match=r"report has shape \(4,\); \(3,\) is required"):
            op(*lists, torch.empty(4))
        with pytest.raises(ValueError, match="max_norm is -1"):
            op(*lists, torch.empty(3), max_norm=-1.0)
