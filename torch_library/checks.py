"""Everything that an op refuses, once, with its message.

Each function takes the op's name and raises before anything is written: TypeError for a wrong dtype or
layout kind, ValueError for a wrong value, shape, stride, device or memory, RuntimeError for a use that
autograd would have to follow. A message names the argument and the tensor's index, what was found and what is
required. The same functions serve the fakes, so shapes may be symbolic: those are compared by
``torch._check_value``, which a tracer understands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from fused_adamw.stats_plan import MAX_ROWS, ROW_ELEMENTS

BACKENDS = ("cpu", "cuda")
PARAM_DTYPES = (torch.float32,)
ROUNDED_DTYPES = (torch.float16, torch.bfloat16)  # of parameters that are roundings of a master weight
REMAINDER_DTYPE = torch.int16  # a master weight's low bits, beside a bfloat16 parameter
MASTER_DTYPES = (torch.float32, REMAINDER_DTYPE)
MOMENT_DTYPES = (torch.float32,)
GRAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCALAR_DTYPES = (torch.float32, torch.float64)
STEP_DTYPES = (torch.float32, torch.float64, torch.int64)
STEP_COUNTER_DTYPES = (torch.float32,)  # as torch.optim keeps them
FOUND_INF_DTYPES = (torch.float32, torch.float64, torch.bool)

REPORT_SHAPE = (ROW_ELEMENTS,)

LEAST_GRAD_SCALE = 2.0**-128 + 2.0**-149
"""The least float32 whose reciprocal is finite in float32: the first one above 2^-128."""


class StepLists(NamedTuple):
    """The tensors of a step, list by list: element i of each belongs to parameter i.

    ``max_exp_avg_sqs`` is empty without AMSGrad, ``masters`` where the parameters are float32.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    max_exp_avg_sqs: Sequence[Tensor]
    state_steps: Sequence[Tensor]
    masters: Sequence[Tensor] = ()


def check_options(
    op: str,
    *,
    lr: float | None,
    beta1: float | None,
    beta2: float | None,
    weight_decay: float,
    eps: float,
) -> None:
    """Refuses options that are not finite or out of range (ValueError); None: only a device knows."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
        if value is not None and not 0.0 <= value < math.inf:
            raise ValueError(f"{op}: {name} is {value}; a finite number of at least 0 is required")
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if value is not None and not 0.0 <= value < 1.0:
            raise ValueError(f"{op}: {name} is {value}; a number of at least 0 and below 1 is required")


def check_guard(op: str, max_norm: float | None, epsilon: float) -> None:
    """Refuses clipping options out of range (ValueError); an infinite ``max_norm`` never clips."""
    if max_norm is not None and not max_norm >= 0.0:
        raise ValueError(f"{op}: max_norm is {max_norm}; a number of at least 0, or None, is required")
    if not 0.0 <= epsilon < math.inf:
        raise ValueError(f"{op}: epsilon is {epsilon}; a finite number of at least 0 is required")


def check_choice(op: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Refuses what is none of the choices (ValueError)."""
    if value not in choices:
        raise ValueError(f"{op}: {name} is {value!r}; {_one_of([repr(c) for c in choices])} is required")


def check_grad_scale(op: str, value: float) -> None:
    """Refuses a gradient scale that cannot be divided out in float32 (ValueError)."""
    if not LEAST_GRAD_SCALE <= value <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"{op}: grad_scale is {value}; a positive finite number whose reciprocal is finite in float32 "
            "is required"
        )


def check_step_count(op: str, name: str, value: float) -> None:
    """Refuses a number of completed updates that is no count (ValueError)."""
    if not (0 <= value < 2**63 - 1 and value == math.floor(value)):
        raise ValueError(
            f"{op}: {name} is {value}; a whole number of at least 0 and below 2^63 - 1 is required"
        )


def check_scalar_tensor(op: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Refuses a tensor that holds no single number (TypeError, ValueError)."""
    _check_dtype(op, name, tensor, dtypes)
    if tuple(tensor.shape) not in ((), (1,)):
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}; shape () or (1,) is required")


def check_same_device(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    """Refuses a tensor on another device than the parameters (ValueError)."""
    if tensor.device != device:
        raise ValueError(
            f"{op}: {name} is on {tensor.device}; {device}, where the parameters are, is required"
        )


def check_backend(op: str, device: torch.device) -> None:
    """Refuses a device that this version has no kernels for (ValueError)."""
    if device.type not in BACKENDS:
        raise ValueError(
            f"{op}: the parameters are on {device}; a device of type {_one_of(BACKENDS)} is required"
        )


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, so that what is launched now will be replayed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_frozen_options(
    op: str, group: int, options: Mapping[str, float | Tensor], device: torch.device
) -> None:
    """Refuses numbers that every replay of a captured step would use, whatever is assigned later."""
    for name, value in options.items():
        if not isinstance(value, Tensor) or value.device.type == "cpu" != device.type:
            kind = "a tensor on the CPU" if isinstance(value, Tensor) else f"the number {value}"
            raise RuntimeError(
                f"{op}: {name} of group {group} is {kind}, which a CUDA graph would keep for all replays; a "
                f"tensor on the parameters' device (torch.tensor({float(value)}, device='cuda')), or "
                "capturable=True to keep it, is required"
            )


def refuse_frozen_count(op: str, step: float | Tensor, device: torch.device) -> None:
    """Refuses a count of updates that every replay of a captured step would use (RuntimeError)."""
    if not isinstance(step, Tensor) and is_capturing(device):
        raise RuntimeError(
            f"{op}: step is the number {step}, which a CUDA graph would keep for all replays, and the bias "
            "correction with it; a tensor on the parameters' device, which the graph counts up, is required"
        )


def refuse_host_reads(op: str, *, nonfinite: str | None, fused_step: bool, stale_master: str) -> None:
    """Refuses settings whose step reads values on the host, which no CUDA graph can (RuntimeError)."""
    for name, value, wrong, required in (
        ("nonfinite", nonfinite, "error", "'skip' or None"),
        ("fused_step", fused_step, False, "True"),
        ("stale_master", stale_master, "error", "'resync'"),
    ):
        if value == wrong:
            raise RuntimeError(
                f"{op}: {name} is {value!r}, which reads on the host, and a CUDA graph is being captured; "
                f"{required} is required"
            )


def refuse_shared_storage(op: str, written: Sequence[object]) -> None:
    """Refuses separate tensors in one buffer, which Inductor before torch 2.13 confuses (RuntimeError)."""
    storages: set[int] = set()
    for tensor in written:
        if isinstance(tensor, Tensor) and type(tensor) in (Tensor, torch.nn.Parameter):
            address = tensor.untyped_storage().data_ptr()
            if address in storages:
                raise RuntimeError(
                    f"{op}: parameters or states are parts of one buffer, which torch.compile of torch "
                    f"{torch.__version__} confuses; torch 2.13 or later, or step() outside of torch.compile, "
                    "is required"
                )
            if address != 0:
                storages.add(address)


def refuse_vmap(op: str) -> NoReturn:
    """Refuses ``torch.vmap`` over an op (RuntimeError)."""
    raise RuntimeError(
        f"{op} has no batching rule, by design: an update is elementwise; stack the tensors and call it "
        "once, without torch.vmap"
    )


def refuse_autograd(op: str, arguments: Mapping[str, Tensor | Sequence[Tensor] | None]) -> None:
    """Refuses tensors that autograd would have to follow through the op (RuntimeError)."""
    if not torch.is_grad_enabled():
        return
    for name, argument in arguments.items():
        single = isinstance(argument, Tensor)
        for i, tensor in enumerate([argument] if single else argument or ()):
            if tensor.requires_grad:
                raise RuntimeError(
                    f"{op} has no derivative, by design, and {name if single else f'{name}[{i}]'} requires "
                    "grad; call it under torch.no_grad(), or pass detached tensors"
                )


def check_param_kind(op: str, name: str, param: Tensor) -> None:
    """Refuses a parameter that no layout or device could make right (TypeError)."""
    _check_strided(op, name, param)
    _check_dtype(op, name, param, (*PARAM_DTYPES, *ROUNDED_DTYPES))


def check_step_lists(op: str, lists: StepLists, rounding_seeds: Sequence[int] = ()) -> None:
    """Refuses lists that do not fit together, or tensors that the kernels cannot read.

    float32 parameters, or 16-bit ones with masters; float32 moments; gradients of a dtype in ``GRAD_DTYPES``;
    per parameter one shape, and one set of strides that leaves no hole and no overlap; step counters of one
    float32 element; one device. Masters are all float32, or all remainders of bfloat16 parameters; seeds go
    with float32 ones.
    """
    count = len(lists.params)
    for name, tensors in zip(lists._fields, lists, strict=True):
        if len(tensors) != count and not (name in ("max_exp_avg_sqs", "masters") and len(tensors) == 0):
            raise ValueError(f"{op}: {name} has {len(tensors)} tensors; {count}, as params, is required")
    if rounding_seeds and len(rounding_seeds) != count:
        raise ValueError(
            f"{op}: rounding_seeds has {len(rounding_seeds)} numbers; {count}, as params, or none is required"
        )
    if count == 0:
        return
    device = lists.params[0].device
    for i, (param, step) in enumerate(zip(lists.params, lists.state_steps, strict=True)):
        _check_dense(op, f"params[{i}]", param, device)
        _check_weights(
            op,
            (f"params[{i}]", param),
            (f"masters[{i}]", lists.masters[i]) if lists.masters else None,
            lists.masters[0].dtype if i > 0 and lists.masters else None,
            stochastic=bool(rounding_seeds),
        )
        _check_like(op, f"grads[{i}]", lists.grads[i], GRAD_DTYPES, param)
        for name in ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
            moments: Sequence[Tensor] = getattr(lists, name)
            if moments:
                _check_like(op, f"{name}[{i}]", moments[i], MOMENT_DTYPES, param)
        _check_strided(op, f"state_steps[{i}]", step)
        check_scalar_tensor(op, f"state_steps[{i}]", step, STEP_COUNTER_DTYPES)
        check_same_device(op, f"state_steps[{i}]", step, device)


def _check_weights(
    op: str,
    param: tuple[str, Tensor],
    master: tuple[str, Tensor] | None,
    required: torch.dtype | None,
    *,
    stochastic: bool,
) -> None:
    """Refuses a parameter and a master weight, by their names, that are no pair.

    ``required``: the dtype of the other master weights.
    """
    name, tensor = param
    if master is None:
        if tensor.dtype in ROUNDED_DTYPES:
            raise TypeError(
                f"{op}: {name} has dtype {tensor.dtype} and no master weight; {_one_of(PARAM_DTYPES)}, or a "
                "master weight, is required"
            )
        _check_dtype(op, name, tensor, PARAM_DTYPES)
        if stochastic:
            raise ValueError(
                f"{op}: rounding seeds are given, but {name}, of dtype {tensor.dtype}, is not rounded; no "
                "seeds are required"
            )
        return
    _check_dtype(op, name, tensor, ROUNDED_DTYPES)
    master_name, weight = master
    whole = tensor.dtype is not torch.bfloat16 or stochastic
    _check_like(op, master_name, weight, (torch.float32,) if whole else MASTER_DTYPES, tensor)
    if required is not None and weight.dtype is not required:
        raise TypeError(
            f"{op}: {master_name} has dtype {weight.dtype}; {required}, as the first one, is required"
        )


def check_step_tensors(
    op: str,
    param: Tensor,
    grad: Tensor,
    moments: dict[str, Tensor | None],
    rounding_seed: int | None = None,
) -> None:
    """The same for the out-of-place ops; moments are all given, or all None before the first update.

    ``moments`` has a "master" where the parameter is of 16 bits.
    """
    _check_dense(op, "param", param, param.device)
    _check_like(op, "grad", grad, GRAD_DTYPES, param)
    master = moments.get("master")
    if "master" in moments and master is None:
        _check_dtype(op, "param", param, ROUNDED_DTYPES)
    else:
        pair = None if master is None else ("master", master)
        _check_weights(op, ("param", param), pair, None, stochastic=rounding_seed is not None)
    given = [name for name, tensor in moments.items() if tensor is not None]
    if given and len(given) < len(moments):
        missing = [name for name in moments if name not in given]
        raise ValueError(
            f"{op}: {', '.join(given)} given without {', '.join(missing)}; all of the state, or None for all "
            "before the first update, is required"
        )
    for name, tensor in moments.items():
        if tensor is not None and name != "master":
            _check_like(op, name, tensor, MOMENT_DTYPES, param)


def check_gradients(op: str, grads: Sequence[Tensor]) -> None:
    """Refuses gradients that cannot be read in the order of their memory."""
    for i, grad in enumerate(grads):
        _check_strided(op, f"grads[{i}]", grad)
        _check_dtype(op, f"grads[{i}]", grad, GRAD_DTYPES)
        check_same_device(op, f"grads[{i}]", grad, grads[0].device)
        _check_no_holes(op, f"grads[{i}]", grad)


def check_buffer(op: str, name: str, buffer: Tensor, shape: Sequence[int]) -> None:
    """Refuses storage that is not contiguous float32 of exactly this shape."""
    _check_strided(op, name, buffer)
    _check_dtype(op, name, buffer, (torch.float32,))

    def message() -> str:
        return f"{op}: {name} has shape {tuple(buffer.shape)}; {tuple(shape)} is required"

    torch._check_value(buffer.dim() == len(shape), message)
    for size, required in zip(buffer.shape, shape, strict=True):
        torch._check_value(size == required, message)
    if not buffer.is_contiguous():
        raise ValueError(f"{op}: {name} has strides {buffer.stride()}; a contiguous tensor is required")


def check_row_count(op: str, name: str, count: int) -> None:
    """Refuses more rows than can be merged."""
    if type(count) is int and count <= MAX_ROWS:
        return  # spares an eager step what only a tracer's symbol needs
    torch._check_value(
        count <= MAX_ROWS, lambda: f"{op}: {name} has {count} rows; {MAX_ROWS} at most are required"
    )


def check_rows(op: str, name: str, rows: Tensor, count: int | None = None) -> None:
    """Refuses what is no rows of statistics, or not ``count`` of them."""
    if count is None:
        if rows.dim() != 2:
            raise ValueError(
                f"{op}: {name} has shape {tuple(rows.shape)}; (number of rows, {ROW_ELEMENTS}) is required"
            )
        count = rows.shape[0]
        check_row_count(op, name, count)
    check_buffer(op, name, rows, (count, ROW_ELEMENTS))


def refuse_missing_storage(op: str, arguments: Mapping[str, Tensor | Sequence[Tensor] | None]) -> None:
    """Refuses tensors with elements but without memory for them (ValueError), as sharded training frees it.

    Not for fakes, which have none.
    """
    for name, argument in arguments.items():
        single = isinstance(argument, Tensor)
        for i, tensor in enumerate([argument] if single else argument or ()):
            if tensor.numel() > 0 and (tensor._is_zerotensor() or tensor.data_ptr() == 0):
                label = name if single else f"{name}[{i}]"
                raise ValueError(f"{op}: {label} has elements but no storage for them, which is required")


def overlap_error(op: str, written: str, other: str) -> ValueError:
    """The error for two arguments that share memory though ``written`` is written."""
    return ValueError(
        f"{op}: {written} and {other} share memory; a tensor that is written may share memory with no other "
        "tensor (a gradient that is exactly a tensor of its own parameter may)"
    )


def _check_strided(op: str, name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{op}: {name} has layout {tensor.layout}; a dense tensor (torch.strided) is required"
        )
    if tensor.is_neg():
        raise ValueError(
            f"{op}: {name} is a lazily negated view; a plain tensor, as resolve_neg() makes, is required"
        )


def _check_dtype(op: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{op}: {name} has dtype {tensor.dtype}; {_one_of(dtypes)} is required")


def _check_dense(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    check_param_kind(op, name, tensor)
    check_same_device(op, name, tensor, device)
    _check_no_holes(op, name, tensor)


def _check_no_holes(op: str, name: str, tensor: Tensor) -> None:
    if not _is_dense(tensor):
        raise ValueError(
            f"{op}: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; strides without "
            "holes or overlap (contiguous, or a permutation of it) are required"
        )


def _check_like(op: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], param: Tensor) -> None:
    _check_strided(op, name, tensor)
    _check_dtype(op, name, tensor, dtypes)
    check_same_device(op, name, tensor, param.device)

    def shapes() -> str:
        required = f"{tuple(param.shape)}, the parameter's, is required"
        return f"{op}: {name} has shape {tuple(tensor.shape)}; {required}"

    torch._check_value(tensor.dim() == param.dim(), shapes)
    for size, required in zip(tensor.shape, param.shape, strict=True):
        torch._check_value(size == required, shapes)
    if not _same_strides(tensor, param):
        raise ValueError(
            f"{op}: {name} has strides {tensor.stride()}; {param.stride()}, the parameter's, are required"
        )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, each once, in any order of the dimensions."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _same_strides(tensor: Tensor, param: Tensor) -> bool:
    """Whether equal indices lie at equal offsets; the stride of a dimension of size 1 means nothing."""
    if tensor.stride() == param.stride() or param.numel() == 0:
        return True
    return all(
        size == 1 or stride == required
        for size, stride, required in zip(param.shape, tensor.stride(), param.stride(), strict=True)
    )


def _one_of(choices: Sequence[object]) -> str:
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last
