"""The optimizer on CUDA: the bits of the CPU, whose own tests say what they must be.

Whatever the CPU does in a training (clip, skip, unscale, refuse), CUDA must do with the same bits; so each
test here trains the same parameters with the same gradients on both, and compares everything.
"""

from __future__ import annotations

import copy
import gc
import io
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor, nn

import fused_adamw
from cases import assert_same_bits, wide_sample
from fused_adamw import _C, AdamW, NonfiniteGradientError
from training import (
    assert_all_same_bits,
    make_gradients,
    make_params,
    params_of,
    set_gradients,
    tensors_of,
    train,
)

SHAPES = ((50, 7), (), (300,), (2, 3, 4), (20_000,), (0,))
LONG = 50_000_000  # cycles: some 30 ms, in which a host that does not wait gets far
Gradients = list[list[Tensor | None]]
Make = Callable[[list[nn.Parameter]], AdamW]


def on(device: torch.device, tensors: Sequence[Tensor | None]) -> list[Any]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def moved(device: torch.device, params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone().to(device)) for param in params]


def assert_same_training(
    cuda: torch.device,
    make: Make,
    gradients: Gradients,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    step: Callable[[AdamW], Any] = AdamW.step,
) -> tuple[AdamW, AdamW]:
    """Trains on both; returns the optimizers."""
    params = make_params(shapes)
    here, there = make(params), make(moved(cuda, params))
    for grads in gradients:
        for optimizer, own in ((here, grads), (there, on(cuda, grads))):
            set_gradients(params_of(optimizer), own)
            step(optimizer)
    assert_same_tensors(there, here)
    return here, there


def assert_same_tensors(found: AdamW, expected: AdamW) -> None:
    assert_all_same_bits([tensor.cpu() for tensor in tensors_of(found)], tensors_of(expected))


def make_groups(params: list[nn.Parameter], **options: Any) -> AdamW:
    groups = [
        {"params": params[0::3], "lr": 1e-2, "weight_decay": 0.5},
        {"params": params[1::3], "betas": (0.5, 0.99), "maximize": True},
        {"params": params[2::3], "eps": 1e-3},
    ]
    return AdamW(groups, **options)


def in_groups(gradients: Gradients) -> Gradients:
    """Gradients in the order of the parameters of ``make_groups``."""
    return [[*grads[0::3], *grads[1::3], *grads[2::3]] for grads in gradients]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True, "weight_decay": 0.3},
    "clipped": {"max_grad_norm": 0.5},
    "clipped, serial statistics": {"max_grad_norm": 0.5, "hierarchical_stats": False},
    "clipped, amsgrad": {"max_grad_norm": 0.5, "amsgrad": True},
    "clipped to nothing": {"max_grad_norm": 0.0},
    "clipped below float32": {"max_grad_norm": 1e-42},
    "skipping": {"nonfinite": "skip"},
    "refusing": {"nonfinite": "error", "max_grad_norm": 0.5},
    "passes of their own": {"max_grad_norm": 0.5, "fused_step": False},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(cuda: torch.device, name: str, dtype: torch.dtype) -> None:
    if name == "passes of their own" and dtype != torch.float32:
        pytest.skip("the passes are torch's, which round a 16-bit gradient elsewhere on each device")
    gradients = make_gradients(make_params(SHAPES), 10, dtype)
    here, there = assert_same_training(cuda, lambda params: AdamW(params, **OPTIONS[name]), gradients)
    if here.last_stats is not None:
        assert there.last_stats.norm == here.last_stats.norm > 0.0
        assert there.last_stats.clip_coefficient == here.last_stats.clip_coefficient


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_values_of_every_kind(cuda: torch.device, max_grad_norm: float | None) -> None:
    sample = wide_sample(70_001)
    optimizers = []
    for device in (torch.device("cpu"), cuda):
        optimizer = AdamW(moved(device, [nn.Parameter(sample.param)]), max_grad_norm=max_grad_norm)
        train(optimizer, [[sample.grad.to(device)], [sample.grad.to(device).nan_to_num()]])
        optimizers.append(optimizer)
    assert_same_tensors(optimizers[1], optimizers[0])


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_groups(cuda: torch.device, max_grad_norm: float | None) -> None:
    gradients = in_groups(make_gradients(make_params(SHAPES), 5))
    assert_same_training(cuda, lambda params: make_groups(params, max_grad_norm=max_grad_norm), gradients)


def test_one_group_per_parameter(cuda: torch.device) -> None:
    """More groups of different options than share a launch, some with AMSGrad."""
    shapes = [(7 * i,) for i in range(50)]
    gradients = make_gradients(make_params(shapes), 3)

    def make(params: list[nn.Parameter]) -> AdamW:
        return AdamW(
            [{"params": [p], "lr": 1e-3 * (1 + i % 37), "amsgrad": i % 5 == 0} for i, p in enumerate(params)]
        )

    assert_same_training(cuda, make, gradients, shapes)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("count", [447, 448, 449, 1151, 1153])
def test_more_tensors_than_fit_in_a_launch(
    cuda: torch.device, count: int, max_grad_norm: float | None
) -> None:
    """Around the ends of the tables of a step and of an analysis, with empty tensors at both."""
    shapes = [((0,) if i % 64 in (0, 63) else (1 + i % 5,)) for i in range(count)]
    gradients = make_gradients(make_params(shapes), 2)
    assert_same_training(cuda, lambda params: AdamW(params, max_grad_norm=max_grad_norm), gradients, shapes)


def test_tensors_whose_blocks_are_counted_in_several_counters(cuda: torch.device) -> None:
    """About where several counters begin; each tensor's steps are right, also after one that is skipped."""
    many, ways, size = (_C.CUDA_LAYOUT[name] for name in ("kManyBlocks", "kWays", "kElementsPerRound"))
    shapes = [((many + extra) * size - 3,) for extra in range(ways + 2)]
    gradients = make_gradients(make_params(shapes), 4)
    gradients[2][1][5] = math.nan
    _, there = assert_same_training(cuda, lambda p: AdamW(p, nonfinite="skip"), gradients, shapes)
    assert [there.state[param]["step"].item() for param in params_of(there)] == [3.0] * len(shapes)


def test_more_rows_than_are_merged_at_once(cuda: torch.device) -> None:
    """1025 rows and more: the last block of each thousand merges them, the last of all goes on."""
    shapes = [(16384 * 700 + 5,), (16384 * 700,), (3,)]
    gradients = make_gradients(make_params(shapes), 1)
    here, there = assert_same_training(cuda, lambda p: AdamW(p, max_grad_norm=0.5), gradients, shapes)
    assert_same_bits(there.last_stats.gradients.report.cpu(), here.last_stats.gradients.report, "report")
    assert_same_bits(there.last_stats.gradients.rows.cpu(), here.last_stats.gradients.rows, "rows")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_steps_that_are_skipped(cuda: torch.device, value: float) -> None:
    gradients = make_gradients(make_params(SHAPES), 12)
    for i in (0, 3, 4, 11):
        gradients[i][i % len(SHAPES) - 2].flatten()[-1:].fill_(value)
    here, there = assert_same_training(cuda, lambda params: AdamW(params, nonfinite="skip"), gradients)
    assert here.last_stats.skipped
    assert there.last_stats.skipped
    assert there.last_stats.nonfinite_parameters == here.last_stats.nonfinite_parameters != []


def test_an_error_names_the_parameter_and_writes_nothing(cuda: torch.device) -> None:
    optimizer = AdamW(moved(cuda, make_params(SHAPES)), nonfinite="error")
    gradients = make_gradients(make_params(SHAPES), 2)
    train(optimizer, [on(cuda, gradients[0])])
    before = [tensor.clone() for tensor in tensors_of(optimizer)]
    gradients[1][2][7] = math.nan
    with pytest.raises(NonfiniteGradientError, match=r"param_groups\[0\]\['params'\]\[2\]"):
        train(optimizer, [on(cuda, gradients[1])])
    assert_all_same_bits(tensors_of(optimizer), before)


@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, fused_adamw.GradScaler])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_gradient_scaler(
    cuda: torch.device, scaler_type: type[torch.amp.GradScaler], max_grad_norm: float | None
) -> None:
    params = make_params(SHAPES)
    gradients = make_gradients(params, 12)
    for i in (0, 6, 7):
        gradients[i][2][0] = math.inf
    optimizers, scales = [], []
    for device in (torch.device("cpu"), cuda):
        optimizer = AdamW(moved(device, params), max_grad_norm=max_grad_norm)
        scaler = scaler_type(device.type, init_scale=3000.0, growth_interval=4)
        scaler.scale(torch.zeros((), device=device))
        for grads in gradients:
            scale = scaler.get_scale()
            set_gradients(params_of(optimizer), on(device, [grad * scale for grad in grads]))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        optimizers.append(optimizer)
    assert_same_tensors(optimizers[1], optimizers[0])
    assert scales[:12] == scales[12:]
    assert len(set(scales)) > 2


def test_learning_rate_and_betas_on_the_device(cuda: torch.device) -> None:
    """As float64 tensors they give the bits of the numbers, whatever they change to."""
    params = make_params(SHAPES)
    here = AdamW(params)
    lr, beta1, beta2 = (torch.zeros((), dtype=torch.float64, device=cuda) for _ in range(3))
    there = AdamW(moved(cuda, params), lr=lr, betas=(beta1, beta2))
    for i, grads in enumerate(make_gradients(params, 10)):
        numbers = (1e-3 * (i + 1), 0.8 + 0.01 * i, 0.99 + 0.0005 * i)
        for tensor, number in zip((lr, beta1, beta2), numbers, strict=True):
            tensor.fill_(number)
        here.param_groups[0].update(lr=numbers[0], betas=numbers[1:])
        train(here, [grads])
        train(there, [on(cuda, grads)])
    assert_same_tensors(there, here)


def test_parameters_with_and_without_gradients(cuda: torch.device) -> None:
    gradients: Gradients = [
        [grad if (i + k) % 3 else None for i, grad in enumerate(grads)]
        for k, grads in enumerate(make_gradients(make_params(SHAPES), 6))
    ]
    gradients.append([None] * len(SHAPES))
    assert_same_training(cuda, lambda params: AdamW(params, max_grad_norm=1.0), gradients)


def test_a_checkpoint_moves_between_devices_and_torch(cuda: torch.device) -> None:
    """Saved on CUDA, loaded by torch on the CPU (``map_location``) and by ours on both, then trained on."""
    params = make_params(SHAPES)
    gradients = make_gradients(params, 6)
    source = AdamW(moved(cuda, params), amsgrad=True)
    train(source, [on(cuda, grads) for grads in gradients[:3]])
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    trained = [param.detach().cpu() for param in params_of(source)]
    results = []
    for device in (torch.device("cpu"), cuda):
        file.seek(0)
        loaded = torch.load(file, map_location="cpu")
        optimizer = AdamW(moved(device, [nn.Parameter(param) for param in trained]), amsgrad=True)
        optimizer.load_state_dict(loaded)
        train(optimizer, [on(device, grads) for grads in gradients[3:]])
        results.append(optimizer)
    train(source, [on(cuda, grads) for grads in gradients[3:]])
    assert_same_tensors(results[1], results[0])
    assert_same_tensors(source, results[0])
    theirs = torch.optim.AdamW([nn.Parameter(param.clone()) for param in trained], amsgrad=True)
    file.seek(0)
    theirs.load_state_dict(torch.load(file, map_location="cpu"))
    train(theirs, gradients[3:])
    for mine, other in zip(params_of(results[0]), params_of(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_copies_go_on_alone(cuda: torch.device) -> None:
    params = make_params(SHAPES)
    gradients = [on(cuda, grads) for grads in make_gradients(params, 3)]
    optimizer = AdamW(moved(cuda, params))
    train(optimizer, gradients[:1])
    twin = copy.deepcopy(optimizer)
    train(optimizer, gradients[1:])
    train(twin, gradients[1:])
    assert_all_same_bits(tensors_of(twin), tensors_of(optimizer))


def test_gradients_at_odd_addresses(cuda: torch.device) -> None:
    """An access of 16 bytes is not possible; the bits are the same."""
    shapes = [(4099,), (65537,)]
    params = make_params(shapes)
    for grads in make_gradients(params, 1):
        here, there = AdamW(params, max_grad_norm=0.5), AdamW(moved(cuda, params), max_grad_norm=0.5)
        set_gradients(params, grads)
        for param, grad in zip(params_of(there), grads, strict=True):
            param.grad = torch.empty(grad.numel() + 1, device=cuda)[1:].copy_(grad)
        here.step()
        there.step()
        assert_same_tensors(there, here)


def test_a_step_goes_to_the_current_stream(cuda: torch.device) -> None:
    """On a side stream that is still busy making the gradients, a step on another one would be wrong."""
    params = make_params([(1 << 20,)])
    here, there = AdamW(params, max_grad_norm=0.5), AdamW(moved(cuda, params), max_grad_norm=0.5)
    (grads,) = make_gradients(params, 1)
    set_gradients(params, grads)
    here.step()
    source = grads[0].to(cuda)
    stream = torch.cuda.Stream(cuda)
    torch.cuda.synchronize(cuda)
    with torch.cuda.stream(stream):
        grad = torch.zeros_like(source)
        torch.cuda._sleep(LONG)
        grad.copy_(source)
        params_of(there)[0].grad = grad
        there.step()
    stream.synchronize()
    assert_same_tensors(there, here)


def test_nothing_is_read_back(cuda: torch.device) -> None:
    optimizer = AdamW(moved(cuda, make_params(SHAPES)), max_grad_norm=0.5)
    gradients = [on(cuda, grads) for grads in make_gradients(make_params(SHAPES), 3)]
    train(optimizer, gradients[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        train(optimizer, gradients[1:])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_parameters_of_two_devices(cuda: torch.device, max_grad_norm: float | None) -> None:
    """CPU and CUDA in one group: each is updated where it is, and clipped by the norm of all."""
    params = make_params([(33,), (65,), (7, 5)])
    here = AdamW(params, max_grad_norm=max_grad_norm)
    kept = [nn.Parameter(param.detach().clone()) for param in params[:2]]
    mixed = AdamW([kept[0], *moved(cuda, params[2:]), kept[1]], max_grad_norm=max_grad_norm)
    for grads in make_gradients(params, 3):
        train(here, [grads])
        set_gradients(params_of(mixed), [grads[0], grads[2].to(cuda), grads[1]])
        torch.cuda._sleep(LONG)  # so that what the CPU reads of the other device comes late
        mixed.step()
    found = params_of(mixed)
    for mine, other in zip((found[0], found[2], found[1]), params_of(here), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-6, atol=1e-7)
    if max_grad_norm is None:
        assert_all_same_bits([found[i].detach().cpu() for i in (0, 2, 1)], [p.detach() for p in params])
    else:
        assert mixed.last_stats.norm == pytest.approx(here.last_stats.norm, rel=1e-6)
        assert mixed.last_stats.clip_coefficient < 1.0


@pytest.mark.parametrize("name", ["lr", "grad_scale", "found_inf"])
def test_an_option_on_the_device_for_a_parameter_on_the_cpu(cuda: torch.device, name: str) -> None:
    """Its value is waited for, however late it comes."""
    values = {"lr": 0.03, "grad_scale": 4.0, "found_inf": 1.0}
    here, mixed = AdamW(make_params(SHAPES)), AdamW(make_params(SHAPES))
    (grads,) = make_gradients(params_of(here), 1)
    for optimizer, device in ((here, torch.device("cpu")), (mixed, cuda)):
        option = torch.zeros((), device=device)
        if name == "lr":
            optimizer.param_groups[0]["lr"] = option
        else:
            setattr(optimizer, name, option)
        set_gradients(params_of(optimizer), grads)
        if device == cuda:
            torch.cuda.synchronize(cuda)
            torch.cuda._sleep(LONG)
        option.fill_(values[name])
        optimizer.step()
    assert_same_tensors(mixed, here)


def test_a_learning_rate_on_the_cpu(cuda: torch.device) -> None:
    """As torch takes it: a tensor of one element, wherever it is."""
    params = make_params(SHAPES)
    lr = torch.tensor(0.03, dtype=torch.float64)
    here, there = AdamW(params, lr=lr), AdamW(moved(cuda, params), lr=lr)
    for grads in make_gradients(params, 3):
        lr *= 0.5
        train(here, [grads])
        train(there, [on(cuda, grads)])
    assert_same_tensors(there, here)
    with (
        pytest.raises(RuntimeError, match="lr of group 0 is a tensor on the CPU"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        there.step()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_cuda_devices() -> None:
    params = make_params([(33,), (65,), (7,)])
    here = AdamW(params)
    devices = ("cuda:0", "cuda:1", "cuda:1")
    spread = AdamW([{"params": moved(torch.device(d), [p])} for p, d in zip(params, devices, strict=True)])
    for grads in make_gradients(params, 3):
        train(here, [grads])
        set_gradients(params_of(spread), [g.to(d) for g, d in zip(grads, devices, strict=True)])
        spread.step()
    assert_same_tensors(spread, here)


@pytest.fixture
def cuda_alone(cuda: torch.device) -> Iterator[None]:
    """Lets one test at a time take most of a card's memory, where several processes run the tests."""
    with FileLock(Path(tempfile.gettempdir()) / "fused-adamw-large-tensors.lock"):
        yield
        gc.collect()
        torch.cuda.empty_cache()  # what a process keeps, the others cannot have


@pytest.mark.usefixtures("cuda_alone")
@pytest.mark.parametrize("size", [2**31 + 77, 2_359_332_864, 2**32 + 1])
def test_a_tensor_of_more_than_2_to_the_31_elements(cuda: torch.device, size: int) -> None:
    """Right at both ends and around the places where a 32-bit count of elements or bytes would wrap."""
    needed = 4 * 4 * size + 2**31
    if torch.cuda.mem_get_info(cuda)[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of device memory")
    width = 1009
    middles = [m for m in (2**29, 2**30, 2**31, 2**32) if m + width < size]
    places = [0, *(middle - width // 2 for middle in middles), size - width]
    small = make_params([(width,)] * len(places))
    grads = make_gradients(small, 1)[0]
    param = nn.Parameter(torch.zeros(size, device=cuda))
    param.grad = torch.zeros(size, device=cuda)
    with torch.no_grad():
        for place, values, grad in zip(places, small, grads, strict=True):
            param[place : place + width] = values.to(cuda)
            param.grad[place : place + width] = grad.to(cuda)
    optimizer, twins = AdamW([param], max_grad_norm=0.5), AdamW(small, max_grad_norm=0.5)
    optimizer.step()
    train(twins, [grads])
    norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
    assert optimizer.last_stats.norm == pytest.approx(norm, rel=1e-6)
    for place, values in zip(places, small, strict=True):
        found = param.detach()[place : place + width].cpu()
        torch.testing.assert_close(found, values.detach(), rtol=1e-6, atol=1e-7)
        found = optimizer.state[param]["exp_avg"][place : place + width].cpu()
        torch.testing.assert_close(found, twins.state[values]["exp_avg"], rtol=1e-5, atol=0.0)
    assert optimizer.state[param]["step"].item() == 1.0
    changed = int(torch.count_nonzero(optimizer.state[param]["exp_avg"]))
    assert changed == sum(int(torch.count_nonzero(grad)) for grad in grads)
