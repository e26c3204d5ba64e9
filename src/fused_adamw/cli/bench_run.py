"""What ``fused-adamw bench`` measures: every contender in turns, its results compared after each batch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fused_adamw
from fused_adamw.cli import timing
from fused_adamw.cli.contenders import (
    BETAS,
    EPS,
    LR,
    WEIGHT_DECAY,
    Case,
    Contender,
    Entry,
    Storage,
    captured,
    entries,
    staged,
)
from fused_adamw.cli.suites.formula import Formula
from fused_adamw.cli.suites.training import using
from fused_adamw.cli.timing import Timing

MEASURED, VOID, BLOCKED, FAILED = "measured", "void", "blocked", "failed"

# Elements of the tensors that the ceiling of memory is measured on: far beyond any cache.
CEILING_ELEMENTS = {"cpu": 1 << 26, "cuda": 1 << 29}

# Rounds and calls for few elements and for many.
SMALL_ELEMENTS = 10_000_000
SMALL_ROUNDS, SMALL_CALLS = 10, 10
LARGE_ROUNDS, LARGE_CALLS = 5, 4

# How far results may be apart (relatively, absolutely): rounding stays far below, a step left out far above.
# That a parameter of 16 bits is the other neighbour of its master weight is no error.
TOLERANCES = {"master": (1e-5, 1e-5), "param": (1e-5, 1e-5), "exp_avg": (1e-4, 1e-6)}
TOLERANCES |= dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq"), TOLERANCES["exp_avg"])
# Of each tensor, so many elements at both ends are computed in float64.
SAMPLE = 16


@dataclass
class Row:
    """What came of a contender. ``detail`` says why there is no timing where there is none."""

    name: str
    outcome: str
    detail: str = ""
    timing: Timing | None = None
    bytes_per_parameter: float | None = None
    peak_bytes: int | None = None
    kernels: int | None = None


@dataclass(frozen=True)
class Measured:
    """All contenders, and the rate of memory in the same run (None where nothing was measured)."""

    rows: list[Row]
    rate: float | None


class Racer:
    """A contender in its mode, with its times."""

    def __init__(self, contender: Contender, case: Case) -> None:
        self.contender, self.case = contender, case
        self.call = contender.call
        self.row = Row(contender.name, MEASURED)
        self.seconds: list[float] = []
        self._measure = timing.device_seconds_of if case.mode == "graph" else timing.seconds_of

    def warm_up(self) -> None:
        """Compiles, loads and captures what there is to; finds memory and kernels."""
        device = self.case.device
        with using(self.contender.compiler):
            if self.case.mode == "graph":
                graphs: list[Callable[[], object]] = []
                self.row.peak_bytes = timing.peak_of(
                    lambda: graphs.append(captured(self.contender, device)), device
                )
                [self.call] = graphs
            for _ in range(2):
                self.call()
            if self.case.mode != "graph":
                self.row.peak_bytes = timing.peak_of(self.call, device)
            self.row.kernels = timing.kernels_of(self.call, device)

    def batch(self, storage: Storage, calls: int) -> None:
        """From the initial state on; the first call, which finds other data in the caches, is not timed."""
        storage.reset()
        self.contender.reset()
        with using(self.contender.compiler):
            self.call()
            self.seconds += [self._measure(self.call, self.case.device) for _ in range(calls)]
        timing.synchronize(self.case.device)


def blocked(case: Case, compilers: Sequence[str], reason: str) -> Measured:
    """No contender can run."""
    return Measured(
        [Row(entry.name, BLOCKED, entry.blocked or reason) for entry in entries(case, compilers)], None
    )


def measure(
    case: Case,
    compilers: Sequence[str],
    note: Callable[[str], object] = lambda text: None,
    be_quiet: Callable[[], object] = lambda: None,
) -> Measured:
    """Times all contenders that can run; tells of the warm-up, then calls ``be_quiet`` and is so itself."""
    small = case.elements < SMALL_ELEMENTS
    rounds, calls = (SMALL_ROUNDS, SMALL_CALLS) if small else (LARGE_ROUNDS, LARGE_CALLS)
    note("the rate of memory")
    rates = [_memory_rate(case.device)]
    _free(case.device)
    storage = Storage(case)
    note("the reference")
    expected = _expected(storage, 1 + calls)
    rows: list[Row] = []
    racers: dict[str, Racer] = {}
    for entry in entries(case, compilers):
        note(f"warm-up of {entry.name}")
        row, racer = _prepared(entry, storage)
        rows.append(row)
        if racer is not None:
            racers[entry.name] = racer
    be_quiet()
    for turn, names in enumerate(timing.in_turns(list(racers), rounds)):
        for name in names:
            racer = racers[name]
            if racer.row.outcome != MEASURED:
                continue
            try:
                racer.batch(storage, calls)
            except Exception as error:
                racer.row.outcome, racer.row.detail = _went_wrong(error)
                continue
            if wrong := difference(_results(storage, racer.contender), expected):
                racer.row.outcome, racer.row.detail = VOID, f"wrong result in round {turn + 1}: {wrong}"
    del expected
    _free(case.device)
    # The better of two: either alone may have been taken in a slow moment.
    rates.append(_memory_rate(case.device))
    for racer in racers.values():
        if racer.row.outcome == MEASURED:
            racer.row.timing = Timing.of(racer.seconds)
            racer.row.bytes_per_parameter = racer.row.timing.median / case.elements * max(rates)
    return Measured(rows, max(rates))


def _prepared(entry: Entry, storage: Storage) -> tuple[Row, Racer | None]:
    if entry.blocked is not None:
        return Row(entry.name, BLOCKED, entry.blocked), None
    storage.reset()
    try:
        racer = Racer(entry.make(storage), storage.case)
        racer.warm_up()
    except Exception as error:
        return Row(entry.name, *_went_wrong(error)), None
    return racer.row, racer


def _went_wrong(error: Exception) -> tuple[str, str]:
    """The outcome of what cannot run, and the reason; errors are of torch, of compilers, of a driver."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else "no more is known"
    if isinstance(error, (torch.OutOfMemoryError, fused_adamw.CompilerError)):
        return BLOCKED, reason
    return FAILED, f"{type(error).__name__}: {reason}"


def _memory_rate(device: torch.device) -> float:
    elements = CEILING_ELEMENTS[device.type]
    if device.type == "cuda":
        # Two tensors of float32, in half of what is free.
        elements = min(elements, torch.cuda.mem_get_info(device)[0] // 16)
    return timing.memory_rate(device, elements)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _results(storage: Storage, contender: Contender) -> dict[str, list[Tensor]]:
    masters = {"master": contender.weights()} if storage.masters else {}
    return {**masters, "param": storage.params, **storage.moments}


def _expected(storage: Storage, steps: int) -> dict[str, list[Tensor]]:
    """What a batch must come to: of separate kernels, whose ends are compared with the float64 formula.

    Raises:
        RuntimeError: They differ.
    """
    case = storage.case
    storage.reset()
    ends = [_ends(weight) for weight in storage.weights]
    options: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    formulas = [Formula(end.double().numpy(), **options, amsgrad=case.amsgrad) for end in ends]
    reference = staged(storage)
    reference.reset()
    for _ in range(steps):
        reference.call()
    for formula, grad in zip(formulas, storage.grads, strict=True):
        values = _ends(grad).double().numpy()
        for _ in range(steps):
            formula.update(values)
    results = _results(storage, reference)
    exact = {
        name: [
            torch.from_numpy(getattr(formula, "param" if name == "master" else name)).float()
            for formula in formulas
        ]
        for name in results
    }
    found = {name: [_ends(tensor) for tensor in tensors] for name, tensors in results.items()}
    if wrong := difference(found, exact):
        raise RuntimeError(f"the separate kernels differ from the float64 formula: {wrong}")
    return {name: [tensor.clone() for tensor in tensors] for name, tensors in results.items()}


def _ends(tensor: Tensor) -> Tensor:
    return torch.cat([tensor[:SAMPLE], tensor[-SAMPLE:]]).cpu()


def difference(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> str:
    """Where results are too far apart, in a few words; empty where they are not."""
    for name, tensors in expected.items():
        relative, absolute = TOLERANCES[name]
        # NaN is not near anything.
        wrong = [
            ~(
                (mine.float() - other.float()).abs_()
                <= other.float().abs().mul_(max(relative, _rounding(mine))).add_(absolute)
            ).all()
            for mine, other in zip(found[name], tensors, strict=True)
        ]
        bad = torch.stack(wrong).nonzero().flatten().tolist()
        if bad:
            distance = (found[name][bad[0]].float() - tensors[bad[0]].float()).abs().max().item()
            return f"{name} of tensor {bad[0]} is up to {distance:.3g} off"
    return ""


def _rounding(tensor: Tensor) -> float:
    """How far neighbours of 16 bits are apart, relatively."""
    return 0.0 if tensor.dtype == torch.float32 else torch.finfo(tensor.dtype).eps
