// The element loop of the CPU analysis. CMakeLists.txt compiles this file once per instruction set, with
// FUSED_ADAMW_INSTRUCTION_SET naming the namespace. Everything called here is inlined: see adamw_update.h.
#include "gradient_stats.h"
#include "half.h"
#include "lane_sum.h"

namespace fused_adamw::cpu::FUSED_ADAMW_INSTRUCTION_SET {
namespace {

constexpr std::uint32_t kInfinityBits = 0x7F800000u;

// What a chunk's elements have added up to so far.
struct Lanes {
  double squares[kLanes];       // as many as the chunk uses are set
  std::uint32_t max_bits = 0;   // of the magnitudes: their bits are in the order of their values
  std::uint32_t nonfinite = 0;  // all bits set once one was seen
};

// Two loops, each simple enough to be vectorised, over what stays in the first-level cache between them.
template <typename Element>
void add_pass(Lanes& lanes, const Element* elements, int count, float inverse_scale) {
  float magnitudes[kLanes];
  std::uint32_t max_bits = lanes.max_bits;
  std::uint32_t nonfinite = lanes.nonfinite;
  for (int lane = 0; lane < count; ++lane) {
    const float value = to_float32(elements[lane]) * inverse_scale;
    std::uint32_t bits = bits_of(value) & 0x7FFFFFFFu;
    // A raw NaN or infinity stays one under a positive scale, so the unscaled value tells of both.
    const std::uint32_t finite = bits < kInfinityBits ? ~0u : 0u;
    nonfinite |= ~finite;
    bits &= finite;
    max_bits = bits > max_bits ? bits : max_bits;
    magnitudes[lane] = float_of(bits);
  }
  lanes.max_bits = max_bits;
  lanes.nonfinite = nonfinite;
  for (int lane = 0; lane < count; ++lane) {
    const double magnitude = magnitudes[lane];
    lanes.squares[lane] += magnitude * magnitude;
  }
}

template <typename Element>
StatsRow analyze_elements(const Element* elements, std::int64_t count, float inverse_scale) {
  Lanes lanes;
  const int width = tree_width(count);
  for (int lane = 0; lane < width; ++lane) lanes.squares[lane] = 0.0;
  std::int64_t done = 0;
  for (; done + kLanes <= count; done += kLanes) add_pass(lanes, elements + done, kLanes, inverse_scale);
  add_pass(lanes, elements + done, static_cast<int>(count - done), inverse_scale);
  return make_row(float_of(lanes.max_bits), sum_lanes(lanes.squares, width), lanes.nonfinite != 0);
}

}  // namespace

StatsRow analyze_chunk(const Gradient& gradient, std::int64_t begin, std::int64_t end, float inverse_scale) {
  switch (gradient.type) {
    case kFloat16:
      return analyze_elements(static_cast<const Half*>(gradient.data) + begin, end - begin, inverse_scale);
    case kBFloat16:
      return analyze_elements(static_cast<const BFloat16*>(gradient.data) + begin, end - begin,
                              inverse_scale);
    case kFloat32:
      break;
  }
  return analyze_elements(static_cast<const float*>(gradient.data) + begin, end - begin, inverse_scale);
}

}  // namespace fused_adamw::cpu::FUSED_ADAMW_INSTRUCTION_SET
