// The tree in which lanes are summed, on the host (see gradient_stats.h for the order).
#pragma once

#include <cstdint>

#include "../gradient_stats.h"

namespace fused_adamw::cpu {

// The width of the tree over the first `used` lanes, all others being 0: the least power of two that holds
// them. A subtree of zeros adds nothing, so the bits are those of the tree over all kLanes.
static inline int tree_width(std::int64_t used) {
  int width = 1;
  while (width < used && width < kLanes) width *= 2;
  return width;
}

// Sums lanes[0 .. width), `width` a power of two, and overwrites them.
static inline double sum_lanes(double* lanes, int width) {
  double halved[kLanes / 2];
  for (; width > 1; width /= 2) {
    for (int i = 0; i < width / 2; ++i) halved[i] = lanes[2 * i] + lanes[2 * i + 1];
    for (int i = 0; i < width / 2; ++i) lanes[i] = halved[i];
  }
  return lanes[0];
}

}  // namespace fused_adamw::cpu
