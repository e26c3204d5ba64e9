"""Runs a suite in processes of its own: a check that hangs or crashes is a failure, not the end."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from fused_adamw.cli.suites.check import Suite

PASSED, FAILED, BLOCKED, INTERRUPTED = "passed", "failed", "blocked", "interrupted"
NOT_RUN = "not run"

# What a process may take to come to its first check, besides the time of a check.
STARTUP_SECONDS = 120.0
POLL_SECONDS = 0.1


@dataclass
class CheckResult:
    """What came of a check; ``detail`` says what was seen, found wrong or missing."""

    name: str
    outcome: str = NOT_RUN
    detail: str = ""
    seconds: float = 0.0


@dataclass
class SuiteResult:
    """What came of a suite; ``commands`` are those of the processes that it took."""

    suite: Suite
    checks: list[CheckResult]
    commands: list[list[str]] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """The worst outcome of its checks."""
        return worst([check.outcome for check in self.checks])

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "name": self.suite.name,
            "proves": self.suite.proves,
            "leaves_open": self.suite.leaves_open,
            "outcome": self.outcome,
            "seconds": sum(check.seconds for check in self.checks),
            "commands": self.commands,
            "checks": [asdict(check) for check in self.checks],
        }


def worst(outcomes: Sequence[str]) -> str:
    """What outcomes come to together: passed only where all passed, and there are any."""
    for outcome in (INTERRUPTED, FAILED, NOT_RUN, BLOCKED):
        if outcome in outcomes:
            return INTERRUPTED if outcome == NOT_RUN else outcome
    return PASSED if outcomes else BLOCKED


def planned(suite: Suite, compilers: Sequence[str]) -> SuiteResult:
    """A suite of which nothing was run yet."""
    return SuiteResult(suite, [CheckResult(check.name) for check in suite.checks(compilers)])


def worker_command(suite: str, first: int, compilers: Sequence[str]) -> list[str]:
    """What makes the checks of a suite from number ``first`` on."""
    return [sys.executable, "-m", "fused_adamw.cli.suites.worker", suite, str(first), *compilers]


def run_suite(
    result: SuiteResult,
    compilers: Sequence[str],
    timeout: float,
    interrupted: Sequence[int],
    note: Callable[[CheckResult], None] = lambda check: None,
) -> None:
    """Makes all checks of a suite, or those before there is an entry in ``interrupted``.

    Args:
        result: What ``planned`` returned; filled in.
        compilers: The CUDA compilers.
        timeout: The seconds that a check may take.
        interrupted: Where Ctrl-C leaves an entry.
        note: Called with each check that is done.
    """
    done = 0
    while done < len(result.checks) and not interrupted:
        command = worker_command(result.suite.name, done, compilers)
        result.commands.append(command)
        done = _run_from(result.checks, done, command, timeout, interrupted, note)


def _run_from(
    checks: list[CheckResult],
    first: int,
    command: list[str],
    timeout: float,
    interrupted: Sequence[int],
    note: Callable[[CheckResult], None],
) -> int:
    """Reads what one process tells until it ends; returns the number of the next check."""
    at = first
    start = time.perf_counter()
    limit = timeout + STARTUP_SECONDS
    with tempfile.TemporaryFile() as errors, _process(command, errors) as process:
        lines = _lines(process)
        while at < len(checks):
            check = checks[at]
            if interrupted:
                check.outcome, check.detail = INTERRUPTED, "ended by Ctrl-C"
            elif time.perf_counter() - start > limit:
                check.outcome, check.detail = FAILED, f"did not end within {limit:g} seconds"
            else:
                line = next(lines)
                if line == "":
                    continue
                if line is not None:
                    event = json.loads(line)
                    if event["outcome"] == "started":
                        start, limit = time.perf_counter(), timeout
                        continue
                    check.outcome, check.detail = event["outcome"], event["detail"]
                    check.seconds = event["seconds"]
                    note(check)
                    at += 1
                    start, limit = time.perf_counter(), timeout
                    continue
                check.outcome, check.detail = FAILED, _end_of(process, errors)
            check.seconds = time.perf_counter() - start
            note(check)
            return at + 1
    return at


@contextlib.contextmanager
def _process(command: list[str], errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which a terminal's Ctrl-C does not reach; ended at the end."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and the compilers that it started
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10.0)  # a driver may hold it longer
        if process.stdout is not None:
            process.stdout.close()


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str | None]:
    """The lines that a process prints; "" where there is none yet, None where there will be no more."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            line, separator, rest = buffer.partition(b"\n")
            if separator:
                buffer = rest
                yield line.decode()
            elif not selector.select(POLL_SECONDS):
                yield ""
            elif data := os.read(descriptor, 1 << 16):
                buffer += data
            else:
                yield None


def _end_of(process: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    """How a process ended that should not have, and the last that it said."""
    try:
        code = process.wait(timeout=10.0)
    except subprocess.TimeoutExpired:
        return "the process closed its output and did not end"
    how = f"code {code}" if code >= 0 else signal.Signals(-code).name
    errors.seek(0)
    said = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    fatal = [line for line in said if line.startswith("Fatal")]
    last = (fatal or said)[-1:]
    return f"the process ended with {how}" + (f": {last[0]}" if last else "")
