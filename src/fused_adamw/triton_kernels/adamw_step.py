"""The AdamW / AMSGrad step: what ``csrc/cuda/adamw_step.cu`` does.

A program updates as many elements of one tensor as a block of ``csrc/cuda/adamw_step.cu``. It first forms
the scalars of the tensor in float64 from what lies on the device: elements that were under way meanwhile
would take half as many registers again, and so programs from a multiprocessor. The last program of a tensor
to have read its step counter advances it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_adamw._C import CUDA_LAYOUT
from fused_adamw.triton_kernels.formula import (
    INFINITY_BITS,
    adamw_update,
    complement,
    decay_factor,
    inverse_grad_scale,
    lane_values,
    quotients,
)
from fused_adamw.triton_kernels.low_precision import (
    current_master,
    join_weight,
    random_bits,
    round_stochastically,
    round_to_nearest,
    split_weight,
    to_float32,
)
from fused_adamw.triton_kernels.parameters import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    SHAPE_GRAD,
    SHAPE_GROUP,
    SHAPE_SIZE,
    SHAPE_VECTORISED,
    bfloat16_to_float32,
    find_tensor,
    half_to_float32,
    load_flag,
    load_float64,
    load_int32,
    load_int64,
    load_pointer,
    load_scalar,
)

BLOCK = tl.constexpr(CUDA_LAYOUT["kElementsPerProgram"])

SETTINGS_GRAD_SCALE = tl.constexpr(CUDA_LAYOUT["StepSettings.grad_scale"])
SETTINGS_FOUND_INF = tl.constexpr(CUDA_LAYOUT["StepSettings.found_inf"])
SETTINGS_CLIP = tl.constexpr(CUDA_LAYOUT["StepSettings.clip"])
SETTINGS_REPORT = tl.constexpr(CUDA_LAYOUT["StepSettings.report"])
SETTINGS_MAX_NORM = tl.constexpr(CUDA_LAYOUT["StepSettings.max_norm"])
SETTINGS_NORM_EPSILON = tl.constexpr(CUDA_LAYOUT["StepSettings.norm_epsilon"])

GROUP_BYTES = tl.constexpr(CUDA_LAYOUT["GroupSettings"])
GROUP_LR = tl.constexpr(CUDA_LAYOUT["GroupSettings.lr"])
GROUP_BETA1 = tl.constexpr(CUDA_LAYOUT["GroupSettings.beta1"])
GROUP_BETA2 = tl.constexpr(CUDA_LAYOUT["GroupSettings.beta2"])
GROUP_WEIGHT_DECAY = tl.constexpr(CUDA_LAYOUT["GroupSettings.weight_decay"])
GROUP_EPS = tl.constexpr(CUDA_LAYOUT["GroupSettings.eps"])
GROUP_MAXIMIZE = tl.constexpr(CUDA_LAYOUT["GroupSettings.maximize"])


def _both(name: str, in_place_name: str | None = None) -> tl.constexpr:
    """An entry of the layout for a step out of place and for one in place: choose with ``[IN_PLACE]``."""
    own = CUDA_LAYOUT[f"OutOfPlace{name}"], CUDA_LAYOUT[f"InPlace{in_place_name or name}"]
    return tl.constexpr(own)


_KINDS = ("OutOfPlaceTensor", "InPlaceTensor", "OutOfPlaceMasterTensor", "InPlaceMasterTensor")


def _of_kinds(form: str) -> tl.constexpr:
    """An entry of the layout for each kind of tensor: choose with ``[KIND]``."""
    return tl.constexpr(tuple(CUDA_LAYOUT[form.format(kind)] for kind in _KINDS))


CAPACITY = _of_kinds("StepParameters<{}>.capacity")
SETTINGS = _of_kinds("StepParameters<{}>.settings")
GROUPS = _of_kinds("StepParameters<{}>.groups")
TENSORS = _of_kinds("StepParameters<{}>.tensors")
SLOT = _of_kinds("StepParameters<{}>.slot")
FIRST_OF_RUN = _of_kinds("StepParameters<{}>.index.first_of_run")
FIRST = _of_kinds("StepParameters<{}>.index.first")
TENSOR_BYTES = _of_kinds("{}")

ROUNDED = _both("MasterTensor.rounded")
ROUNDED_OLD_PARAM = tl.constexpr(CUDA_LAYOUT["RoundedParam.old_param"])
ROUNDED_NEW_PARAM = tl.constexpr(CUDA_LAYOUT["RoundedParam.new_param"])
ROUNDED_SEED = tl.constexpr(CUDA_LAYOUT["RoundedParam.rounding_seed"])
ROUNDED_TYPE = tl.constexpr(CUDA_LAYOUT["RoundedParam.type"])

SHAPE = _both("Tensor.shape")
STEP = _both("Tensor.step")
GRAD = _both("Tensor.grad")
PARAM = _both("Tensor.param")
EXP_AVG = _both("Tensor.exp_avg")
EXP_AVG_SQ = _both("Tensor.exp_avg_sq")
MAX_EXP_AVG_SQ = _both("Tensor.max_exp_avg_sq")
NEW_PARAM = _both("Tensor.new_param", "Tensor.param")
NEW_EXP_AVG = _both("Tensor.new_exp_avg", "Tensor.exp_avg")
NEW_EXP_AVG_SQ = _both("Tensor.new_exp_avg_sq", "Tensor.exp_avg_sq")
NEW_MAX_EXP_AVG_SQ = _both("Tensor.new_max_exp_avg_sq", "Tensor.max_exp_avg_sq")


@triton.jit
def _read_scalars(parameters, tensor, IN_PLACE: tl.constexpr, KIND: tl.constexpr):
    """The scalars of a tensor's update, its number, and whether nothing is to be updated.

    Each option becomes float32 as soon as it is read: float64 values kept for later would cost registers.
    """
    settings = parameters + SETTINGS[KIND]
    group_index = tl.load((tensor + SHAPE[IN_PLACE] + SHAPE_GROUP).to(tl.pointer_type(tl.uint16)))
    group = parameters + GROUPS[KIND] + group_index.to(tl.int32) * GROUP_BYTES

    inverse_scale = inverse_grad_scale(load_scalar(settings, SETTINGS_GRAD_SCALE))
    infinity = tl.full((), INFINITY_BITS, tl.int32).to(tl.float32, bitcast=True)
    # The host refuses such a scale where it can see it; both comparisons fail for a NaN.
    skip = ((inverse_scale > 0.0) & (inverse_scale < infinity)) == 0
    inverse_scale = tl.where(load_flag(group, GROUP_MAXIMIZE), -inverse_scale, inverse_scale)
    skip |= load_scalar(settings, SETTINGS_FOUND_INF) != 0.0
    report = load_pointer(settings, SETTINGS_REPORT, tl.float32)
    guarded = report.to(tl.int64) != 0
    skip |= tl.load(report + 2, mask=guarded, other=0.0) != 0.0
    if IN_PLACE:
        done = tl.load(load_pointer(tensor, STEP[IN_PLACE], tl.float32)).to(tl.int64)
    else:
        # From 2^62 on, one more would overflow, and the bias corrections have been 1 for long.
        done = tl.minimum(load_scalar(tensor, STEP[IN_PLACE]), 2.0**62).to(tl.int64)

    lr = load_scalar(group, GROUP_LR)
    decay = decay_factor(lr, load_float64(group, GROUP_WEIGHT_DECAY))
    beta1 = load_scalar(group, GROUP_BETA1)
    beta1_complement = complement(beta1)
    beta2 = load_scalar(group, GROUP_BETA2)
    beta2_complement = complement(beta2)
    max_norm = tl.where(guarded, load_float64(settings, SETTINGS_MAX_NORM), -1.0)
    corrections = quotients(
        lane_values(lr, 1.0, max_norm),
        lane_values(beta1, beta2, beta2),
        done + 1,
        tl.load(report, mask=guarded, other=0.0),
        tl.load(report + 1, mask=guarded, other=0.0),
        max_norm,
        load_float64(settings, SETTINGS_NORM_EPSILON),
        load_float64(settings, SETTINGS_CLIP),
    )
    eps = load_float64(group, GROUP_EPS).to(tl.float32)
    beta2 = beta2.to(tl.float32)
    return (inverse_scale, decay, beta1_complement, beta2, beta2_complement, eps, corrections), done + 1, skip


@triton.jit
def _elements(tensor, start, OFFSET: tl.constexpr, TYPE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Pointers to the elements of a member from ``start`` on, which lies at a multiple of so many bytes."""
    first = load_pointer(tensor, OFFSET, TYPE) + start
    return tl.multiple_of(first, ALIGNMENT) + tl.arange(0, BLOCK)


@triton.jit
def _update_block(
    scalars,
    number,
    skip,
    counter,
    tensor,
    start,
    size,
    IN_PLACE: tl.constexpr,
    AMSGRAD: tl.constexpr,
    WEIGHTS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Updates elements from ``start`` on; in place, a skipped update writes nothing.

    Returns how many programs of the tensor came before this one (in place).

    ``WHOLE``: all are there, and their addresses allow accesses of 16 bytes (8 for 16-bit elements).
    Every mask is then the same for all of them, which keeps those accesses whole.
    """
    ALIGNMENT: tl.constexpr = 16 if WHOLE else 4
    HALF_ALIGNMENT: tl.constexpr = 8 if WHOLE else 2
    SPLIT: tl.constexpr = WEIGHTS == "split"
    ROUND: tl.constexpr = WEIGHTS != "float32"
    STOCHASTIC: tl.constexpr = WEIGHTS == "stochastic"
    MASTER: tl.constexpr = tl.uint16 if SPLIT else tl.float32
    MASTER_ALIGNMENT: tl.constexpr = HALF_ALIGNMENT if SPLIT else ALIGNMENT
    lanes = tl.arange(0, BLOCK)
    if WHOLE:
        inside = tl.full((BLOCK,), True, tl.int1)
    else:
        inside = lanes < tl.minimum(size - start, BLOCK).to(tl.int32)
    code = tl.broadcast_to(tl.load(tensor + SHAPE[IN_PLACE] + SHAPE_GRAD), (BLOCK,))
    # Null moments are zeros.
    state = inside
    if not IN_PLACE:
        state &= tl.broadcast_to(load_int64(tensor, EXP_AVG[IN_PLACE]), (BLOCK,)) != 0

    # The weights as they lie in memory: the parameter, or the master weight or remainder beside it.
    rounded = tensor + ROUNDED[IN_PLACE]
    weight_pointers = _elements(tensor, start, PARAM[IN_PLACE], MASTER, MASTER_ALIGNMENT)
    if ROUND:
        type_code = tl.load(rounded + ROUNDED_TYPE)
        param_pointers = _elements(rounded, start, ROUNDED_OLD_PARAM, tl.uint16, HALF_ALIGNMENT)
        stored = tl.load(weight_pointers, mask=state, other=0)
        param = tl.load(param_pointers, mask=inside, other=0)
    else:
        stored = tl.load(weight_pointers, mask=inside, other=0.0)
    grad_pointers = _elements(tensor, start, GRAD[IN_PLACE], tl.float32, ALIGNMENT)
    half_pointers = _elements(tensor, start, GRAD[IN_PLACE], tl.uint16, HALF_ALIGNMENT)
    exp_avg_pointers = _elements(tensor, start, EXP_AVG[IN_PLACE], tl.float32, ALIGNMENT)
    exp_avg_sq_pointers = _elements(tensor, start, EXP_AVG_SQ[IN_PLACE], tl.float32, ALIGNMENT)
    # Both widths without a branch: no conversion waits for its load before the other loads are under way.
    grad = tl.load(grad_pointers, mask=inside & (code == FLOAT32), other=0.0)
    half_grad = tl.load(half_pointers, mask=inside & (code != FLOAT32), other=0)
    exp_avg = tl.load(exp_avg_pointers, mask=state, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_pointers, mask=state, other=0.0)
    maximum = exp_avg_sq
    if AMSGRAD:
        maximum_pointers = _elements(tensor, start, MAX_EXP_AVG_SQ[IN_PLACE], tl.float32, ALIGNMENT)
        maximum = tl.load(maximum_pointers, mask=state, other=0.0)

    before = 0
    if IN_PLACE:
        # Every thread has read the counter of steps. The answer comes while the elements are under way.
        tl.debug_barrier()
        before = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")

    if ROUND and not (SPLIT or IN_PLACE):
        stored = tl.where(state, stored, to_float32(param, type_code))
    if skip == 0:
        if SPLIT:
            weight = join_weight(param, stored)
        elif ROUND:
            weight = current_master(stored, param, type_code, STOCHASTIC)
        else:
            weight = stored
        grad = tl.where(code == FLOAT16, half_to_float32(half_grad), grad)
        grad = tl.where(code == BFLOAT16, bfloat16_to_float32(half_grad), grad)
        weight, exp_avg, exp_avg_sq, maximum = adamw_update(
            weight, grad, exp_avg, exp_avg_sq, maximum, scalars, AMSGRAD
        )
        if SPLIT:
            param, stored = split_weight(weight)
        elif STOCHASTIC:
            random = random_bits(load_int64(rounded, ROUNDED_SEED), start // 4, number, BLOCK // 4)
            param = round_stochastically(weight, random, type_code)
            stored = weight
        elif ROUND:
            param = round_to_nearest(weight, type_code)
            stored = weight
        else:
            stored = weight

    if (not IN_PLACE) or skip == 0:
        weight_pointers = _elements(tensor, start, NEW_PARAM[IN_PLACE], MASTER, MASTER_ALIGNMENT)
        exp_avg_pointers = _elements(tensor, start, NEW_EXP_AVG[IN_PLACE], tl.float32, ALIGNMENT)
        exp_avg_sq_pointers = _elements(tensor, start, NEW_EXP_AVG_SQ[IN_PLACE], tl.float32, ALIGNMENT)
        tl.store(weight_pointers, stored, mask=inside)
        if ROUND:
            param_pointers = _elements(rounded, start, ROUNDED_NEW_PARAM, tl.uint16, HALF_ALIGNMENT)
            tl.store(param_pointers, param, mask=inside)
        tl.store(exp_avg_pointers, exp_avg, mask=inside)
        tl.store(exp_avg_sq_pointers, exp_avg_sq, mask=inside)
        if AMSGRAD:
            maximum_pointers = _elements(tensor, start, NEW_MAX_EXP_AVG_SQ[IN_PLACE], tl.float32, ALIGNMENT)
            tl.store(maximum_pointers, maximum, mask=inside)
    return before


@triton.jit
def adamw_step(
    parameters, finished_blocks, IN_PLACE: tl.constexpr, AMSGRAD: tl.constexpr, WEIGHTS: tl.constexpr
):
    """Grid: one program per ``kElementsPerProgram`` elements of each tensor of ``StepParameters``."""
    KIND: tl.constexpr = IN_PLACE + 2 * (WEIGHTS != "float32")
    index, block = find_tensor(parameters, tl.program_id(0), FIRST_OF_RUN[KIND], FIRST[KIND], CAPACITY[KIND])
    tensor = parameters + TENSORS[KIND] + index * TENSOR_BYTES[KIND]
    size = load_int64(tensor + SHAPE[IN_PLACE], SHAPE_SIZE)
    scalars, number, skip = _read_scalars(parameters, tensor, IN_PLACE, KIND)
    counter = finished_blocks + load_int32(parameters, SLOT[KIND]) + index
    start = block.to(tl.int64) * BLOCK
    if load_flag(tensor + SHAPE[IN_PLACE], SHAPE_VECTORISED) & (start + BLOCK <= size):
        before = _update_block(
            scalars, number, skip, counter, tensor, start, size, IN_PLACE, AMSGRAD, WEIGHTS, True
        )
    else:
        before = _update_block(
            scalars, number, skip, counter, tensor, start, size, IN_PLACE, AMSGRAD, WEIGHTS, False
        )
    if IN_PLACE:
        blocks = ((size + (BLOCK - 1)) // BLOCK).to(tl.int32)
        if before + 1 == blocks:
            tl.store(counter, 0)
            if skip == 0:
                step = load_pointer(tensor, STEP[IN_PLACE], tl.float32)
                tl.store(step, tl.load(step) + 1.0)
