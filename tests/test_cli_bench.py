"""``fused-adamw bench``: what is timed, what voids a timing, what is blocked, what is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from matplotlib import image
from typer.testing import CliRunner, Result

from fused_adamw.cli import bench, bench_report, bench_run, contenders, models, terminal, timing
from fused_adamw.cli.app import app
from fused_adamw.cli.bench_run import Measured, Row
from fused_adamw.cli.contenders import Case, Entry, Storage

CPU = torch.device("cpu")


# What stands beside ours.
PEERS = ("separate kernels", "torch for-loop", "torch foreach", "torch compiled foreach", "torch fused")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little to move, few rounds; nothing compiled, which has a test of its own."""
    monkeypatch.setitem(bench_run.CEILING_ELEMENTS, "cpu", 1 << 16)
    monkeypatch.setattr(bench_run, "SMALL_ROUNDS", 2)
    monkeypatch.setattr(bench_run, "SMALL_CALLS", 2)
    entries = contenders.entries

    def without_compiled(case: Case, compilers: Sequence[str]) -> list[Entry]:
        return [
            Entry(entry.name, entry.make, "left out") if entry.name == contenders.COMPILED else entry
            for entry in entries(case, compilers)
        ]

    monkeypatch.setattr(bench_run, "entries", without_compiled)


def run(*arguments: object, expect: int = 0) -> Result:
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", *map(str, arguments)])
    assert result.exit_code == expect, (result.output, result.exception)
    return result


def figures(folder: Path) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads((folder / "bench.json").read_text(), parse_constant=refuse)


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found["contenders"]}


def test_all_contenders_are_timed(tmp_path: Path) -> None:
    output = run("--elements", 3000, "--output", tmp_path).output
    found = figures(tmp_path)
    rows = by_name(found)
    assert list(rows) == [
        "fused_adamw",
        *PEERS,
    ]
    assert rows.pop("torch compiled foreach")["outcome"] == "blocked"
    assert "torch compiled foreach: blocked: left out" in output
    rate = found["memory_bytes_per_second"]
    for name, row in rows.items():
        assert row["outcome"] == "measured", row
        assert name in output
        taken = row["timing"]
        assert 0.0 < taken["least"] <= taken["median"] <= taken["most"]
        assert taken["calls"] == 4
        assert row["bytes_per_parameter"] == pytest.approx(taken["median"] / 3000 * rate)
        assert row["kernels"] is row["peak_bytes"] is None  # of CUDA alone
    assert found["work"] == {
        "name": "one tensor of 3,000",
        "source": "--elements",
        "tensors": 1,
        "parameters": 3000,
        "dtype": "float32",
        "gradients": "float32",
        "amsgrad": False,
        "clip": False,
        "mode": "eager",
    }
    assert found["machine"]["versions"]["torch"] == torch.__version__
    picture = image.imread(tmp_path / "bench.png")
    assert picture.shape[0] > 200
    assert picture.shape[1] > 800


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("options", [[], ["--amsgrad"], ["--clip"], ["--amsgrad", "--clip"]], ids=str)
def test_all_contenders_come_to_the_same(tmp_path: Path, dtype: str, options: list[str]) -> None:
    run("--elements", 1000, "--dtype", dtype, *options, "--output", tmp_path)
    found = figures(tmp_path)
    assert {row["outcome"] for row in found["contenders"]} == {"measured", "blocked"}
    gradient = 4 if dtype == "float32" else 2
    expected = 24 + gradient * (2 if "--clip" in options else 1) + (8 if "--amsgrad" in options else 0)
    assert found["ideal_bytes_per_parameter"] == expected


@pytest.mark.parametrize("clip", [[], ["--clip"]], ids=str)
@pytest.mark.parametrize(
    ("params", "names", "weight_bytes"),
    [
        ("bf16", ["remainders", "float32 masters", "rounded by chance"], 8),
        ("fp16", ["", "rounded by chance"], 12),
    ],
    ids=str,
)
def test_parameters_of_16_bits(
    tmp_path: Path, params: str, names: list[str], weight_bytes: int, clip: list[str]
) -> None:
    output = run("--elements", 3000, "--params", params, "--amsgrad", *clip, "--output", tmp_path).output
    found = figures(tmp_path)
    rows = by_name(found)
    assert list(rows) == [
        *(", ".join(filter(None, ["fused_adamw", name])) for name in names),
        *PEERS,
    ]
    assert rows.pop("torch compiled foreach")["outcome"] == "blocked"
    assert {row["outcome"] for row in rows.values()} == {"measured"}, rows
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[params]
    assert found["work"]["dtype"] == found["work"]["gradients"] == dtype
    assert f"{dtype} parameters, {dtype} gradients" in " ".join(output.split())
    assert found["ideal_bytes_per_parameter"] == weight_bytes + 24 + 2 * (2 if clip else 1)


def test_gradients_of_another_dtype_than_the_parameters(tmp_path: Path) -> None:
    run("--elements", 500, "--params", "bfloat16", "--dtype", "float32", "--output", tmp_path)
    found = figures(tmp_path)
    assert (found["work"]["dtype"], found["work"]["gradients"]) == ("bfloat16", "float32")
    assert {row["outcome"] for row in found["contenders"]} == {"measured", "blocked"}
    case = Case(CPU, (1,), torch.float32, mode="compile", params=torch.bfloat16)
    [*own, _] = [entry for entry in contenders.entries(case, []) if entry.name.startswith("fused_adamw")]
    assert all("another dtype" in str(entry.blocked) for entry in own)
    same = Case(CPU, (1,), torch.bfloat16, mode="compile", params=torch.bfloat16)
    assert contenders.entries(same, [])[0].blocked is None


@pytest.mark.parametrize("where", ["master", "param"])
def test_a_wrong_16_bit_result_voids_a_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    original = contenders.ours

    def wrong(storage: Storage, **options: Any) -> contenders.Contender:
        found = original(storage, **options)
        call = found.call

        def step() -> None:
            call()
            if (
                where == "param" and not options["form"].options
            ):  # beside remainders, it would make another weight
                return
            if where == "param":
                storage.params[0].mul_(1.05)
            else:
                for tensors in storage.masters.values():
                    tensors[0][-1] += 1 if tensors[0].dtype == torch.float32 else 0x1FFF

        found.call = step
        return found

    monkeypatch.setattr(contenders, "ours", wrong)
    run("--elements", 1000, "--params", "bfloat16", "--output", tmp_path, expect=1)
    rows = by_name(figures(tmp_path))
    outcomes = {name: row["outcome"] for name, row in rows.items() if name.startswith("fused_adamw")}
    assert outcomes == {
        "fused_adamw, remainders": "measured" if where == "param" else "void",
        "fused_adamw, float32 masters": "void",
        "fused_adamw, rounded by chance": "void",
    }
    assert rows["torch fused"]["outcome"] == "measured"


@pytest.mark.parametrize("where", ["param", "exp_avg", "exp_avg_sq"])
def test_a_wrong_result_voids_a_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    original = contenders.ours

    def wrong(storage: Storage, **options: Any) -> contenders.Contender:
        found = original(storage, **options)
        call = found.call

        def step() -> None:
            call()
            tensors = storage.params if where == "param" else storage.moments[where]
            tensors[0][-1] += 1e-4

        found.call = step
        return found

    monkeypatch.setattr(contenders, "ours", wrong)
    output = run("--elements", 1000, "--output", tmp_path, expect=1).output
    row = by_name(figures(tmp_path))["fused_adamw"]
    assert row["outcome"] == "void"
    assert row["timing"] is row["bytes_per_parameter"] is None
    # A wrong moment makes the parameter wrong in the next call, which is found first.
    assert row["detail"].startswith("wrong result in round 1: param of tensor 0 is up to ")
    assert "fused_adamw: void: wrong result in round 1" in output


def test_a_nan_is_a_wrong_result() -> None:
    right = {"param": [torch.ones(3)]}
    assert bench_run.difference({"param": [torch.ones(3) + 1e-6]}, right) == ""
    assert "param of tensor 0" in bench_run.difference({"param": [torch.full((3,), torch.nan)]}, right)


def test_a_wrong_reference_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with the float64 formula."""
    monkeypatch.setattr(contenders, "WEIGHT_DECAY", 0.5)
    with pytest.raises(RuntimeError, match="the separate kernels differ from the float64 formula: param"):
        bench_run.measure(Case(CPU, (100,)), [])


def test_a_contender_that_raises_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory\nmore text")

    monkeypatch.setattr(contenders, "torchs", broken)
    run("--elements", 1000, "--output", tmp_path)
    rows = by_name(figures(tmp_path))
    assert (rows["torch fused"]["outcome"], rows["torch fused"]["detail"]) == ("blocked", "no memory")
    monkeypatch.setattr(contenders, "ours", lambda *_, **__: 1 / 0)
    run("--elements", 1000, "--output", tmp_path, expect=1)
    row = by_name(figures(tmp_path))["fused_adamw"]
    assert (row["outcome"], row["detail"]) == ("failed", "ZeroDivisionError: division by zero")


def test_cuda_graphs_are_blocked_on_the_cpu(tmp_path: Path) -> None:
    output = run("--mode", "graph", "--output", tmp_path, expect=2).output
    assert "blocked: CUDA graphs need a CUDA device" in output
    found = figures(tmp_path)
    assert {row["outcome"] for row in found["contenders"]} == {"blocked"}
    assert found["memory_bytes_per_second"] is None
    assert not (tmp_path / "bench.png").exists()


def test_without_a_card_cuda_is_blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run("--device", "cuda", "--output", tmp_path, expect=2)
    rows = by_name(figures(tmp_path))
    assert {"fused_adamw, nvrtc", "fused_adamw, ptx"} <= rows.keys()
    assert all(row["detail"] for row in rows.values())


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("params", ["float32", "float16"])
def test_compiled_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: str) -> None:
    monkeypatch.setattr(bench_run, "entries", contenders.entries)
    run("--mode", "compile", "--elements", 500, "--params", params, "--clip", "--output", tmp_path)
    rows = by_name(figures(tmp_path))
    measured = {name for name, row in rows.items() if row["outcome"] == "measured"}
    ours = {"fused_adamw"} if params == "float32" else {"fused_adamw", "fused_adamw, rounded by chance"}
    assert measured == ours | {"separate kernels", "torch compiled foreach", "torch fused"}
    assert rows["torch for-loop"]["detail"].startswith("a kernel for each tensor takes Inductor minutes")


def test_what_needs_a_cpp_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    lacking = "torch.compile needs a C++ compiler, and no-such-compiler was not found"
    eager = {entry.name: entry.blocked for entry in contenders.entries(Case(CPU, (1,)), [])}
    assert [name for name, reason in eager.items() if reason == lacking] == ["torch compiled foreach"]
    compiled = {
        entry.name: entry.blocked for entry in contenders.entries(Case(CPU, (1,), mode="compile"), [])
    }
    assert [name for name, reason in compiled.items() if reason is None] == ["separate kernels"]


def test_refusals(tmp_path: Path) -> None:
    result = run("--model", "gpt2", "--elements", 3, expect=2)
    assert result.stderr.strip() == (
        "fused-adamw bench: --elements takes the place of --model; give one of them"
    )
    file = tmp_path / "file"
    file.touch()
    assert "cannot write" in run("--mode", "graph", "--output", file / "folder", expect=2).stderr


def test_ctrl_c_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "measure", interrupted)
    result = run("--elements", 10, "--output", tmp_path / "new", expect=130)
    assert "interrupted; nothing was written" in result.stderr
    assert not (tmp_path / "new").exists()


def test_exit_codes() -> None:
    def code(ours: str, theirs: str) -> int:
        return bench.exit_code(Measured([Row("fused_adamw", ours), Row("torch fused", theirs)], 1.0))

    assert code("measured", "measured") == code("measured", "blocked") == code("measured", "failed") == 0
    assert code("void", "measured") == code("measured", "void") == code("failed", "measured") == 1
    assert code("blocked", "blocked") == code("blocked", "measured") == 2


def test_the_order_turns_each_round() -> None:
    assert timing.in_turns(["a", "b"], 3) == [["a", "b"], ["b", "a"], ["a", "b"]]
    taken = timing.Timing.of([3.0, 1.0, 2.0])
    assert (taken.median, taken.least, taken.most, taken.calls) == (2.0, 1.0, 3.0, 3)


def test_why_contenders_are_left_out() -> None:
    rows = [
        {"name": "a", "outcome": "measured", "detail": ""},
        {"name": "b", "outcome": "blocked", "detail": "no card"},
        {"name": "c", "outcome": "void", "detail": "wrong"},
        {"name": "d", "outcome": "blocked", "detail": "no card"},
    ]
    assert_expected_inline(
        "\n".join(bench_report.left_out({"contenders": rows})),
        """\
b; d: blocked: no card
c: void: wrong""",
    )


@pytest.mark.parametrize("columns", [None, "80"], ids=["where a pipe has no width", "in a narrow terminal"])
def test_figures_are_not_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    name = "fused_adamw, nvrtc, rounded by chance"
    row = {
        "name": name,
        "outcome": "measured",
        "timing": {"median": 53220.1e-6, "least": 48770.2e-6, "most": 106200.3e-6},
        "bytes_per_parameter": 278300.4,
        "peak_bytes": 6718 * 2**20,
        "kernels": 5622,
    }
    work = {"name": "x", "dtype": "y", "gradients": "z", "mode": "graph", "amsgrad": True, "clip": True}
    found = {
        "work": work,
        "device": "a card",
        "memory_bytes_per_second": 4.29e12,
        "ideal_bytes_per_parameter": 32,
        "contenders": [row],
    }
    terminal.console().print(bench_report.table(found))
    shown = capsys.readouterr().out
    for figure in ("53,220.1", "48,770.2", "106,200.3", "278,300.4", "6,718.0", "5622"):
        assert f" {figure} " in shown
    assert (name in shown) == (columns is None)
    assert "…" not in shown


def test_the_models() -> None:
    counts = {name: (len(shapes().sizes), shapes().elements) for name, shapes in models.MODELS.items()}
    assert counts == {
        "gpt2": (148, 124_439_808),
        "llama-1b": (146, 1_235_814_400),
        "resnet50": (161, 25_557_032),
        "small": (400, 820_800),
    }
    assert {choice.value for choice in bench.ModelChoice} == set(models.MODELS)
