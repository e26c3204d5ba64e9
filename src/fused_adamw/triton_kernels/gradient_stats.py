"""Gradient statistics: one read of each gradient (4 or 2 bytes per element), 12 bytes written per 16,384.

Mirrors the algebra of ``csrc/gradient_stats.h`` and the programs of ``csrc/cuda``. A tensor
of 1024 float64 values holds the lanes; the tree over neighbours halves it ten times. Each sum is of two
values, so no order is left to the compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_adamw._C import CUDA_LAYOUT
from fused_adamw.triton_kernels.formula import INFINITY_BITS, inverse_grad_scale
from fused_adamw.triton_kernels.parameters import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    SHAPE_GRAD,
    SHAPE_SIZE,
    SHAPE_VECTORISED,
    bfloat16_to_float32,
    find_tensor,
    half_to_float32,
    load_flag,
    load_int32,
    load_int64,
    load_pointer,
    load_scalar,
)

LANES = tl.constexpr(CUDA_LAYOUT["kLanes"])
ELEMENTS_PER_ROW = tl.constexpr(CUDA_LAYOUT["kElementsPerRow"])
# Accesses of a thread that are under way together.
IN_FLIGHT = tl.constexpr(8)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)

CAPACITY = tl.constexpr(CUDA_LAYOUT["AnalyzeParameters.capacity"])
GRAD_SCALE = tl.constexpr(CUDA_LAYOUT["AnalyzeParameters.grad_scale"])
ANALYZE_ROWS = tl.constexpr(CUDA_LAYOUT["AnalyzeParameters.rows"])
GRADIENTS = tl.constexpr(CUDA_LAYOUT["AnalyzeParameters.gradients"])
FIRST_OF_RUN = tl.constexpr(CUDA_LAYOUT["AnalyzeParameters.index.first_of_run"])
FIRST = tl.constexpr(CUDA_LAYOUT["AnalyzeParameters.index.first"])
GRADIENT_BYTES = tl.constexpr(CUDA_LAYOUT["GradientTensor"])
GRADIENT_GRAD = tl.constexpr(CUDA_LAYOUT["GradientTensor.grad"])
GRADIENT_SHAPE = tl.constexpr(CUDA_LAYOUT["GradientTensor.shape"])

MERGE_ROWS = tl.constexpr(CUDA_LAYOUT["MergeParameters.rows"])
MERGE_SCRATCH = tl.constexpr(CUDA_LAYOUT["MergeParameters.scratch"])
MERGE_REPORT = tl.constexpr(CUDA_LAYOUT["MergeParameters.report"])
MERGE_COUNT = tl.constexpr(CUDA_LAYOUT["MergeParameters.count"])
MERGE_SLOT = tl.constexpr(CUDA_LAYOUT["MergeParameters.slot"])


@triton.jit
def tree_sum(lanes):
    """The sum of 1024 float64 lanes by a binary tree over neighbours."""
    WIDTHS: tl.constexpr = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
    for i in tl.static_range(10):
        lanes = tl.sum(tl.reshape(lanes, (WIDTHS[i], 2)), axis=1)
    return tl.sum(lanes, axis=0)


@triton.jit
def store_row(rows, index, squares, max_bits, nonfinite):
    """``make_row`` of three scalars, into row ``index``."""
    max_abs = max_bits.to(tl.float32, bitcast=True)
    scale = max_abs.to(tl.float64) * max_abs.to(tl.float64)
    tl.store(rows + 3 * index, max_abs)
    tl.store(rows + 3 * index + 1, tl.where(max_abs > 0.0, (squares / scale).to(tl.float32), 0.0))
    tl.store(rows + 3 * index + 2, (nonfinite != 0).to(tl.float32))


@triton.jit
def _to_float32(bits, CODE: tl.constexpr):
    """Gradients of a type from their bits in uint32 or uint16."""
    if CODE == FLOAT16:
        values = half_to_float32(bits)
    elif CODE == BFLOAT16:
        values = bfloat16_to_float32(bits)
    else:
        values = bits.to(tl.float32, bitcast=True)
    return values


@triton.jit
def _add_values(squares, max_bits, nonfinite, values):
    """Adds one value to each lane."""
    bits = values.to(tl.uint32, bitcast=True) & MAGNITUDE_BITS
    finite = bits < INFINITY_BITS
    bits = tl.where(finite, bits, 0)
    magnitude = bits.to(tl.float32, bitcast=True).to(tl.float64)
    return squares + magnitude * magnitude, tl.maximum(bits, max_bits), nonfinite | (finite == 0).to(tl.int32)


@triton.jit
def _sum_row(address, first, count, vectorised, inverse_scale, CODE: tl.constexpr):
    """Lane sums, lane maxima and whether any is not finite, of one row's elements."""
    lanes = tl.arange(0, LANES)
    BYTES: tl.constexpr = 4 if CODE == FLOAT32 else 2
    TYPE: tl.constexpr = tl.uint16 if BYTES == 2 else tl.uint32
    squares = tl.full((LANES,), 0.0, tl.float64)
    max_bits = tl.full((LANES,), 0, tl.uint32)
    nonfinite = tl.full((LANES,), 0, tl.int32)
    if vectorised & (count == ELEMENTS_PER_ROW):
        # Formed here, not before: what it promises must not reach the other branch.
        aligned = tl.multiple_of(address.to(tl.pointer_type(TYPE)) + first, 4 * BYTES)
        for start in tl.range(0, ELEMENTS_PER_ROW, LANES * IN_FLIGHT, loop_unroll_factor=1):
            for i in tl.static_range(IN_FLIGHT):
                values = _to_float32(tl.load(aligned + start + i * LANES + lanes), CODE) * inverse_scale
                squares, max_bits, nonfinite = _add_values(squares, max_bits, nonfinite, values)
    else:
        row = address.to(tl.pointer_type(TYPE)) + first
        remaining = count.to(tl.int32)
        while remaining > 0:
            # The zeros in place of what is not there count for nothing. A scale whose reciprocal makes NaNs
            # of them leaves no element finite.
            inside = lanes < remaining
            values = _to_float32(tl.load(row + lanes, mask=inside, other=0), CODE) * inverse_scale
            squares, max_bits, nonfinite = _add_values(squares, max_bits, nonfinite, values)
            row += LANES
            remaining -= LANES
    return squares, max_bits, nonfinite


@triton.jit
def _reduce(squares, max_bits, nonfinite):
    """Lanes into three scalars."""
    return tree_sum(squares), tl.max(max_bits, axis=0), tl.max(nonfinite, axis=0)


@triton.jit
def _merge_block(rows, count, target, index):
    """Up to 1024 rows into row ``index`` of ``target``."""
    lanes = tl.arange(0, LANES)
    inside = lanes < count
    # Through the second-level cache: the rows may have been written by other programs of this launch.
    max_abs = tl.load(rows + 3 * lanes, mask=inside, other=0.0, cache_modifier=".cg")
    scaled = tl.load(rows + 3 * lanes + 1, mask=inside, other=0.0, cache_modifier=".cg")
    nonfinite = tl.load(rows + 3 * lanes + 2, mask=inside, other=0.0, cache_modifier=".cg")
    wide = max_abs.to(tl.float64)
    squares, max_bits, any_nonfinite = _reduce(
        wide * wide * scaled.to(tl.float64),
        max_abs.to(tl.uint32, bitcast=True),
        (nonfinite != 0.0).to(tl.int32),
    )
    store_row(target, index, squares, max_bits, any_nonfinite)


@triton.jit
def _all_finished(counter, programs):
    """Whether this is the last of so many programs to get here; it may then read what the others wrote."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1 == programs
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _groups_of(rows):
    """How many groups of up to 1024 so many rows make."""
    return (rows + (LANES - 1)) // LANES


@triton.jit
def _merge_group(merge, finished_blocks, group):
    """Group ``group`` of up to 1024 rows into one; the program that comes last goes on with later stages."""
    rows = load_pointer(merge, MERGE_ROWS, tl.float32)
    scratch = load_pointer(merge, MERGE_SCRATCH, tl.float32)
    report = load_pointer(merge, MERGE_REPORT, tl.float32)
    count = load_int64(merge, MERGE_COUNT)
    groups = _groups_of(count)
    first = group * LANES
    if groups == 1:
        _merge_block(rows, count, report, 0)
    else:
        _merge_block(rows + 3 * first, count - first, scratch, group)
        counter = finished_blocks + load_int32(merge, MERGE_SLOT)
        if _all_finished(counter, groups.to(tl.int32)):
            rows = scratch
            while groups > 1:
                count = groups
                groups = _groups_of(count)
                target = rows + 3 * count
                if groups == 1:
                    target = report
                i = groups * 0
                while i < groups:
                    _merge_block(rows + 3 * i * LANES, count - i * LANES, target, i)
                    i += 1
                # The next stage reads what the first thread has written.
                tl.debug_barrier()
                rows = target


@triton.jit
def analyze_gradients(parameters, finished_blocks):
    """Grid: one program per row of ``AnalyzeParameters``.

    From the last row to the first: a step, which begins at the front, then finds what was read last in the
    second-level cache.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    index, block_of_tensor = find_tensor(parameters, block, FIRST_OF_RUN, FIRST, CAPACITY)
    tensor = parameters + GRADIENTS + index * GRADIENT_BYTES
    shape = tensor + GRADIENT_SHAPE
    first = block_of_tensor.to(tl.int64) * ELEMENTS_PER_ROW
    count = tl.minimum(load_int64(shape, SHAPE_SIZE) - first, ELEMENTS_PER_ROW)
    inverse_scale = inverse_grad_scale(load_scalar(parameters, GRAD_SCALE))
    address = load_int64(tensor, GRADIENT_GRAD)
    code = tl.load(shape + SHAPE_GRAD)
    vectorised = load_flag(shape, SHAPE_VECTORISED)
    if code == FLOAT16:
        lanes = _sum_row(address, first, count, vectorised, inverse_scale, FLOAT16)
    elif code == BFLOAT16:
        lanes = _sum_row(address, first, count, vectorised, inverse_scale, BFLOAT16)
    else:
        lanes = _sum_row(address, first, count, vectorised, inverse_scale, FLOAT32)
    squares, max_bits, nonfinite = _reduce(lanes[0], lanes[1], lanes[2])
    rows = load_pointer(parameters, ANALYZE_ROWS, tl.float32)
    store_row(rows, block.to(tl.int64), squares, max_bits, nonfinite)


@triton.jit
def merge_rows(parameters, finished_blocks):
    """Grid: one program per 1024 rows of ``MergeParameters``. One stage."""
    group = tl.program_id(0).to(tl.int64)
    rows = load_pointer(parameters, MERGE_ROWS, tl.float32) + 3 * group * LANES
    count = load_int64(parameters, MERGE_COUNT) - group * LANES
    _merge_block(rows, count, load_pointer(parameters, MERGE_REPORT, tl.float32), group)


@triton.jit
def merge_all_rows(parameters, finished_blocks):
    """Grid: one program per 1024 rows of ``MergeParameters``. All stages."""
    _merge_group(parameters, finished_blocks, tl.program_id(0).to(tl.int64))


@triton.jit
def merge_all_rows_serially(parameters, finished_blocks):
    """Grid: one program. All rows in a single sum, one after another."""
    row = load_pointer(parameters, MERGE_ROWS, tl.float32)
    remaining = load_int64(parameters, MERGE_COUNT)
    squares = tl.full((), 0.0, tl.float64)
    max_abs = tl.full((), 0.0, tl.float32)
    nonfinite = tl.full((), 0, tl.int32)
    while remaining > 0:
        own_max = tl.load(row)
        squares += own_max.to(tl.float64) * own_max.to(tl.float64) * tl.load(row + 1).to(tl.float64)
        max_abs = tl.maximum(max_abs, own_max)
        nonfinite |= (tl.load(row + 2) != 0.0).to(tl.int32)
        row += 3
        remaining -= 1
    report = load_pointer(parameters, MERGE_REPORT, tl.float32)
    store_row(report, 0, squares, max_abs.to(tl.uint32, bitcast=True), nonfinite)
