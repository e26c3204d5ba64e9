"""How the ops run on CUDA: tables of tensors and options in, kernels launched on the current stream.

Nothing is read back. What the host cannot know (found_inf, the report, counters, options in device tensors)
the kernels read themselves. Has the functions that ``cpu.py`` has.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fused_adamw import _C
from fused_adamw.cuda_kernels import kernels
from fused_adamw.options import GradientGuardOptions, Scalar
from fused_adamw.torch_library.step_options import AmpTensors, StepOptions


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
) -> None:
    """Updates the tensors of all tables: a launch for each, or more where tensors are many."""
    for table, own in zip(tables, options, strict=True):
        module = kernels(table.device_index).step(in_place=True, amsgrad=table.list_size(4) > 0)
        _C.cuda_step_in_place(module, table, _settings(own, amp, report, guard))


def step_out_of_place(
    olds: Sequence[_C.TensorTable],
    news: Sequence[_C.TensorTable],
    options: StepOptions,
    amp: AmpTensors,
    steps: Sequence[Scalar],
    clip: float,
) -> None:
    """Updates the one tensor of each table of ``olds`` into that of ``news``."""
    module = kernels(olds[0].device_index).step(in_place=False, amsgrad=news[0].list_size(4) > 0)
    settings = _settings(options, amp, None, GradientGuardOptions(), clip)
    _C.cuda_step_out_of_place(module, olds, news, steps, settings)


def analyze_gradients(table: _C.TensorTable, amp: AmpTensors) -> None:
    """Gradients into rows: one launch, or more where gradients are many."""
    _C.cuda_analyze_gradients(kernels(table.device_index).stats(), table, amp.scale_or_one())


def merge_rows(table: _C.TensorTable) -> None:
    """One stage of merging: one launch."""
    _C.cuda_merge_rows(kernels(table.device_index).stats(), table)


def merge_all_rows(table: _C.TensorTable, hierarchical: bool) -> None:
    """All stages of merging: one launch."""
    _C.cuda_merge_all_rows(kernels(table.device_index).stats(), table, hierarchical)


def _settings(
    options: StepOptions,
    amp: AmpTensors,
    report: Tensor | None,
    guard: GradientGuardOptions,
    clip: float = 1.0,
) -> _C.CudaStepSettings:
    return _C.CudaStepSettings(
        options.lr,
        options.beta1,
        options.beta2,
        amp.scale_or_one(),
        0.0 if amp.found_inf is None else amp.found_inf,
        options.weight_decay,
        options.eps,
        clip,
        report,
        -1.0 if guard.max_norm is None else guard.max_norm,
        guard.epsilon,
        options.maximize,
    )
