"""The process that makes the checks of one suite and tells of each in a line of JSON.

``runner.py`` starts it, so that a check that hangs or crashes ends this process and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence

from fused_adamw.cli.suites import SUITES
from fused_adamw.cli.suites.check import BlockedError, Check, FailedError


def outcome_of(check: Check) -> tuple[str, str]:
    """The outcome of a check, and what was seen, found wrong or missing."""
    try:
        missing = check.missing()
        if missing is not None:
            return "blocked", missing
        return "passed", check.run()
    except BlockedError as error:
        return "blocked", str(error)
    except FailedError as error:
        return "failed", str(error)
    except Exception as error:  # whatever a check raises, it did not pass
        return "failed", f"{type(error).__name__}: {error}"


def run(checks: Sequence[Check], first: int, tell: Callable[[dict[str, object]], None]) -> None:
    """Makes the checks from number ``first`` on."""
    for i, check in enumerate(checks[first:], start=first):
        tell({"check": i, "outcome": "started"})
        start = time.perf_counter()
        outcome, detail = outcome_of(check)
        tell({"check": i, "outcome": outcome, "detail": detail, "seconds": time.perf_counter() - start})


def main(arguments: Sequence[str]) -> None:
    """Arguments: the suite, the number of the first check, then the CUDA compilers."""
    suite, first, *compilers = arguments
    # What checks, compilers and libraries print must not get in between.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(event: dict[str, object]) -> None:
        print(json.dumps(event), file=events, flush=True)

    run(SUITES[suite].checks(compilers), int(first), tell)


if __name__ == "__main__":
    main(sys.argv[1:])
