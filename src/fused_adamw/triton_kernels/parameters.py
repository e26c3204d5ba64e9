"""Reading the structs of ``csrc/cuda/launch_parameters.h``, at the offsets that the compiled module tells.

A struct is a pointer to its first byte; ``Struct.member`` of ``_C.CUDA_LAYOUT`` is a constant here. All
functions return scalars, which every thread of a program holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_adamw._C import CUDA_LAYOUT

SCALAR_VALUE = tl.constexpr(CUDA_LAYOUT["Scalar.value"])
SCALAR_POINTER = tl.constexpr(CUDA_LAYOUT["Scalar.pointer"])
SCALAR_CODE = tl.constexpr(CUDA_LAYOUT["Scalar.code"])
DEVICE_FLOAT32 = tl.constexpr(CUDA_LAYOUT["kDeviceFloat32"])
DEVICE_FLOAT64 = tl.constexpr(CUDA_LAYOUT["kDeviceFloat64"])
DEVICE_INT64 = tl.constexpr(CUDA_LAYOUT["kDeviceInt64"])
DEVICE_BOOL = tl.constexpr(CUDA_LAYOUT["kDeviceBool"])

SHAPE_SIZE = tl.constexpr(CUDA_LAYOUT["TensorShape.size"])
SHAPE_GRAD = tl.constexpr(CUDA_LAYOUT["TensorShape.grad"])
SHAPE_VECTORISED = tl.constexpr(CUDA_LAYOUT["TensorShape.vectorised"])
SHAPE_GROUP = tl.constexpr(CUDA_LAYOUT["TensorShape.group"])
FLOAT32 = tl.constexpr(CUDA_LAYOUT["kFloat32"])
FLOAT16 = tl.constexpr(CUDA_LAYOUT["kFloat16"])
BFLOAT16 = tl.constexpr(CUDA_LAYOUT["kBFloat16"])

INDEX_RUN = tl.constexpr(CUDA_LAYOUT["kIndexRun"])


@triton.jit
def load_int32(struct, OFFSET: tl.constexpr):
    """An ``int`` member."""
    return tl.load((struct + OFFSET).to(tl.pointer_type(tl.int32)))


@triton.jit
def load_int64(struct, OFFSET: tl.constexpr):
    """A ``long long`` member."""
    return tl.load((struct + OFFSET).to(tl.pointer_type(tl.int64)))


@triton.jit
def load_float64(struct, OFFSET: tl.constexpr):
    """A ``double`` member."""
    return tl.load((struct + OFFSET).to(tl.pointer_type(tl.float64)))


@triton.jit
def load_flag(struct, OFFSET: tl.constexpr):
    """Whether a ``bool`` member is set."""
    return tl.load(struct + OFFSET) != 0


@triton.jit
def load_pointer(struct, OFFSET: tl.constexpr, TYPE: tl.constexpr):
    """A pointer member, to elements of this type."""
    return load_int64(struct, OFFSET).to(tl.pointer_type(TYPE))


@triton.jit
def load_scalar(struct, OFFSET: tl.constexpr):
    """The float64 value of a ``Scalar`` member, wherever it lies."""
    scalar = struct + OFFSET
    value = load_float64(scalar, SCALAR_VALUE)
    code = load_int32(scalar, SCALAR_CODE)
    if code != 0:
        address = load_int64(scalar, SCALAR_POINTER)
        if code == DEVICE_FLOAT32:
            value = tl.load(address.to(tl.pointer_type(tl.float32))).to(tl.float64)
        elif code == DEVICE_FLOAT64:
            value = tl.load(address.to(tl.pointer_type(tl.float64)))
        elif code == DEVICE_INT64:
            value = tl.load(address.to(tl.pointer_type(tl.int64))).to(tl.float64)
        elif code == DEVICE_BOOL:
            value = (tl.load(address.to(tl.pointer_type(tl.uint8))) != 0).to(tl.float64)
    return value


@triton.jit
def find_tensor(parameters, block, FIRST_OF_RUN: tl.constexpr, FIRST: tl.constexpr, CAPACITY: tl.constexpr):
    """The last tensor that begins at or before a block, and that block's number in the tensor: int32.

    Two scans of 32 entries, as in ``device_support.cuh``: a warp counts each without a barrier.
    """
    block = block.to(tl.uint32)
    runs = (parameters + FIRST_OF_RUN).to(tl.pointer_type(tl.uint32))
    first = (parameters + FIRST).to(tl.pointer_type(tl.uint32))
    lanes = tl.arange(0, INDEX_RUN)
    run = -1
    for base in tl.static_range(0, CAPACITY // INDEX_RUN, INDEX_RUN):
        inside = base + lanes < CAPACITY // INDEX_RUN
        begun = inside & (tl.load(runs + base + lanes, mask=inside, other=0) <= block)
        run += tl.sum(begun.to(tl.int32), axis=0)
    begun = tl.load(first + run * INDEX_RUN + lanes) <= block
    tensor = run * INDEX_RUN - 1 + tl.sum(begun.to(tl.int32), axis=0)
    return tensor, (block - tl.load(first + tensor)).to(tl.int32)


@triton.jit
def half_to_float32(bits):
    """float16 numbers from their bits in uint16. Exact, subnormal numbers too."""
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def bfloat16_to_float32(bits):
    """bfloat16 numbers from their bits in uint16. Exact."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
