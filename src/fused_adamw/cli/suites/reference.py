"""The C++ headers in a program without torch, compiled by the user's compiler, beside the CPU kernels."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fused_adamw
from fused_adamw import _C, cuda_kernels
from fused_adamw.cli.suites import roundings
from fused_adamw.cli.suites.check import BlockedError, Check, FailedError, Suite, require, same_bits
from fused_adamw.cli.suites.training import wide_values
from fused_adamw.options import DEFAULT_GUARD
from fused_adamw.rounding import tensor_seed
from fused_adamw.torch_library.checks import ROUNDED_DTYPES

PROGRAM = Path(__file__).with_name("reference.cpp")

# Contraction off, as the headers ask for; little else, so that the compiler has no part in the bits.
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off")

SIZE = 20_011

UPDATES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no decay": {"weight_decay": 0.0},
    "strong decay": {"weight_decay": 0.5, "lr": 0.1},
    "maximize": {"maximize": True},
    "other betas": {"betas": (0.5, 0.95), "eps": 1e-5},
    "no memory": {"betas": (0.0, 0.0)},
}
COUNTS = (0, 1, 9, 1000, 16_777_216)


def compiler() -> list[str]:
    """The command of a C++ compiler: ``CXX``, else the first that is there.

    Raises:
        BlockedError: There is none.
    """
    if named := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(named[0]) is None:
            raise BlockedError(f"no C++ compiler: CXX names {named[0]}, which was not found")
        return named
    for name in ("c++", "g++", "clang++"):
        if (path := shutil.which(name)) is not None:
            return [path]
    raise BlockedError("no C++ compiler: c++, g++ and clang++ were not found, and CXX names none")


def missing() -> str | None:
    """Why the program cannot be compiled."""
    try:
        compiler()
    except BlockedError as error:
        return str(error)
    return None


@functools.cache
def program() -> Path:
    """The compiled program, which lives as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="fused-adamw-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = folder / "reference"
    command = [*compiler(), *FLAGS, f"-I{cuda_kernels.SOURCES}", str(PROGRAM), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FailedError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return target


def call(what: str, numbers: Sequence[float], counts: Sequence[int], arrays: Sequence[Tensor]) -> bytes:
    """The output of the program for this input."""
    given = np.array(numbers, dtype=np.float64).tobytes() + np.array(counts, dtype=np.int64).tobytes()
    given += b"".join(array.numpy().tobytes() for array in arrays)
    done = subprocess.run([program(), what], input=given, capture_output=True, check=False)
    if done.returncode != 0:
        raise FailedError(f"the program ended with {done.returncode}: {done.stderr.decode().strip()}")
    return done.stdout


def _floats(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.float32).copy())


def updates(options: dict[str, Any], amsgrad: bool, dtype: torch.dtype) -> str:
    """Values of every kind, after no, few and very many updates."""
    given = fused_adamw.AdamWOptions(amsgrad=amsgrad, **options)
    for count in COUNTS:
        for scale in (1.0, 3000.0):
            param, grad, exp_avg = (wide_values(SIZE, seed) for seed in (1, 2, 3))
            squares = [wide_values(SIZE, seed, signed=False) for seed in (4, 5)]
            grad = grad.to(dtype)
            state = fused_adamw.AdamWState(count, exp_avg, squares[0], squares[1] if amsgrad else None)
            control = fused_adamw.StepControl(gradient_scale=scale)
            new, new_state, _ = fused_adamw.adamw_step(param, grad, state, given, control)
            numbers = [given.lr, *given.betas, given.weight_decay, given.eps, scale, 1.0, given.maximize]
            arrays = [param, grad.float(), exp_avg, *squares]
            output = call("update", [float(x) for x in numbers], [amsgrad, count + 1, SIZE], arrays)
            results = dict(zip(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), range(1, 4), strict=True))
            values = _floats(output).view(4, SIZE)
            same_bits(new, values[0], f"the parameter after {count} updates")
            for name, place in results.items():
                if new_state is not None and (found := getattr(new_state, name)) is not None:
                    same_bits(found, values[place], f"{name} after {count} updates")
    return f"{len(COUNTS) * 2} updates of {SIZE:,} elements"


def statistics(hierarchical: bool) -> str:
    """Rows and report, up to three stages of merging."""
    sizes = (0, 1, 1023, 1025, 16_384, 16_385, 70_001, 16_384 * 1030 + 3)
    for size in sizes:
        for scale in (1.0, 3000.0):
            values = wide_values(size, size)
            stats = fused_adamw.gradient_stats([values], grad_scale=scale, hierarchical=hierarchical)
            found = _program_stats(values, scale, None, hierarchical)
            same_bits(stats.rows, found[0], f"rows of {size} elements")
            same_bits(stats.report, found[1], f"the report of {size} elements")
    return f"{len(sizes) * 2} gradients of up to {sizes[-1]:,} elements"


def _program_stats(
    values: Tensor, scale: float, max_norm: float | None, hierarchical: bool
) -> tuple[Tensor, Tensor, float]:
    norm = 1.0 if max_norm is None else max_norm
    numbers = [scale, norm, DEFAULT_GUARD.epsilon, float(hierarchical)]
    output = call("stats", numbers, [values.numel()], [values])
    rows = _floats(output[:-8]).view(-1, 3)
    return rows[:-1], rows[-1], float(np.frombuffer(output[-8:], dtype=np.float64)[0])


def clipped() -> str:
    """Statistics, coefficient and update together, beside a guarded step."""
    norms = (0.0, 1e-42, 1e-3, 0.5, 1e9)
    for max_norm in norms:
        generator = torch.Generator().manual_seed(0)
        param, grad, exp_avg = (torch.randn(SIZE, generator=generator) for _ in range(3))
        exp_avg_sq = exp_avg.square() * 0.1
        state = fused_adamw.AdamWState(4, exp_avg, exp_avg_sq)
        guard = fused_adamw.GradientGuardOptions(max_norm=max_norm)
        update = fused_adamw.guarded_adamw_step([(param, grad, state)], guard=guard).updates[0]
        _, report, coefficient = _program_stats(grad, 1.0, max_norm, True)
        expected = _C.clip_coefficient(report.tolist(), max_norm, DEFAULT_GUARD.epsilon)
        require(coefficient == expected, f"the coefficient is {expected!r} instead of {coefficient!r}")
        options = fused_adamw.AdamWOptions()
        numbers = [options.lr, *options.betas, options.weight_decay, options.eps, 1.0, coefficient, 0.0]
        zeros = torch.zeros(SIZE)
        arrays = [param, grad, exp_avg, exp_avg_sq, zeros]
        values = _floats(call("update", [float(x) for x in numbers], [0, 5, SIZE], arrays)).view(4, SIZE)
        require(update.state is not None, "the guarded step updated nothing")
        if update.state is not None:
            found = (update.parameters, update.state.exp_avg, update.state.exp_avg_sq)
            for tensor, own, name in zip(found, values, ("parameter", "exp_avg", "exp_avg_sq"), strict=False):
                same_bits(tensor, own, f"{name}, clipped to {max_norm}")
    return f"clipped to {', '.join(map(str, norms))}"


def _rounded(values: Tensor, random: Any) -> tuple[dict[tuple[torch.dtype, bool], Tensor], list[Tensor]]:
    """By dtype and whether by chance; and what split weights are: parameter, remainder, the two joined."""
    size = values.numel()
    output = call("round", [], [size], [values, torch.from_numpy(random.view(np.int32))])
    halves = torch.from_numpy(np.frombuffer(output, np.int16, 6 * size).copy()).view(6, size)
    forms = [(dtype, by_chance) for dtype in (torch.bfloat16, torch.float16) for by_chance in (False, True)]
    found = {form: half.view(form[0]) for form, half in zip(forms, halves, strict=False)}
    return found, [halves[4].view(torch.bfloat16), halves[5], _floats(output[12 * size :])]


def rounded_weights() -> str:
    """Nearest numbers beside torch's, those by chance beside float64, split weights."""
    values = roundings.weights()
    finite = values.isfinite()
    generator = np.random.default_rng(0)
    for random in (
        generator.integers(0, 2**32, values.numel(), np.uint32),
        np.zeros(values.numel(), np.uint32),
        np.full(values.numel(), 2**32 - 1, np.uint32),
    ):
        found, split = _rounded(values, random)
        for dtype in ROUNDED_DTYPES:
            expected = roundings.nearest(values, dtype)
            same_bits(found[dtype, False], expected, f"the nearest {dtype}")
            expected[finite] = roundings.rounded_by_chance(values[finite], random[finite.numpy()], dtype)
            same_bits(found[dtype, True], expected, f"{dtype} by chance")
        same_bits(split[0], roundings.away_from_ties(values), "the parameter of a split weight")
        same_bits(split[2], values, "a weight that was split and joined")
    return f"{values.numel():,} weights, all bfloat16 numbers and ties among them"


# "Random123: a Library of Counter-Based Random Number Generators", kat_vectors: counter, key, result.
_PHILOX_4X32_10 = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def _random(seed: int, update: int, quads: int, first: int = 0) -> Any:
    output = call("random", [], [_signed(seed), _signed(first), _signed(update), quads], [])
    return np.frombuffer(output, np.uint32).copy()


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def random_bits() -> str:
    """Philox4x32-10 as its authors publish it."""
    for counter, key, expected in _PHILOX_4X32_10:
        quad, update, seed = (low + (high << 32) for low, high in (counter[:2], counter[2:], key))
        found = tuple(_random(seed, update, 1, quad).tolist())
        require(found == expected, f"{found} instead of {expected}")
    return f"{len(_PHILOX_4X32_10)} published results"


def updates_rounded_by_chance(dtype: torch.dtype) -> str:
    """The parameter of the CPU kernels is the new master weight, rounded by the bits of the headers."""
    counts, seeds = (0, 1, 2**33 + 1), (0, 1, 2**64 - 1)
    for count in counts:
        for seed in seeds:
            master, grad, exp_avg = (wide_values(SIZE, i) for i in (1, 2, 3))
            exp_avg_sq = wide_values(SIZE, 4, signed=False)
            state = fused_adamw.AdamWState(count, exp_avg, exp_avg_sq, master=master)
            control = fused_adamw.StepControl(rounding_seed=seed)
            param = roundings.nearest(master, dtype)
            new, new_state, _ = fused_adamw.adamw_step(param, grad, state, control=control)
            if new_state is None or new_state.master is None:
                raise FailedError("there is no master weight after an update")
            random = _random(tensor_seed(seed, 0), count + 1, -(-SIZE // 4))[:SIZE]
            found, _ = _rounded(new_state.master, random)
            same_bits(new, found[dtype, True], f"the parameter after {count} updates")
    return f"{len(counts) * len(seeds)} updates of {SIZE:,} elements"


def checks(compilers: Sequence[str]) -> list[Check]:
    """The compiler is the user's C++ compiler here."""
    del compilers
    found = [
        Check(f"update: {name}{suffix}", functools.partial(updates, options, amsgrad, torch.float32), missing)
        for name, options in UPDATES.items()
        for amsgrad, suffix in ((False, ""), (True, ", AMSGrad"))
    ]
    for dtype in ROUNDED_DTYPES:
        name = f"update: gradients of {str(dtype).removeprefix('torch.')}"
        found.append(Check(name, functools.partial(updates, {}, False, dtype), missing))
    return [
        *found,
        Check("statistics", functools.partial(statistics, True), missing),
        Check("statistics, merged serially", functools.partial(statistics, False), missing),
        Check("clipped update", clipped, missing),
        Check("rounded weights", rounded_weights, missing),
        Check("random bits", random_bits, missing),
        *(
            Check(
                f"update: {str(dtype).removeprefix('torch.')} parameters, rounded by chance",
                functools.partial(updates_rounded_by_chance, dtype),
                missing,
            )
            for dtype in ROUNDED_DTYPES
        ),
    ]


SUITE = Suite(
    "reference",
    proves="The installed CPU kernels have the bits of the C++ headers in a plain loop, compiled on this "
    "machine; roundings and random bits of the headers are those of torch, of float64 and of Philox.",
    leaves_open="Whether the formula in the headers is right (oracle and host say that), and CUDA.",
    checks=checks,
)
