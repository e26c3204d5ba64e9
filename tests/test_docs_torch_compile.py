"""``docs/torch_compile.md`` shows graphs as they are, and its code runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import fused_adamw
from graphs import graph_of, small, tensor_options

PAGE = Path(__file__).parent.parent / "docs" / "torch_compile.md"

# The first import of Inductor brings it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_dynamo(set_threads: Callable[[int], None]) -> Iterator[None]:
    set_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block_after(comment: str) -> str:
    [block] = re.findall(rf"<!-- {comment} -->\n```text\n(.*?)```\n", PAGE.read_text(), re.DOTALL)
    return block.rstrip("\n")


def test_the_graphs_are_real() -> None:
    """The texts are those that ``test_compile.py`` has, of the same optimizers."""
    plain = graph_of(fused_adamw.AdamW(small(), lr=torch.tensor(0.1)))
    assert block_after("the graph of a plain step") == plain
    clipped = graph_of(fused_adamw.AdamW(small(), max_grad_norm=1.0, **tensor_options()))
    assert block_after("the graph of a clipped step") == clipped


def test_the_code_runs() -> None:
    """All blocks, one after the other; the last one trains."""
    blocks = re.findall(r"```python\n(.*?)```\n", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        if "trace_autograd_ops" in block and not hasattr(torch._dynamo.config, "trace_autograd_ops"):
            pytest.skip("this torch does not trace backward()")
        exec(compile(block, str(PAGE), "exec"), names)
    assert isinstance(names["loss"], torch.Tensor)
    assert names["optimizer"].last_stats.norm > 0.0  # type: ignore[attr-defined]


def test_every_test_file_that_is_named_exists() -> None:
    for name in set(re.findall(r"`(test_\w+\.py)`", PAGE.read_text())):
        assert (Path(__file__).parent / name).is_file(), name
