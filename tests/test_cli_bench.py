"""``fused-adamw bench``: what is timed, compared and written; what cannot run is blocked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import image
from typer.testing import CliRunner, Result

from fused_adamw.cli import bench_run, models
from fused_adamw.cli.app import app
from fused_adamw.cli.contenders import OURS

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_run.CEILING_ELEMENTS, "cpu", 1 << 20)
    monkeypatch.setattr(bench_run, "SMALL_ROUNDS", 2)
    monkeypatch.setattr(bench_run, "SMALL_CALLS", 2)


def run(*arguments: object, expect: int) -> Result:
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", *map(str, arguments)])
    assert result.exit_code == expect, (result.output, result.exception)
    return result


def figures(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "bench.json").read_text())


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    def find(value: Any) -> Any:
        """The list of contenders, wherever it is."""
        if isinstance(value, list) and value and isinstance(value[0], dict) and "outcome" in value[0]:
            return value
        parts = value.values() if isinstance(value, dict) else ()
        return next((found for part in parts if (found := find(part))), None)

    return {row["name"]: row for row in find(figures(folder))}


@pytest.mark.parametrize("options", [(), ("--clip",), ("--amsgrad", "--dtype", "bfloat16")])
def test_all_are_measured_and_written(tmp_path: Path, options: tuple[str, ...]) -> None:
    run("--elements", 3000, *options, "--output", tmp_path, expect=0)
    found = rows(tmp_path)
    ours = [name for name in found if name.startswith(OURS)]
    assert ours
    assert len(found) > len(ours) + 2
    for name in ours:
        assert found[name]["outcome"] == "measured"
        assert found[name]["bytes_per_parameter"] > 0.0
    assert all(row["outcome"] in ("measured", "blocked") for row in found.values())
    assert all(row["detail"] for row in found.values() if row["outcome"] == "blocked")
    assert image.imread(tmp_path / "bench.png").shape[2] == 4


def test_a_wrong_result_voids_its_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = torch.optim.AdamW.step

    def wrong_step(self: torch.optim.AdamW, closure: Any = None) -> Any:
        result = step(self, closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", wrong_step)
    run("--elements", 3000, "--output", tmp_path, expect=1)
    found = rows(tmp_path)
    void = [name for name, row in found.items() if row["outcome"] == "void"]
    assert void
    assert not any(name.startswith(OURS) for name in void)


def test_graphs_are_blocked_on_the_cpu(tmp_path: Path) -> None:
    run("--elements", 1000, "--mode", "graph", "--output", tmp_path, expect=2)
    found = rows(tmp_path)
    assert {row["outcome"] for row in found.values()} == {"blocked"}
    assert "CUDA graphs need a CUDA device" in {row["detail"] for row in found.values()}


def test_elements_and_a_model_are_one_too_many(tmp_path: Path) -> None:
    result = run("--elements", 1000, "--model", "gpt2", "--output", tmp_path, expect=2)
    assert result.stderr == "fused-adamw bench: --elements takes the place of --model; give one of them\n"


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    # Counted in the published models: GPT-2 124M, Llama 3.2 1B, ResNet-50.
    [
        ("gpt2", 148, 124_439_808),
        ("llama-1b", 146, 1_235_814_400),
        ("resnet50", 161, 25_557_032),
        ("small", 400, 820_800),
    ],
)
def test_the_sizes_of_models(name: str, tensors: int, elements: int) -> None:
    shapes = models.MODELS[name]()
    assert (len(shapes.sizes), sum(shapes.sizes)) == (tensors, elements)
