"""Sample inputs as data, and the helpers with which every check runs over them.

A ``Sample`` is one parameter with its gradient and state. ``call_step`` and ``call_step_`` hand samples to
the two ops, so that a test says what goes in and what must come out, whatever the overload.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fused_adamw  # noqa: F401 (registers the ops)

step_op = torch.ops.fused_adamw.step
step_inplace_op = torch.ops.fused_adamw.step_

GRAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Around the widths of vectors, the alignment of a thread's part (64), the share that wakes a second thread
# (16,384), and a megabyte or more.
SIZES = (0, 1, 31, 32, 33, 127, 255, 256, 257, 1023, 1025, 4097, 65537, 1048577)

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "maximize": {"maximize": True},
    "no_decay": {"weight_decay": 0.0},
    "strong_decay": {"weight_decay": 0.3, "lr": 0.1},
    "betas_0": {"beta1": 0.0, "beta2": 0.0},
    "beta1_0": {"beta1": 0.0},
    "long_memory": {"beta1": 0.99, "beta2": 0.99999},
    "lr_0": {"lr": 0.0},
    "lr_tiny": {"lr": 1e-12},
    "eps_large": {"eps": 0.1},
}

SCALARS = ("numbers", "tensors")

LISTS = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")
WRITTEN_LISTS = tuple(name for name in LISTS if name != "grads")


@dataclass(frozen=True)
class Sample:
    """One parameter after ``step`` updates; no moments before the first, no maximum without AMSGrad."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor | None
    exp_avg_sq: Tensor | None
    max_exp_avg_sq: Tensor | None
    step: int
    amsgrad: bool

    @property
    def moments(self) -> tuple[Tensor | None, ...]:
        maximum = (self.max_exp_avg_sq,) if self.amsgrad else ()
        return (self.exp_avg, self.exp_avg_sq, *maximum)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.param, self.grad, *self.moments) if t is not None)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """What an update writes."""
        return tuple(t for t in (self.param, *self.moments) if t is not None)

    def map(self, function: Any) -> Sample:
        """The sample with ``function`` applied to each tensor."""
        names = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        mapped = {n: None if getattr(self, n) is None else function(getattr(self, n)) for n in names}
        return replace(self, **mapped)

    def clone(self) -> Sample:
        return self.map(torch.clone)

    def with_zero_moments(self) -> Sample:
        zeros = [torch.zeros_like(self.param) for _ in range(3)]
        return replace(
            self, exp_avg=zeros[0], exp_avg_sq=zeros[1], max_exp_avg_sq=zeros[2] if self.amsgrad else None
        )


def normal_sample(
    shape: Sequence[int] | int,
    dtype: torch.dtype = torch.float32,
    *,
    amsgrad: bool = False,
    step: int = 5,
    seed: int = 0,
    device: Any = "cpu",
) -> Sample:
    """Values as in training."""
    generator = torch.Generator().manual_seed(seed)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator)

    exp_avg_sq = 0.01 * normal().square()
    sample = Sample(
        param=normal(),
        grad=(0.1 * normal()).to(dtype),
        exp_avg=0.05 * normal(),
        exp_avg_sq=exp_avg_sq,
        max_exp_avg_sq=exp_avg_sq * (1.0 + normal()).abs() if amsgrad else None,
        step=step,
        amsgrad=amsgrad,
    )
    return sample.map(lambda tensor: tensor.to(device))


def normal_gradient(
    shape: Sequence[int] | int, dtype: torch.dtype = torch.float32, *, seed: int = 0, device: Any = "cpu"
) -> Tensor:
    """Another gradient of the kind that ``normal_sample`` has."""
    generator = torch.Generator().manual_seed(seed)
    return (0.1 * torch.randn(shape, generator=generator)).to(dtype).to(device)


def first_sample(
    shape: Sequence[int] | int, dtype: torch.dtype = torch.float32, *, amsgrad: bool = False, **kwargs: Any
) -> Sample:
    """A parameter before its first update."""
    sample = normal_sample(shape, dtype, amsgrad=amsgrad, step=0, **kwargs)
    return replace(sample, exp_avg=None, exp_avg_sq=None, max_exp_avg_sq=None)


SPECIALS = (
    *(0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")),
    *(2.0**-149, -(2.0**-149), 2.0**-127, 2.0**-126, -(2.0**-126), 1e-30, -1e-20),
    *(3.4028234663852886e38, -3.4028234663852886e38, 1e30, -1e20, 65504.0, 6e-8),
)


def wide_sample(
    size: int,
    dtype: torch.dtype = torch.float32,
    *,
    amsgrad: bool = False,
    step: int = 5,
    seed: int = 0,
    device: Any = "cpu",
) -> Sample:
    """Every kind of value: all exponents, subnormals, infinities, NaNs of all payloads, zeros of both signs.

    A quarter of the elements are random bits in all tensors, a quarter special values against special values,
    the rest ordinary values with exponents from all over the range.
    """
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor(SPECIALS)
    quarter = size // 4

    def values(*, signed: bool = True) -> Tensor:
        random_bits = torch.randint(-(2**31), 2**31, (quarter,), generator=generator, dtype=torch.int64)
        random_special = special[torch.randint(len(special), (quarter,), generator=generator)]
        rest = size - 2 * quarter
        exponents = torch.rand(rest, generator=generator, dtype=torch.float64) * 270 - 145
        spread = torch.exp2(exponents).float()
        if signed:
            spread *= torch.randn(rest, generator=generator)
        return torch.cat([random_bits.to(torch.int32).view(torch.float32), random_special, spread])

    def gradients() -> Tensor:
        if dtype == torch.float32:
            return values()
        narrow = values().to(dtype)
        some_bits = torch.randint(-(2**15), 2**15, (quarter,), generator=generator, dtype=torch.int64)
        narrow[:quarter] = some_bits.to(torch.int16).view(dtype)
        return narrow

    sample = Sample(
        param=values(),
        grad=gradients(),
        exp_avg=values(),
        exp_avg_sq=values(signed=False),
        max_exp_avg_sq=values(signed=False) if amsgrad else None,
        step=step,
        amsgrad=amsgrad,
    )
    return sample.map(lambda tensor: tensor.to(device))


def scalar(value: float, device: Any = "cpu", dtype: torch.dtype = torch.float64, shape: Any = ()) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


def option_arguments(options: dict[str, Any], scalars: str, device: Any) -> dict[str, Any]:
    """The options for the overloads that take numbers, or for those that take tensors."""
    if scalars == "numbers":
        return options
    all_options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, **options}
    return {
        name: scalar(value, device) if name in ("lr", "beta1", "beta2") else value
        for name, value in all_options.items()
    }


def step_overload(scalars: str, amsgrad: bool) -> Any:
    return {
        ("numbers", False): step_op.default,
        ("tensors", False): step_op.tensor,
        ("numbers", True): step_op.amsgrad,
        ("tensors", True): step_op.amsgrad_tensor,
    }[scalars, amsgrad]


def step_inplace_overload(scalars: str) -> Any:
    return {"numbers": step_inplace_op.default, "tensors": step_inplace_op.tensor}[scalars]


def call_step(sample: Sample, *, scalars: str = "numbers", **options: Any) -> Sample:
    """The sample after one more update, out of place; its gradient is the old one."""
    device = sample.param.device
    step: Any = sample.step
    if scalars == "tensors":
        step = torch.tensor(sample.step, dtype=torch.int64, device=device)
    new = step_overload(scalars, sample.amsgrad)(
        sample.param, sample.grad, *sample.moments, step, **option_arguments(options, scalars, device)
    )
    maximum = new[3] if sample.amsgrad else None
    return Sample(new[0], sample.grad, new[1], new[2], maximum, sample.step + 1, sample.amsgrad)


def lists_of(samples: Sequence[Sample]) -> list[list[Tensor]]:
    """The arguments of ``step_`` for samples that all have their state."""
    amsgrad = any(sample.amsgrad for sample in samples)
    return [
        [sample.param for sample in samples],
        [sample.grad for sample in samples],
        [sample.exp_avg for sample in samples],
        [sample.exp_avg_sq for sample in samples],
        [sample.max_exp_avg_sq for sample in samples] if amsgrad else [],
        [torch.tensor(float(sample.step), device=sample.param.device) for sample in samples],
    ]


def call_step_(lists: Sequence[Sequence[Tensor]], *, scalars: str = "numbers", **options: Any) -> None:
    device = lists[0][0].device if lists[0] else "cpu"
    assert step_inplace_overload(scalars)(*lists, **option_arguments(options, scalars, device)) is None


def bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor's elements, for comparisons that tell NaNs and zeros apart."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(integers[tensor.element_size()])


def assert_same_bits(found: Tensor, expected: Tensor, what: str = "") -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if not torch.equal(bits(found), bits(expected)):
        where = (bits(found) != bits(expected)).nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{what}: {len(where)} of {found.numel()} elements differ; at {first} "
            f"{found[first].item()!r} instead of {expected[first].item()!r}"
        )


def assert_same_state(found: Sample, expected: Sample) -> None:
    """The same bits in the parameter and in each moment."""
    assert found.amsgrad == expected.amsgrad
    names = ("param", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if found.amsgrad else ()))
    for name in names:
        assert_same_bits(getattr(found, name), getattr(expected, name), name)


class Snapshot:
    """What tensors held, in bits, and how often autograd was told of a change, at one moment."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._tensors = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        self._versions = [_version(tensor) for tensor in self._tensors]
        self._bits = [_copy_of_bits(tensor) for tensor in self._tensors]

    def assert_unchanged(self) -> None:
        self.assert_bits_unchanged()
        for i, (tensor, version) in enumerate(zip(self._tensors, self._versions, strict=True)):
            assert _version(tensor) == version, f"the version counter of tensor {i} went up"

    def assert_skipped(self) -> None:
        """Unchanged; on CUDA only the device knows, so autograd is told of a change all the same."""
        self.assert_bits_unchanged()
        if not any(tensor.is_cuda for tensor in self._tensors):
            self.assert_unchanged()

    def assert_bits_unchanged(self) -> None:
        for i, (tensor, old) in enumerate(zip(self._tensors, self._bits, strict=True)):
            new = _copy_of_bits(tensor)
            assert (old is None) == (new is None)
            assert old is None or torch.equal(old, new), f"tensor {i} was written"


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _copy_of_bits(tensor: Tensor) -> Tensor | None:
    tensor = tensor.detach()
    if tensor.device.type == "meta":
        return None
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return bits(tensor.resolve_neg()).clone()
