#include "gradient_stats.h"

#include <algorithm>

#include "element_partition.h"
#include "instruction_set.h"
#include "lane_sum.h"

namespace fused_adamw::cpu {
namespace {

// An element costs less here than in a step, so a thread is worth waking for more of them.
constexpr std::int64_t kElementsPerThread = 2 * kElementsPerRow;

AnalyzeChunk analyze_chunk_for(InstructionSet set) {
  switch (set) {
#if defined(__x86_64__)
    case InstructionSet::kAvx512:
      return avx512::analyze_chunk;
    case InstructionSet::kAvx2:
      return avx2::analyze_chunk;
#endif
    default:
      return baseline::analyze_chunk;
  }
}

std::int64_t rows_of(std::int64_t count, std::int64_t per_row) { return (count + per_row - 1) / per_row; }

StatsRow merge_block(const StatsRow* rows, int count) {
  double squares[kLanes];
  float max_abs = 0.0f;
  bool nonfinite = false;
  const int width = tree_width(count);
  for (int i = count; i < width; ++i) squares[i] = 0.0;
  for (int i = 0; i < count; ++i) {
    squares[i] = sum_of_squares(rows[i]);
    max_abs = std::max(max_abs, rows[i].max_abs);
    nonfinite |= rows[i].nonfinite != 0.0f;
  }
  return make_row(max_abs, sum_lanes(squares, width), nonfinite);
}

}  // namespace

void analyze_gradients(const std::vector<Gradient>& gradients, float inverse_scale, StatsRow* rows,
                       int threads) {
  ElementPartition partition(kElementsPerRow, kElementsPerThread);
  std::vector<StatsRow*> first_row;
  first_row.reserve(gradients.size());
  for (const Gradient& gradient : gradients) {
    partition.add(gradient.size);
    first_row.push_back(rows);
    rows += rows_of(gradient.size, kElementsPerRow);
  }
  const AnalyzeChunk analyze_chunk = analyze_chunk_for(selected_instruction_set());
  partition.run(threads, [&](std::size_t i, std::int64_t begin, std::int64_t end) {
    for (; begin < end; begin += kElementsPerRow) {
      const std::int64_t chunk_end = std::min<std::int64_t>(begin + kElementsPerRow, end);
      first_row[i][begin / kElementsPerRow] = analyze_chunk(gradients[i], begin, chunk_end, inverse_scale);
    }
  });
}

void merge_rows(const StatsRow* rows, std::int64_t count, StatsRow* merged) {
  const IeeeFloatEnvironment ieee;
  for (std::int64_t first = 0; first < count; first += kRowsPerMerge) {
    *merged++ =
        merge_block(rows + first, static_cast<int>(std::min<std::int64_t>(kRowsPerMerge, count - first)));
  }
}

void merge_all_rows_by_stages(const StatsRow* rows, std::int64_t count, StatsRow* scratch, StatsRow* report) {
  if (count == 0) *report = make_row(0.0f, 0.0, false);
  while (count > kRowsPerMerge) {
    merge_rows(rows, count, scratch);
    rows = scratch;
    count = rows_of(count, kRowsPerMerge);
    scratch += count;
  }
  merge_rows(rows, count, report);
}

void merge_all_rows_serially(const StatsRow* rows, std::int64_t count, StatsRow* report) {
  const IeeeFloatEnvironment ieee;
  double squares = 0.0;
  float max_abs = 0.0f;
  bool nonfinite = false;
  for (std::int64_t i = 0; i < count; ++i) {
    squares += sum_of_squares(rows[i]);
    max_abs = std::max(max_abs, rows[i].max_abs);
    nonfinite |= rows[i].nonfinite != 0.0f;
  }
  *report = make_row(max_abs, squares, nonfinite);
}

}  // namespace fused_adamw::cpu
