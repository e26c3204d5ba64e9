"""How the benchmarks time: contenders in alternating order within one run, medians, and the copy ceiling."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

import fused_adamw
from fused_adamw.cli.timing import in_turns

Call = Callable[[], object]
Measure = Callable[[Call], float]


@dataclass(frozen=True)
class Timing:
    """Seconds per call."""

    median: float
    least: float
    most: float


def alternate(contenders: dict[str, Call], *, rounds: int, calls: int) -> dict[str, Timing]:
    """Times each contender ``calls`` times in a row, round after round, in an order that turns each round.

    The first call of each row is not counted: it finds another contender's data in the caches.
    """
    for call in contenders.values():
        call()
    seconds = samples(contenders, _seconds, rounds=rounds, calls=calls)
    return {name: Timing(statistics.median(s), min(s), max(s)) for name, s in seconds.items()}


def samples(
    contenders: dict[str, Call], measure: Measure, *, rounds: int, calls: int
) -> dict[str, list[float]]:
    """What ``measure`` finds for the calls that ``alternate`` counts."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for names in in_turns(list(contenders), rounds):
        for name in names:
            contenders[name]()
            found[name] += [measure(contenders[name]) for _ in range(calls)]
    return found


def medians(contenders: dict[str, Call], measure: Measure, *, rounds: int, calls: int) -> dict[str, float]:
    """The median of each contender's samples."""
    found = samples(contenders, measure, rounds=rounds, calls=calls)
    return {name: statistics.median(values) for name, values in found.items()}


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def memory_bytes_per_second(elements: int = 1 << 26) -> float:
    """The ceiling of what moves data in place: bytes read plus bytes written by ``tensor.mul_``.

    In place, as the step is: a copy to other storage would also read the lines that it overwrites.
    """
    tensor = torch.randn(elements)
    timing = alternate({"scale": lambda: tensor.mul_(1.0)}, rounds=3, calls=5)["scale"]
    return 2 * tensor.nbytes / timing.median


def conditions() -> dict[str, object]:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "date": date.today().isoformat(),
        "processor": next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown"),
        "threads": torch.get_num_threads(),
        "instruction_set": fused_adamw.cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fused_adamw": fused_adamw.__version__,
    }


def write_json(path: Path, contents: dict[str, object]) -> None:
    """Writes figures with their conditions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents, indent=2) + "\n")
