// Weights of 16-bit parameters: an FP32 master weight, and the parameter that is its rounding.
//
// The update formula works on the master weight; the parameter is written in the same pass. Like the formula,
// this is compiled for the CPU and for CUDA, in integer operations and FP32 operations that round once, so
// that both have the same bits.
#pragma once

#include "adamw_update.h"

namespace fused_adamw {

struct Half {
  unsigned short bits;
};

struct BFloat16 {
  unsigned short bits;
};

// The dtypes of parameters and gradients.
enum ElementType : unsigned char { kFloat32, kFloat16, kBFloat16 };

// How the weights of a tensor are kept.
enum WeightForm : unsigned char {
  kFloat32Weights,     // the parameter is FP32 itself
  kMasterWeights,      // an FP32 master beside a 16-bit parameter, which is its nearest number
  kStochasticWeights,  // the same, the parameter being one of its two neighbours, by chance
  kSplitWeights,       // a bfloat16 parameter and the 16 bits by which the master differs from it
};

FUSED_ADAMW_FUNCTION unsigned bits_of(float x) {
#if defined(__CUDACC__)
  return __float_as_uint(x);
#else
  unsigned bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

FUSED_ADAMW_FUNCTION float float_of(unsigned bits) {
#if defined(__CUDACC__)
  return __uint_as_float(bits);
#else
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

FUSED_ADAMW_FUNCTION float to_float32(float value) { return value; }

FUSED_ADAMW_FUNCTION float to_float32(BFloat16 value) {
  return float_of(static_cast<unsigned>(value.bits) << 16);
}

// All roundings below take a canonical NaN, and make one: 0x7fc0, 0x7e00.

// The nearest number, of two the even one.
FUSED_ADAMW_FUNCTION BFloat16 round_to_nearest(float x, BFloat16) {
  const unsigned bits = bits_of(x);
  return {static_cast<unsigned short>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}

// One of the two neighbours; the farther away x is from one, the less often it is that one. `random` has 32
// random bits, of which 0 rounds to 0 and all ones away from it.
FUSED_ADAMW_FUNCTION BFloat16 round_stochastically(float x, unsigned random, BFloat16) {
  return {static_cast<unsigned short>((bits_of(x) + (random >> 16)) >> 16)};
}

// The float16 of x, for which `rounded` has the bits of |x| with its rounding added, where the result is a
// normal number, and `units` is the rounding of |x| / 2^-24, where it is subnormal.
FUSED_ADAMW_FUNCTION Half assemble_half(float x, unsigned rounded, unsigned units) {
  const unsigned sign = bits_of(x) >> 16 & 0x8000u;
  const unsigned magnitude = bits_of(x) & 0x7FFFFFFFu;
  unsigned normal = (rounded >> 13) - (112u << 10);  // the exponent's bias is 15, not 127
  normal = normal < 0x7C00u ? normal : 0x7C00u;
  unsigned result = magnitude < 0x38800000u ? units : normal;  // 2^-14
  result = magnitude > 0x7F800000u ? 0x7E00u : result;
  return {static_cast<unsigned short>(sign | result)};
}

FUSED_ADAMW_FUNCTION Half round_to_nearest(float x, Half) {
  const unsigned magnitude = bits_of(x) & 0x7FFFFFFFu;
  const unsigned rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
  // One unit in the last place of 0.5 is the unit of float16's subnormal numbers.
  const unsigned units = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  return assemble_half(x, rounded, units);
}

FUSED_ADAMW_FUNCTION Half round_stochastically(float x, unsigned random, Half) {
  const unsigned magnitude = bits_of(x) & 0x7FFFFFFFu;
  const float scaled = float_of(magnitude) * 0x1.0p24f;
  const float subnormal = scaled < 1024.0f ? scaled : 1024.0f;
  const int whole = static_cast<int>(subnormal);
  const float fraction = subnormal - static_cast<float>(whole);
  // A chance in steps of 2^-24; all ones round up whatever is above 0.
  const float threshold = static_cast<float>(static_cast<int>(~random >> 8)) * 0x1.0p-24f;
  const unsigned units = static_cast<unsigned>(whole + (threshold < fraction ? 1 : 0));
  return assemble_half(x, magnitude + (random >> 19), units);
}

// The value to update: the master weight, if the parameter is a rounding of it. Else someone wrote to the
// parameter (loaded weights, say), which then counts.
template <bool kStochastic, typename Param>
FUSED_ADAMW_FUNCTION float current_master(float master, Param param) {
  const float value = canonical_nan(master);
  bool agrees;
  if (kStochastic) {
    agrees = round_stochastically(value, 0u, param).bits == param.bits ||
             round_stochastically(value, 0xFFFFFFFFu, param).bits == param.bits;
  } else {
    agrees = round_to_nearest(value, param).bits == param.bits;
  }
  return agrees ? value : to_float32(param);
}

// A master weight as a bfloat16 and the signed 16 bits by which its bits differ from those of the bfloat16.
// Exact for every FP32 number, infinity included: the bfloat16 is the nearest number, of two the greater in
// magnitude, for to be even in half of the cases would take a 17th bit.
struct SplitWeight {
  BFloat16 param;
  unsigned short remainder;
};

FUSED_ADAMW_FUNCTION SplitWeight split_weight(float master) {
  const unsigned bits = bits_of(master);
  return {{static_cast<unsigned short>((bits + 0x8000u) >> 16)}, static_cast<unsigned short>(bits)};
}

// Where someone else wrote to the parameter, the old remainder is less than half a unit in its last place.
// Below a zero (of a mask that prunes, say) or beyond an infinity there is no number: the parameter counts
// then.
FUSED_ADAMW_FUNCTION float join_weight(BFloat16 param, unsigned short remainder) {
  const int difference = static_cast<short>(remainder);
  const float master =
      float_of((static_cast<unsigned>(param.bits) << 16) + static_cast<unsigned>(difference));
  return master == master ? master : to_float32(param);
}

}  // namespace fused_adamw
