"""Weights of 16-bit parameters: mirrors ``csrc/low_precision.h`` and ``csrc/philox.h``.

16-bit numbers are held as their bits in uint16. As for the formula, the tests hold the bits equal to those of
the headers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_adamw.triton_kernels.formula import canonical_nan
from fused_adamw.triton_kernels.parameters import FLOAT16, bfloat16_to_float32, half_to_float32


@triton.jit
def bits_of(x):
    """The bits of float32 numbers."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def to_float32(bits, TYPE_CODE):
    """float16 or bfloat16 numbers; the code is a scalar. Exact."""
    if TYPE_CODE == FLOAT16:
        value = half_to_float32(bits)
    else:
        value = bfloat16_to_float32(bits)
    return value


@triton.jit
def _assemble_half(x, rounded, units):
    sign = (bits_of(x) >> 16) & 0x8000
    magnitude = bits_of(x) & 0x7FFFFFFF
    normal = (rounded >> 13) - (112 << 10)
    normal = tl.where(normal < 0x7C00, normal, 0x7C00)
    result = tl.where(magnitude < 0x38800000, units, normal)
    result = tl.where(magnitude > 0x7F800000, 0x7E00, result)
    return (sign | result).to(tl.uint16)


@triton.jit
def _round_half(x):
    magnitude = bits_of(x) & 0x7FFFFFFF
    rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1)
    units = bits_of(magnitude.to(tl.float32, bitcast=True) + 0.5) - 0x3F000000
    return _assemble_half(x, rounded, units)


@triton.jit
def _round_half_stochastically(x, random):
    magnitude = bits_of(x) & 0x7FFFFFFF
    scaled = magnitude.to(tl.float32, bitcast=True) * 16777216.0
    subnormal = tl.where(scaled < 1024.0, scaled, 1024.0)
    whole = subnormal.to(tl.int32)
    fraction = subnormal - whole.to(tl.float32)
    threshold = ((random ^ 0xFFFFFFFF) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    units = (whole + (threshold < fraction).to(tl.int32)).to(tl.uint32)
    return _assemble_half(x, magnitude + (random >> 19), units)


@triton.jit
def round_to_nearest(x, TYPE_CODE):
    """The nearest float16 or bfloat16 number, of two the even one."""
    if TYPE_CODE == FLOAT16:
        bits = _round_half(x)
    else:
        bits = ((bits_of(x) + 0x7FFF + ((bits_of(x) >> 16) & 1)) >> 16).to(tl.uint16)
    return bits


@triton.jit
def round_stochastically(x, random, TYPE_CODE):
    """One of the two neighbours, by 32 random bits each."""
    if TYPE_CODE == FLOAT16:
        bits = _round_half_stochastically(x, random)
    else:
        bits = ((bits_of(x) + (random >> 16)) >> 16).to(tl.uint16)
    return bits


@triton.jit
def current_master(master, param, TYPE_CODE, STOCHASTIC: tl.constexpr):
    """The master weight, if the parameter is a rounding of it; else the parameter."""
    value = canonical_nan(master)
    if STOCHASTIC:
        none = bits_of(value) & 0
        agrees = round_stochastically(value, none, TYPE_CODE) == param
        agrees |= round_stochastically(value, none ^ 0xFFFFFFFF, TYPE_CODE) == param
    else:
        agrees = round_to_nearest(value, TYPE_CODE) == param
    return tl.where(agrees, value, to_float32(param, TYPE_CODE))


@triton.jit
def split_weight(master):
    """A master weight as the bits of a bfloat16 and those of the remainder."""
    return ((bits_of(master) + 0x8000) >> 16).to(tl.uint16), (bits_of(master) & 0xFFFF).to(tl.uint16)


@triton.jit
def join_weight(param, remainder):
    """The master weight from the bits of a bfloat16 and those of the remainder; else the bfloat16."""
    difference = remainder.to(tl.int16, bitcast=True).to(tl.int32)
    bits = (param.to(tl.uint32) << 16).to(tl.int32, bitcast=True) + difference
    master = bits.to(tl.float32, bitcast=True)
    return tl.where(master == master, master, bfloat16_to_float32(param))


@triton.jit
def random_bits(seed, first_quad, update_number, QUADS: tl.constexpr):
    """32 bits for each element of so many quads, in the order of the elements: Philox4x32-10.

    ``seed``, ``first_quad`` and ``update_number`` are int64 scalars.
    """
    quad = (first_quad + tl.arange(0, QUADS)).to(tl.uint64, bitcast=True)
    key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = (quad & 0xFFFFFFFF).to(tl.uint32)
    c1 = (quad >> 32).to(tl.uint32)
    c2 = (c0 & 0) + (update_number & 0xFFFFFFFF).to(tl.uint32)
    c3 = (c0 & 0) + ((update_number >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c1 = (product1 & 0xFFFFFFFF).to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c3 = (product0 & 0xFFFFFFFF).to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (4 * QUADS,))
