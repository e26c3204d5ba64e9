// The exact conversion of float16 to FP32 on the host; CUDA has instructions for it.
#pragma once

#include "../low_precision.h"

namespace fused_adamw {

// Integer and FP32 operations only, without a branch or a table, so that it vectorises on every
// instruction set, baseline x86-64 included. Exact for all 65,536 values (a NaN stays a NaN).
FUSED_ADAMW_FUNCTION float to_float32(Half value) {
  const unsigned sign = (value.bits & 0x8000u) << 16;
  const unsigned magnitude = value.bits & 0x7FFFu;
  // Normal, infinite or NaN: exponent and mantissa in their FP32 places, 224 added to the exponent, so that
  // the all-ones exponent 31 becomes FP32's 255. The biases are 15 and 127: 2^(e + 224 - 127) * 2^-112 =
  // 2^(e - 15).
  const float normal = float_of((magnitude << 13) + (0xE0u << 23)) * 0x1.0p-112f;
  // Subnormal: the mantissa as the low bits of a number with unit 2^-24, less that number's leading one.
  const float subnormal = float_of(magnitude | (0x7Eu << 23)) - 0.5f;
  return float_of(bits_of(magnitude < 0x0400u ? subnormal : normal) | sign);
}

}  // namespace fused_adamw
