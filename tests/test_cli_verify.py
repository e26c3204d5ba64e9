"""``fused-adamw verify``: outcomes, exit codes, the report, and what hangs, crashes or is interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from typer.testing import CliRunner, Result

import fused_adamw
from fused_adamw import cuda_kernels
from fused_adamw.cli import runner, verify
from fused_adamw.cli.app import app
from fused_adamw.cli.suites import SUITES, build, check, cuda, graph, host, oracle, reference, worker
from fused_adamw.cli.suites.check import BlockedError, Check, FailedError, Suite
from fused_adamw.cli.suites.training import FORMS, MASTER_FORMS


def run(*arguments: object, expect: int = 0) -> Result:
    result = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    assert result.exit_code == expect, (result.output, result.exception)
    return result


def report(folder: Path) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads((folder / "verify.json").read_text(), parse_constant=refuse)


def outcomes(suite: Suite, compilers: Sequence[str] = ("nvrtc", "ptx")) -> dict[str, tuple[str, str]]:
    """Those of the checks, made in this process."""
    return {own.name: worker.outcome_of(own) for own in suite.checks(compilers)}


# A worker of three checks of the suite "three", of which one may do what a real one should not.
WORKER = """
import json, os, signal, sys, time
def tell(**event): print(json.dumps(event), flush=True)
for i in range(int(sys.argv[1]), 3):
    tell(check=i, outcome="started")
    if i == 1:
        {misbehaviour}
    tell(check=i, outcome="passed", detail="", seconds=0.5)
"""


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets ``--suite oracle`` run ``WORKER``; the argument is what its second check does."""

    def install(misbehaviour: str) -> None:
        suite = Suite("oracle", "It proves.", "It leaves open.", lambda _: [Check(n, str) for n in "abc"])
        monkeypatch.setitem(SUITES, "oracle", suite)

        def command(name: str, first: int, compilers: Sequence[str]) -> list[str]:
            return [sys.executable, "-c", WORKER.format(misbehaviour=misbehaviour), str(first)]

        monkeypatch.setattr(runner, "worker_command", command)

    return install


# --- the command --------------------------------------------------------------------------------------------


def test_a_suite_that_passes(tmp_path: Path) -> None:
    """Through the real worker."""
    output = run("--suite", "oracle", "--report", tmp_path).output
    assert "7 passed" in output
    found = report(tmp_path)
    assert found["outcome"] == "passed"
    [suite] = found["suites"]
    assert (suite["name"], suite["outcome"]) == ("oracle", "passed")
    assert [own["name"] for own in suite["checks"]] == [own.name for own in SUITES["oracle"].checks(())]
    assert {own["outcome"] for own in suite["checks"]} == {"passed"}
    assert all(own["seconds"] > 0.0 and own["detail"] for own in suite["checks"])
    assert suite["commands"] == [runner.worker_command("oracle", 0, ["nvrtc", "ptx"])]
    assert found["command"][0] == "fused-adamw"
    assert found["machine"]["versions"]["torch"] == torch.__version__
    assert "driver" in found["machine"]["cuda"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["started"])
    assert found["sources"] == verify.sources()


def test_sources_are_all_that_is_installed() -> None:
    sources = verify.sources()
    expected = {"csrc/adamw_update.h", "csrc/cuda/adamw_step.cu", "torch_library/checks.py", "optimizer.py"}
    assert expected | {"cli/suites/reference.cpp", "triton_kernels/formula.py"} <= sources.keys()
    assert any(name.startswith("_C.") for name in sources)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in sources.values())


def test_a_suite_without_a_card_is_blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    output = run("--suite", "cuda", "--compiler", "nvrtc", "--report", tmp_path, expect=2).output
    assert f"{len(cuda.checks(['nvrtc']))} checks" in output
    found = report(tmp_path)
    assert found["outcome"] == found["suites"][0]["outcome"] == "blocked"
    assert {own["outcome"] for own in found["suites"][0]["checks"]} == {"blocked"}
    assert all(own["detail"].startswith("no CUDA device: ") for own in found["suites"][0]["checks"])


def test_a_dry_run_makes_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_suite", lambda *_: pytest.fail("it ran"))
    output = run("--suite", "build", "--compiler", "nvrtc", "--report", tmp_path / "new", "--dry-run").output
    assert not (tmp_path / "new").exists()
    assert_expected_inline(
        output,
        """\
build: All CUDA kernels compile here for Ampere, Hopper and Blackwell, and keep all in registers.
  Left open: Whether they compute the right thing: nothing runs.
  - nvrtc: sm_80
  - nvrtc: sm_90
  - nvrtc: sm_100
  - nvrtc: sm_120
""",
    )


def test_a_dry_run_of_all_lists_every_suite() -> None:
    output = run("--dry-run").output
    for suite in SUITES.values():
        assert f"{suite.name}: {suite.proves}\n  Left open: {suite.leaves_open}\n" in output


def test_a_failure(tmp_path: Path, three: Any) -> None:
    three("tell(check=1, outcome='failed', detail='2 is not 1', seconds=0.1); continue")
    output = run("--suite", "oracle", "--report", tmp_path, expect=1).output
    assert "2 is not 1" in output
    found = report(tmp_path)
    assert found["outcome"] == "failed"
    assert [own["outcome"] for own in found["suites"][0]["checks"]] == ["passed", "failed", "passed"]


def test_a_failure_counts_more_than_what_is_blocked() -> None:
    passed, failed, blocked, interrupted = "passed", "failed", "blocked", "interrupted"
    assert runner.worst([passed, passed]) == passed
    assert runner.worst([passed, blocked]) == blocked
    assert runner.worst([blocked, failed, passed]) == failed
    assert runner.worst([passed, failed, interrupted]) == interrupted
    assert runner.worst([passed, runner.NOT_RUN]) == interrupted
    assert runner.worst([]) == blocked


def test_a_hanging_check_fails_and_the_others_go_on(tmp_path: Path, three: Any) -> None:
    three("time.sleep(60)")
    run("--suite", "oracle", "--report", tmp_path, "--timeout", 0.5, expect=1)
    checks = report(tmp_path)["suites"][0]["checks"]
    assert [own["outcome"] for own in checks] == ["passed", "failed", "passed"]
    assert checks[1]["detail"] == "did not end within 0.5 seconds"
    assert len(report(tmp_path)["suites"][0]["commands"]) == 2


@pytest.mark.parametrize(
    ("misbehaviour", "detail"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the process ended with SIGSEGV: Fatal Python error: "),
        ("sys.exit('out of luck')", "the process ended with code 1: out of luck"),
        ("os._exit(3)", "the process ended with code 3"),
    ],
)
def test_a_crash_is_a_failure_and_the_others_go_on(
    tmp_path: Path, three: Any, misbehaviour: str, detail: str
) -> None:
    three(misbehaviour)
    run("--suite", "oracle", "--report", tmp_path, expect=1)
    checks = report(tmp_path)["suites"][0]["checks"]
    assert [own["outcome"] for own in checks] == ["passed", "failed", "passed"]
    assert checks[1]["detail"].startswith(detail)


def test_an_interrupted_run_has_not_passed(tmp_path: Path, three: Any) -> None:
    marker = tmp_path / "child"
    three(f"open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(60)")

    def interrupt() -> None:
        while not (marker.exists() and marker.read_text()):
            time.sleep(0.01)
        time.sleep(0.5)  # for what the first check came to, on its way through a pipe
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    output = run("--suite", "oracle", "--report", tmp_path, expect=130).output
    thread.join()
    assert "interrupted; report in" in output
    found = report(tmp_path)
    assert found["outcome"] == found["suites"][0]["outcome"] == "interrupted"
    outcomes_ = [own["outcome"] for own in found["suites"][0]["checks"]]
    assert outcomes_ == ["passed", "interrupted", "not run"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    result = run("--suite", "oracle", "--report", file / "folder", expect=2)
    assert "cannot write to" in result.stderr


# --- checks, in this process --------------------------------------------------------------------------------


def test_outcomes_of_checks() -> None:
    def raising(error: Exception) -> Any:
        def run() -> str:
            raise error

        return run

    assert worker.outcome_of(Check("a", lambda: "seen")) == ("passed", "seen")
    assert worker.outcome_of(Check("a", raising(FailedError("bad")))) == ("failed", "bad")
    assert worker.outcome_of(Check("a", raising(ValueError("bad")))) == ("failed", "ValueError: bad")
    assert worker.outcome_of(Check("a", raising(BlockedError("no x")))) == ("blocked", "no x")
    assert worker.outcome_of(Check("a", raising(ValueError("bad")), lambda: "no y")) == ("blocked", "no y")


def test_bits_that_differ_are_named() -> None:
    one, two = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1.0, -0.0, 2.0])
    check.same_bits(one, one.clone(), "x")
    with pytest.raises(
        FailedError, match=r"x: 1 of 3 elements differ; the one at \(1,\) is 0.0 instead of -0.0"
    ):
        check.same_bits(one, two, "x")
    with pytest.raises(FailedError, match=r"x is torch\.float32 of shape"):
        check.same_bits(one, two.double(), "x")


@pytest.mark.parametrize("suite", [reference, host], ids=["reference", "host"])
def test_suites_of_the_cpu_pass_here(suite: Any) -> None:
    for name, (outcome, detail) in outcomes(suite.SUITE).items():
        if outcome == "blocked":
            pytest.skip(f"blocked: {detail}")
        assert outcome == "passed", (name, detail)


def test_a_wrong_formula_fails_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    formula = oracle.Formula.update
    monkeypatch.setattr(oracle.Formula, "update", lambda self, grad: formula(self, grad * 1.001))
    assert {outcome for outcome, _ in outcomes(oracle.SUITE).values()} == {"failed"}


def test_a_wrong_update_fails_the_host_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(fused_adamw.AdamW):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    param *= 1.0 + 2e-7
            return super().step(*args, **kwargs)

    monkeypatch.setattr(fused_adamw, "AdamW", Wrong)
    found = outcomes(host.SUITE)
    assert found["error: defaults"][0] == found["bits: in place and out of place"][0] == "failed"


def test_a_wrong_rounding_fails_the_host_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(fused_adamw.AdamW):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            super().step(*args, **kwargs)
            for param in self.param_groups[0]["params"]:
                if param.dtype != torch.float32 and param.numel() > 0:
                    param.detach().view(torch.int16).view(-1)[-1] += 2

    monkeypatch.setattr(fused_adamw, "AdamW", Wrong)
    wanted = re.compile("master weights: (?!.*(saved|written to)).*")
    found = [worker.outcome_of(own)[0] for own in host.SUITE.checks(()) if wanted.fullmatch(own.name)]
    assert found == ["failed"] * (2 * 5 + 2)


def test_other_headers_fail_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := reference.missing()) is not None:
        pytest.skip(f"blocked: {reason}")
    changes = {
        "adamw_update.h": ("", ""),
        "update_scalars.h": ("1.0 - options.beta1)", "0.99 - options.beta1)"),
        "gradient_stats.h": ("", ""),
        "low_precision.h": ("0x8000u) >> 16", "0x7FFFu) >> 16"),
        "philox.h": ("round < 10", "round < 7"),
    }
    for name, (old, new) in changes.items():
        text = (cuda_kernels.SOURCES / name).read_text()
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new) if old else text)
    monkeypatch.setattr(cuda_kernels, "SOURCES", tmp_path)
    reference.program.cache_clear()
    found = outcomes(reference.SUITE)
    reference.program.cache_clear()
    assert found["update: defaults"][0] == found["clipped update"][0] == "failed"
    assert "elements differ" in found["update: defaults"][1]
    assert found["statistics"][0] == "passed"
    assert found["rounded weights"][0] == found["random bits"][0] == "failed"
    assert "the parameter of a split weight" in found["rounded weights"][1]
    assert found["update: bfloat16 parameters, rounded by chance"][0] == "failed"


def test_headers_that_do_not_compile_fail_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := reference.missing()) is not None:
        pytest.skip(f"blocked: {reason}")
    monkeypatch.setattr(cuda_kernels, "SOURCES", tmp_path)
    reference.program.cache_clear()
    outcome, detail = worker.outcome_of(reference.SUITE.checks(())[0])
    reference.program.cache_clear()
    assert outcome == "failed"
    assert "gradient_stats.h" in detail


def test_without_a_compiler_the_reference_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    detail = "no C++ compiler: CXX names no-such-compiler, which was not found"
    assert set(outcomes(reference.SUITE).values()) == {("blocked", detail)}
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(reference.shutil, "which", lambda name: None)
    assert "c++, g++ and clang++ were not found" in str(reference.missing())


def test_one_architecture_of_each_compiler_builds() -> None:
    for way, compiler in ((build.through_nvrtc, "nvrtc"), (build.through_triton, "ptx")):
        if build.missing(compiler) is None:
            assert re.fullmatch(r"20 kernels without local memory, up to \d+ registers", way(90))


def test_an_architecture_that_a_compiler_does_not_know_is_blocked() -> None:
    for way, compiler in ((build.through_nvrtc, "nvrtc"), (build.through_triton, "ptx")):
        if build.missing(compiler) is None:
            with pytest.raises(BlockedError, match="sm_999"):
                way(999)


def test_local_memory_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    log = "8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\nUsed 255 registers"
    monkeypatch.setattr(build.nvrtc, "compile_to_cubin", lambda *_: (b"\x7fELF", log))
    with pytest.raises(FailedError, match="kernels use local memory"):
        build.through_nvrtc(90)


def test_the_checks_of_the_cuda_suite_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU in place of CUDA, where they compare a thing with itself."""
    monkeypatch.setattr(cuda, "DEVICE", "cpu")
    for own in cuda.checks(["nvrtc"]):
        assert own.run()


def test_the_cuda_suite_sees_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "DEVICE", "cpu")
    original = cuda.AdamW
    made: list[Any] = []

    def other_every_second_time(params: Any, **options: Any) -> Any:
        made.append(params)
        return original(params, **{**options, "eps": 1e-8 if len(made) % 2 else 1e-6})

    monkeypatch.setattr(cuda, "AdamW", other_every_second_time)
    names = {f"nvrtc: {name}: {what}" for name in FORMS for what in ("trainings, float32 gradients", "tails")}
    names |= {f"nvrtc: {name}: written to" for name in MASTER_FORMS} | {"nvrtc: many tensors and groups"}
    assert names <= {own.name for own in cuda.checks(["nvrtc"])}
    for own in cuda.checks(["nvrtc"]):
        if own.name in names:
            with pytest.raises(FailedError, match="elements differ"):
                own.run()


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("name", ["clipped", *MASTER_FORMS, "bfloat16, clipped"])
def test_a_compiled_step_on_the_cpu(name: str) -> None:
    if (reason := graph.missing_cpp_compiler()) is not None:
        pytest.skip(f"blocked: {reason}")
    assert graph.compiled("cpu", "", graph.OPTIONS[name]) == "12 steps, one graph"


def test_without_a_compiler_or_a_card_the_graph_suite_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = outcomes(graph.SUITE)
    assert {outcome for outcome, _ in found.values()} == {"blocked"}
    assert "no-such-compiler was not found" in found["cpu: compiled, plain"][1]
    assert found["ptx: CUDA graph, clipped"][1].startswith("no CUDA device: ")


def test_the_worker_tells_of_each_check(capfd: pytest.CaptureFixture[str]) -> None:
    events: list[dict[str, object]] = []
    checks = [Check("a", lambda: "one"), Check("b", lambda: "two")]
    worker.run(checks, 1, events.append)
    assert [(event["check"], event["outcome"]) for event in events] == [(1, "started"), (1, "passed")]
    assert events[1]["detail"] == "two"
