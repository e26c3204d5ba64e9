"""``fused-adamw verify``: what it runs, reports and ends with; a check that hangs or crashes is a failure."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import fused_adamw
from fused_adamw.cli import runner
from fused_adamw.cli.app import app
from fused_adamw.cli.suites import SUITES, worker
from fused_adamw.cli.suites.check import BlockedError, Check, FailedError, Suite


def run(*arguments: object, expect: int) -> Result:
    result = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    assert result.exit_code == expect, (result.output, result.exception)
    return result


def test_a_suite_that_passes(tmp_path: Path) -> None:
    result = run("--suite", "oracle", "--report", tmp_path, expect=0)
    assert result.output.rstrip().endswith(f"passed; report in {tmp_path / 'verify.json'}")
    found = json.loads((tmp_path / "verify.json").read_text())
    assert found["outcome"] == "passed"
    assert found["machine"]["versions"]["torch"] == torch.__version__
    [suite] = found["suites"]
    assert (suite["name"], suite["proves"]) == ("oracle", SUITES["oracle"].proves)
    assert {check["outcome"] for check in suite["checks"]} == {"passed"}
    assert [check["name"] for check in suite["checks"]] == [
        check.name for check in SUITES["oracle"].checks(())
    ]
    own = Path(fused_adamw.__file__).read_bytes()
    assert found["sources"]["__init__.py"] == hashlib.sha256(own).hexdigest()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_what_a_machine_lacks_is_blocked_and_not_passed(tmp_path: Path) -> None:
    result = run("--suite", "cuda", "--compiler", "nvrtc", "--report", tmp_path, expect=2)
    assert "no CUDA device" in result.output
    [suite] = json.loads((tmp_path / "verify.json").read_text())["suites"]
    assert {check["outcome"] for check in suite["checks"]} == {"blocked"}


def test_a_dry_run_lists_all_and_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    output = run("--dry-run", "--report", folder, expect=0).output
    for suite in SUITES.values():
        assert f"{suite.name}: {suite.proves}\n" in output
        for check in suite.checks(("nvrtc", "ptx")):
            assert f"  - {check.name}\n" in output
    assert not folder.exists()


def test_a_report_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    result = run("--suite", "oracle", "--report", file, expect=2)
    assert result.stderr == f"fused-adamw verify: cannot write to {file}: File exists\n"


# --- Outcomes.


def raising(error: Exception) -> Any:
    def check() -> str:
        raise error

    return check


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (Check("a", lambda: "seen"), ("passed", "seen")),
        (Check("a", lambda: "seen", lambda: "no card"), ("blocked", "no card")),
        (Check("a", raising(BlockedError("no compiler"))), ("blocked", "no compiler")),
        (Check("a", raising(FailedError("2 instead of 1"))), ("failed", "2 instead of 1")),
        (Check("a", raising(KeyError("b"))), ("failed", "KeyError: 'b'")),
    ],
    ids=["passed", "lacks something", "blocked", "failed", "raised"],
)
def test_the_outcome_of_a_check(check: Check, expected: tuple[str, str]) -> None:
    assert worker.outcome_of(check) == expected


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["passed", "passed"], "passed"),
        (["passed", "blocked"], "blocked"),
        (["blocked", "failed", "passed"], "failed"),
        (["passed", "interrupted", "failed"], "interrupted"),
        (["passed", "not run"], "interrupted"),
        ([], "blocked"),
    ],
)
def test_only_all_passed_is_passed(outcomes: list[str], expected: str) -> None:
    assert runner.worst(outcomes) == expected


# --- Processes: what a worker does is written out as a program.


def checks_of(program: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[runner.CheckResult]:
    """The results of three checks whose worker is this program; ``first`` is the number of its first."""
    suite = Suite("a", "b", "c", lambda compilers: [Check(name, str) for name in ("x", "y", "z")])

    def command(name: str, first: int, compilers: Any) -> list[str]:
        tell = (
            "import json, os, sys, time\n"
            "def tell(outcome, detail=''):\n"
            "    print(json.dumps({'outcome': outcome, 'detail': detail, 'seconds': 0.5}), flush=True)\n"
            f"first = {first}\n"
        )
        return [sys.executable, "-c", tell + program]

    monkeypatch.setattr(runner, "worker_command", command)
    result = runner.planned(suite, ())
    runner.run_suite(result, (), options.pop("timeout", 60.0), options.pop("interrupted", []), **options)
    return result.checks


def test_a_worker_tells_of_each_check(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "for word in ('passed', 'failed', 'blocked'): tell('started'); tell(word, word + '!')"
    checks = checks_of(program, monkeypatch)
    assert [(check.outcome, check.detail) for check in checks] == [
        ("passed", "passed!"),
        ("failed", "failed!"),
        ("blocked", "blocked!"),
    ]
    assert [check.seconds for check in checks] == [0.5] * 3


def test_after_a_crash_the_other_checks_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "for i in range(first, 3):\n  tell('started')\n  if i == 1: os.abort()\n  tell('passed')"
    checks = checks_of(program, monkeypatch)
    assert [check.outcome for check in checks] == ["passed", "failed", "passed"]
    assert "SIGABRT" in checks[1].detail


def test_after_a_hang_the_other_checks_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "for i in range(first, 3):\n  tell('started')\n  if i == 1: time.sleep(600)\n  tell('passed')"
    checks = checks_of(program, monkeypatch, timeout=1.0)
    assert [check.outcome for check in checks] == ["passed", "failed", "passed"]
    assert checks[1].detail == "did not end within 1 seconds"


def test_a_worker_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = checks_of("sys.exit('no such thing')", monkeypatch)
    assert {check.outcome for check in checks} == {"failed"}
    assert checks[0].detail == "the process ended with code 1: no such thing"


def test_an_interrupt_leaves_nothing_passed_that_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted: list[int] = []
    program = "tell('started'); tell('passed'); tell('started'); time.sleep(600)"
    checks = checks_of(
        program, monkeypatch, interrupted=interrupted, note=lambda check: interrupted.append(1)
    )
    assert [check.outcome for check in checks] == ["passed", "interrupted", "not run"]
    assert runner.worst([check.outcome for check in checks]) == "interrupted"
