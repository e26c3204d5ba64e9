"""How contenders are timed: in alternating order within one run; and the ceiling that memory sets."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds per call."""

    median: float
    least: float
    most: float
    calls: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """The figures of many calls."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def synchronize(device: torch.device) -> None:
    """Waits for all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Call, device: torch.device) -> float:
    """What the host waits for a call, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


# How long a device is kept busy before what it is timed for: a tenth of a millisecond, more than a host needs
# to launch a graph.
_BUSY_CYCLES = 200_000


def device_seconds_of(call: Call, device: torch.device) -> float:
    """What a CUDA device takes for a call, by its own clock.

    It is busy when the call is launched, as in a training step: an idle device would wait for the host
    between the start of the clock and the first kernel.
    """
    synchronize(device)
    torch.cuda._sleep(_BUSY_CYCLES)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds * 1e-3


def in_turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """The order of the contenders in each round: forwards, then backwards, and so on."""
    return [list(names) if turn % 2 == 0 else list(reversed(names)) for turn in range(rounds)]


def memory_rate(device: torch.device, elements: int) -> float:
    """Bytes per second of what reads and writes memory as a step does.

    On CUDA a copy. On the CPU a product in place: a copy would also read the lines that it overwrites.
    """
    tensor = torch.ones(elements, device=device)
    call: Call
    if device.type == "cuda":
        target = torch.empty_like(tensor)
        call, measure = (lambda: target.copy_(tensor)), device_seconds_of
    else:
        call, measure = (lambda: tensor.mul_(1.0)), seconds_of
    call()
    return 2 * tensor.nbytes / statistics.median(measure(call, device) for _ in range(15))


def kernels_of(call: Call, device: torch.device) -> int | None:
    """How many kernels a call launches, as torch.profiler sees them; None on the CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        call()
        synchronize(device)
    with tempfile.TemporaryDirectory(prefix="fused-adamw-") as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[dict[str, object]] = json.loads(path.read_text())["traceEvents"]
    # By category: marks of the profiler lie on the device's time line too.
    return sum(event.get("cat") == "kernel" for event in events)


def peak_of(call: Call, device: torch.device) -> int | None:
    """The bytes that a call takes besides those that are taken already; None on the CPU."""
    if device.type != "cuda":
        call()
        return None
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
