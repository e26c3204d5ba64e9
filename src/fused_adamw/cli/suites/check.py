"""What a suite is made of, and how a check says that it failed or could not be made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class BlockedError(Exception):
    """What is missing for a check, in one sentence."""


class FailedError(Exception):
    """What was found instead of what is promised."""


def nothing_missing() -> str | None:
    """For checks that need nothing but the package."""
    return None


@dataclass(frozen=True)
class Check:
    """``run`` returns what was seen, in a few words; ``missing`` says what it lacks, if anything."""

    name: str
    run: Callable[[], str]
    missing: Callable[[], str | None] = nothing_missing


@dataclass(frozen=True)
class Suite:
    """Checks with one purpose. ``checks`` lists them for the given CUDA compilers, and computes nothing."""

    name: str
    proves: str
    leaves_open: str
    checks: Callable[[Sequence[str]], list[Check]]


def require(condition: bool, message: str) -> None:
    """Raises ``FailedError`` where the condition does not hold."""
    if not condition:
        raise FailedError(message)


def same_bits(found: Tensor, expected: Tensor, what: str) -> None:
    """Raises ``FailedError`` unless both tensors hold the same bits; compares on the CPU."""
    found, expected = found.detach().cpu(), expected.detach().cpu()
    require(
        found.shape == expected.shape and found.dtype == expected.dtype,
        f"{what} is {found.dtype} of shape {tuple(found.shape)}, not {expected.dtype} of "
        f"{tuple(expected.shape)}",
    )
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    differ = found.view(integers) != expected.view(integers)
    count = int(differ.sum())
    if count > 0:
        place = tuple(differ.nonzero()[0].tolist())
        raise FailedError(
            f"{what}: {count} of {found.numel()} elements differ; the one at {place} is "
            f"{found[place].item()!r} instead of {expected[place].item()!r}"
        )
