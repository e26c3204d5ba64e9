// Random bits of stochastic rounding: Philox4x32-10, a function of a counter and a key without any state.
//
// Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011). The key is the
// tensor's seed; the counter is the place of four elements in it, and the number of the update. So every
// element of every update has 32 bits of its own, the same on every backend and however the work is shared.
#pragma once

#include "adamw_update.h"

namespace fused_adamw {

struct RandomBits {
  unsigned words[4];
};

// The bits of elements 4 * quad to 4 * quad + 3.
FUSED_ADAMW_FUNCTION RandomBits random_bits(unsigned long long seed, unsigned long long quad,
                                            unsigned long long update) {
  unsigned key0 = static_cast<unsigned>(seed);
  unsigned key1 = static_cast<unsigned>(seed >> 32);
  unsigned c0 = static_cast<unsigned>(quad);
  unsigned c1 = static_cast<unsigned>(quad >> 32);
  unsigned c2 = static_cast<unsigned>(update);
  unsigned c3 = static_cast<unsigned>(update >> 32);
  for (int round = 0; round < 10; ++round) {
    const unsigned long long product0 = 0xD2511F53ull * c0;
    const unsigned long long product1 = 0xCD9E8D57ull * c2;
    c0 = static_cast<unsigned>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<unsigned>(product1);
    c2 = static_cast<unsigned>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<unsigned>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace fused_adamw
