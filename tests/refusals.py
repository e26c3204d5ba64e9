"""Refusals as data: calls that must raise, what they say, and that nothing is written."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import Tensor

from cases import Snapshot


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def refuse(name: str, call: Callable[[], Any], arguments: Any) -> str:
    """Asserts that the call raises and writes nothing; returns a line or more that say what it raised."""
    before = Snapshot(tensor for tensor in tensors_in(arguments) if tensor.numel() < 1_000_000)
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        refusal = f"{name}: {type(error).__name__}: {error}"
    else:
        pytest.fail(f"{name} was not refused")
    before.assert_unchanged()
    return textwrap.fill(refusal, 105, subsequent_indent="    ", break_long_words=False)
