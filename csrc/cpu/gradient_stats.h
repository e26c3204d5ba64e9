// Gradient statistics on the CPU.
#pragma once

#include <cstdint>
#include <vector>

#include "../gradient_stats.h"
#include "../low_precision.h"

namespace fused_adamw::cpu {

struct Gradient {
  std::int64_t size;  // elements
  const void* data;
  ElementType type;
};

// One row for each kElementsPerRow elements of each gradient, the gradients in order; an empty one has none.
// Elements are multiplied by `inverse_scale` first.
void analyze_gradients(const std::vector<Gradient>& gradients, float inverse_scale, StatsRow* rows,
                       int threads);

// One row for each kRowsPerMerge rows.
void merge_rows(const StatsRow* rows, std::int64_t count, StatsRow* merged);

// All rows into one: stage by stage with room in `scratch` for all rows between the first and the last stage,
// or, without scratch, one after another in a single sum.
void merge_all_rows_by_stages(const StatsRow* rows, std::int64_t count, StatsRow* scratch, StatsRow* report);
void merge_all_rows_serially(const StatsRow* rows, std::int64_t count, StatsRow* report);

// The row of elements [begin, end) of one gradient, at most kElementsPerRow; compiled once per instruction
// set.
using AnalyzeChunk = StatsRow (*)(const Gradient& gradient, std::int64_t begin, std::int64_t end,
                                  float inverse_scale);

namespace baseline {
StatsRow analyze_chunk(const Gradient& gradient, std::int64_t begin, std::int64_t end, float inverse_scale);
}
namespace avx2 {
StatsRow analyze_chunk(const Gradient& gradient, std::int64_t begin, std::int64_t end, float inverse_scale);
}
namespace avx512 {
StatsRow analyze_chunk(const Gradient& gradient, std::int64_t begin, std::int64_t end, float inverse_scale);
}

}  // namespace fused_adamw::cpu
