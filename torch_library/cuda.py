"""How the ops run on CUDA: tables of tensors and options in, kernels launched on the current stream.

Nothing is read back. What the host cannot know (found_inf, the report, counters, options in device tensors)
the kernels read themselves. Has the functions that ``cpu.py`` has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from fused_adamw import _C
from fused_adamw.cuda_kernels import StepVariant, kernels
from fused_adamw.options import GradientGuardOptions, Scalar
from fused_adamw.torch_library.checks import StepLists
from fused_adamw.torch_library.step_options import AmpTensors, StepOptions

_MAX_EXP_AVG_SQS = StepLists._fields.index("max_exp_avg_sqs")


def bad_step(tables: Sequence[_C.TensorTable]) -> tuple[int, int] | None:
    """Nothing: the counters lie on the device."""
    del tables
    return None


def must_skip(amp: AmpTensors, report: Tensor | None) -> bool:
    """False: the kernel decides."""
    del amp, report
    return False


def step_in_place(
    tables: Sequence[_C.TensorTable],
    options: Sequence[StepOptions],
    amp: AmpTensors,
    report: Tensor | None,
    guard: GradientGuardOptions,
    *,
    after_analysis: bool = False,
) -> None:
    """Updates the tensors of all tables: one launch, or more where tensors or different options are many.

    Tables with maxima have launches of their own, and tables with each form of master weights.
    ``after_analysis``: right after ``analyze_and_merge``.
    """
    settings = _settings(amp, report, guard)
    for variant, own in _by_variant(tables, in_place=True):
        module = kernels(tables[0].device_index).step(variant)
        groups = [_group(options[i]) for i in own]
        _C.cuda_step_in_place(module, [tables[i] for i in own], groups, settings, after_analysis)
        after_analysis = False


def step_out_of_place(
    olds: Sequence[_C.TensorTable],
    news: Sequence[_C.TensorTable],
    options: StepOptions,
    amp: AmpTensors,
    steps: Sequence[Scalar],
    clip: float,
) -> None:
    """Updates the one tensor of each table of ``olds`` into that of ``news``."""
    settings = _settings(amp, None, GradientGuardOptions(), clip)
    for variant, own in _by_variant(news, in_place=False):
        _C.cuda_step_out_of_place(
            kernels(olds[0].device_index).step(variant),
            [olds[i] for i in own],
            [news[i] for i in own],
            [steps[i] for i in own],
            _group(options),
            settings,
        )


def analyze_and_merge(
    tables: Sequence[_C.TensorTable], stats: _C.TensorTable, amp: AmpTensors, hierarchical: bool
) -> None:
    """The gradients of a step's tables into rows, and these into a report: two launches, or more."""
    launchers = kernels(tables[0].device_index).stats(
        lambda: (variant for variant, _ in _by_variant(tables, in_place=True))
    )
    _C.cuda_analyze_and_merge(*launchers, tables, stats, amp.scale_or_one(), hierarchical)


def analyze_gradients(table: _C.TensorTable, amp: AmpTensors) -> None:
    """Gradients into rows: one launch, or more where gradients are many."""
    analysis, _ = kernels(table.device_index).stats()
    _C.cuda_analyze_gradients(analysis, table, amp.scale_or_one())


def merge_rows(table: _C.TensorTable) -> None:
    """One stage of merging: one launch."""
    _, merge = kernels(table.device_index).stats()
    _C.cuda_merge_rows(merge, table)


def merge_all_rows(table: _C.TensorTable, hierarchical: bool) -> None:
    """All stages of merging: one launch."""
    _, merge = kernels(table.device_index).stats()
    _C.cuda_merge_all_rows(merge, table, hierarchical)


def _by_variant(
    tables: Sequence[_C.TensorTable], *, in_place: bool
) -> Iterable[tuple[StepVariant, list[int]]]:
    """The kernels that update these tables, and which tables each."""
    variants: dict[StepVariant, list[int]] = {}
    for i, table in enumerate(tables):
        amsgrad = table.list_size(_MAX_EXP_AVG_SQS) > 0
        variants.setdefault(StepVariant(in_place, amsgrad, table.weights), []).append(i)
    return variants.items()


def _group(options: StepOptions) -> _C.CudaGroupSettings:
    return _C.CudaGroupSettings(
        options.lr, options.beta1, options.beta2, options.weight_decay, options.eps, options.maximize
    )


def _settings(
    amp: AmpTensors, report: Tensor | None, guard: GradientGuardOptions, clip: float = 1.0
) -> _C.CudaStepSettings:
    return _C.CudaStepSettings(
        amp.scale_or_one(),
        0.0 if amp.found_inf is None else amp.found_inf,
        clip,
        report,
        -1.0 if guard.max_norm is None else guard.max_norm,
        guard.epsilon,
    )
