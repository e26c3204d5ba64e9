"""How the ops run on the CPU: tables of tensors and options in, kernels called.

Has the functions that ``cuda.py`` has; ``library.backend`` chooses between the two.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_adamw import _C
from fused_adamw.options import GradientGuardOptions, Scalar
from fused_adamw.torch_library.step_options import AmpTensors, StepOptions


def bad_step(tables: Sequence[_C.TensorTable]) -> tuple[int, int] | None:
    """The (table, index) of the first step counter that holds no count."""
    return _C.find_bad_step(tables)


def must_skip(amp: AmpTensors, report: Tensor | None) -> bool:
    """Whether a scaler or a report says that nothing is to be updated, as far as the host can know."""
    return amp.skip() or (report is not None and bool(report[2]))


def step_in_place(
    tables: Sequence[_C.TensorTable],
    options: Sequence[StepOptions],
    amp: AmpTensors,
    report: Tensor | None,
    guard: GradientGuardOptions,
    *,
    after_analysis: bool = False,
) -> None:
    """Updates the tensors of all tables, in one parallel region."""
    del after_analysis  # of use to a device alone
    clip = 1.0
    if report is not None and guard.max_norm is not None:
        clip = _C.clip_coefficient(report.tolist(), guard.max_norm, guard.epsilon)
    numbers = [_numbers(own, amp, clip) for own in options]
    _C.adamw_step_in_place(tables, numbers, _threads())


def step_out_of_place(
    olds: Sequence[_C.TensorTable],
    news: Sequence[_C.TensorTable],
    options: StepOptions,
    amp: AmpTensors,
    steps: Sequence[Scalar],
    clip: float,
) -> None:
    """Updates the one tensor of each table of ``olds`` into that of ``news``, in one parallel region."""
    numbers = [_numbers(options, amp, clip)] * len(olds)
    _C.adamw_step(olds, news, numbers, [int(step) for step in steps], _threads())


def analyze_gradients(table: _C.TensorTable, amp: AmpTensors) -> None:
    """Gradients into rows."""
    _C.analyze_gradients(table, amp.scale_number(), _threads())


def analyze_and_merge(
    tables: Sequence[_C.TensorTable], stats: _C.TensorTable, amp: AmpTensors, hierarchical: bool
) -> None:
    """The gradients of a step's tables into rows, and these into a report."""
    _C.analyze_and_merge(tables, stats, amp.scale_number(), hierarchical, _threads())


def merge_rows(table: _C.TensorTable) -> None:
    """One stage of merging."""
    _C.merge_rows(table)


def merge_all_rows(table: _C.TensorTable, hierarchical: bool) -> None:
    """All stages of merging."""
    _C.merge_all_rows(table, hierarchical)


def _numbers(options: StepOptions, amp: AmpTensors, clip: float) -> _C.StepOptions:
    return _C.StepOptions(
        float(options.lr),
        float(options.beta1),
        float(options.beta2),
        options.weight_decay,
        options.eps,
        amp.scale_number(),
        clip,
        options.maximize,
    )


def _threads() -> int:
    """The number of threads that torch's own CPU operators use."""
    threads = torch.get_num_threads()
    if threads > 1 and not _C.has_openmp_runtime():
        _warn_of_one_thread()
    return threads


@functools.cache
def _warn_of_one_thread() -> None:
    warnings.warn(
        "fused_adamw found no OpenMP runtime in torch's libraries: its CPU kernels use one thread",
        stacklevel=2,
    )
