// The gradient dtypes and their exact conversion to FP32 on the host.
#pragma once

#include <cstdint>
#include <cstring>

namespace fused_adamw {

enum class GradientType : std::uint8_t { kFloat32, kFloat16, kBFloat16 };

struct Half {
  std::uint16_t bits;
};

struct BFloat16 {
  std::uint16_t bits;
};

// `static` for the reason given in adamw_update.h.
static inline float float_from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float to_float32(float value) { return value; }

static inline float to_float32(BFloat16 value) {
  return float_from_bits(static_cast<std::uint32_t>(value.bits) << 16);
}

// Integer and FP32 operations only, without a branch or a table, so that it vectorises on every
// instruction set, baseline x86-64 included. Exact for all 65,536 values (a NaN stays a NaN).
static inline float to_float32(Half value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7FFFu;
  // Normal, infinite or NaN: exponent and mantissa in their FP32 places, 224 added to the exponent, so that
  // the all-ones exponent 31 becomes FP32's 255. The biases are 15 and 127: 2^(e + 224 - 127) * 2^-112 =
  // 2^(e - 15).
  const float normal = float_from_bits((magnitude << 13) + (0xE0u << 23)) * 0x1.0p-112f;
  // Subnormal: the mantissa as the low bits of a number with unit 2^-24, less that number's leading one.
  const float subnormal = float_from_bits(magnitude | (0x7Eu << 23)) - 0.5f;
  const float absolute = magnitude < 0x0400u ? subnormal : normal;
  std::uint32_t bits;
  std::memcpy(&bits, &absolute, sizeof bits);
  return float_from_bits(bits | sign);
}

}  // namespace fused_adamw
