// The tree in which lanes are summed, on the host (see gradient_stats.h for the order).
#pragma once

#include "../gradient_stats.h"

namespace fused_adamw::cpu {

// Sums lanes[0 .. kLanes), of which those from `used` on are 0, and overwrites them.
static inline double sum_lanes(double* lanes, int used) {
  // A subtree of zeros adds nothing, so the tree over the least power of two that holds the used lanes gives
  // the same bits.
  int width = 1;
  while (width < used) width *= 2;
  double halved[kLanes / 2];
  for (; width > 1; width /= 2) {
    for (int i = 0; i < width / 2; ++i) halved[i] = lanes[2 * i] + lanes[2 * i + 1];
    for (int i = 0; i < width / 2; ++i) lanes[i] = halved[i];
  }
  return lanes[0];
}

}  // namespace fused_adamw::cpu
