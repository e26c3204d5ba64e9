// The formula, the row algebra and the roundings of fused_adamw in a program of their own: no torch, no
// Python.
//
// `fused-adamw verify --suite reference` compiles it with the user's compiler and compares its results with
// those of the installed CPU kernels. It reads numbers from the standard input, writes results to the
// standard output, and is as plain as can be: one loop, no threads, no vectors.
//
//   update: 8 doubles (lr, beta1, beta2, weight_decay, eps, grad_scale, clip, maximize), 3 int64 (amsgrad, t,
//           n), then n floats each of param, grad, exp_avg, exp_avg_sq and max_exp_avg_sq; writes the four
//           results
//   stats:  4 doubles (grad_scale, max_norm, epsilon, hierarchical), 1 int64 (n), n floats; writes the rows,
//           the report, and the clip coefficient as a double
//   round:  1 int64 (n), n floats, n uint32 (random bits); writes n uint16 each: bfloat16, nearest and by
//           chance, float16 likewise, the bfloat16 and the remainder of a split weight; n floats: the two
//           joined
//   random: 4 int64 (seed, the first four elements' number, update, n); writes 4 * n uint32
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "gradient_stats.h"
#include "low_precision.h"
#include "philox.h"
#include "update_scalars.h"

namespace {

using fused_adamw::StatsRow;

template <typename T>
std::vector<T> read(std::size_t count) {
  std::vector<T> values(count);
  if (count > 0 && std::fread(values.data(), sizeof(T), count, stdin) != count) {
    std::fprintf(stderr, "the input ends too early\n");
    std::exit(1);
  }
  return values;
}

template <typename T>
void write(const std::vector<T>& values) {
  if (std::fwrite(values.data(), sizeof(T), values.size(), stdout) != values.size()) std::exit(1);
}

void update() {
  const std::vector<double> numbers = read<double>(8);
  const std::vector<std::int64_t> counts = read<std::int64_t>(3);
  const bool amsgrad = counts[0] != 0;
  const std::size_t n = static_cast<std::size_t>(counts[2]);
  std::vector<float> param = read<float>(n);
  const std::vector<float> grad = read<float>(n);
  std::vector<float> exp_avg = read<float>(n);
  std::vector<float> exp_avg_sq = read<float>(n);
  std::vector<float> max_exp_avg_sq = read<float>(n);
  const fused_adamw::StepOptions options = {numbers[0], numbers[1], numbers[2], numbers[3],
                                            numbers[4], numbers[5], numbers[6], numbers[7] != 0.0};
  const fused_adamw::UpdateScalars scalars = fused_adamw::update_scalars(options, counts[1]);
  for (std::size_t i = 0; i < n; ++i) {
    const fused_adamw::Element old = {param[i], exp_avg[i], exp_avg_sq[i], max_exp_avg_sq[i]};
    const fused_adamw::Element element = amsgrad ? fused_adamw::adamw_update<true>(old, grad[i], scalars)
                                                 : fused_adamw::adamw_update<false>(old, grad[i], scalars);
    param[i] = element.param;
    exp_avg[i] = element.exp_avg;
    exp_avg_sq[i] = element.exp_avg_sq;
    max_exp_avg_sq[i] = element.max_exp_avg_sq;
  }
  write(param);
  write(exp_avg);
  write(exp_avg_sq);
  write(max_exp_avg_sq);
}

// The tree over all lanes, by recursion: ((0+1)+(2+3))+...
double sum_tree(const double* lanes, int width) {
  if (width == 1) return lanes[0];
  return sum_tree(lanes, width / 2) + sum_tree(lanes + width / 2, width / 2);
}

StatsRow analyze(const float* values, std::size_t count, float inverse_scale) {
  std::vector<double> lanes(fused_adamw::kLanes, 0.0);
  float max_abs = 0.0f;
  bool nonfinite = false;
  for (std::size_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(values[i] * inverse_scale);
    if (!std::isfinite(magnitude)) {
      nonfinite = true;
      continue;
    }
    if (magnitude > max_abs) max_abs = magnitude;
    lanes[i % fused_adamw::kLanes] += static_cast<double>(magnitude) * magnitude;
  }
  return fused_adamw::make_row(max_abs, sum_tree(lanes.data(), fused_adamw::kLanes), nonfinite);
}

StatsRow merge(const std::vector<StatsRow>& rows, std::size_t begin, std::size_t end, bool by_tree) {
  std::vector<double> lanes(fused_adamw::kLanes, 0.0);
  float max_abs = 0.0f;
  double sum = 0.0;
  bool nonfinite = false;
  for (std::size_t i = begin; i < end; ++i) {
    const double squares = fused_adamw::sum_of_squares(rows[i]);
    if (by_tree) lanes[i - begin] = squares;
    sum += squares;
    if (rows[i].max_abs > max_abs) max_abs = rows[i].max_abs;
    nonfinite = nonfinite || rows[i].nonfinite != 0.0f;
  }
  if (by_tree) sum = sum_tree(lanes.data(), fused_adamw::kLanes);
  return fused_adamw::make_row(max_abs, sum, nonfinite);
}

std::vector<StatsRow> merge_stage(const std::vector<StatsRow>& rows) {
  std::vector<StatsRow> merged;
  const std::size_t width = fused_adamw::kRowsPerMerge;
  for (std::size_t begin = 0; begin < rows.size(); begin += width) {
    merged.push_back(merge(rows, begin, begin + width < rows.size() ? begin + width : rows.size(), true));
  }
  return merged;
}

void stats() {
  const std::vector<double> numbers = read<double>(4);
  const std::size_t n = static_cast<std::size_t>(read<std::int64_t>(1)[0]);
  const std::vector<float> values = read<float>(n);
  const float inverse_scale = fused_adamw::inverse_grad_scale(numbers[0]);
  std::vector<StatsRow> rows;
  const std::size_t width = fused_adamw::kElementsPerRow;
  for (std::size_t begin = 0; begin < n; begin += width) {
    rows.push_back(analyze(values.data() + begin, begin + width < n ? width : n - begin, inverse_scale));
  }
  write(rows);
  StatsRow report = {0.0f, 0.0f, 0.0f};
  if (numbers[3] == 0.0) {
    report = merge(rows, 0, rows.size(), false);
  } else if (!rows.empty()) {
    do rows = merge_stage(rows);
    while (rows.size() > 1);
    report = rows[0];
  }
  write(std::vector<StatsRow>{report});
  write(std::vector<double>{fused_adamw::clip_coefficient(report, numbers[1], numbers[2])});
}

template <typename Param>
void round_all(const std::vector<float>& values, const std::vector<std::uint32_t>& random) {
  std::vector<std::uint16_t> nearest;
  std::vector<std::uint16_t> by_chance;
  for (std::size_t i = 0; i < values.size(); ++i) {
    nearest.push_back(fused_adamw::round_to_nearest(values[i], Param{}).bits);
    by_chance.push_back(fused_adamw::round_stochastically(values[i], random[i], Param{}).bits);
  }
  write(nearest);
  write(by_chance);
}

void round_weights() {
  const std::size_t n = static_cast<std::size_t>(read<std::int64_t>(1)[0]);
  const std::vector<float> values = read<float>(n);
  const std::vector<std::uint32_t> random = read<std::uint32_t>(n);
  round_all<fused_adamw::BFloat16>(values, random);
  round_all<fused_adamw::Half>(values, random);
  std::vector<std::uint16_t> params;
  std::vector<std::uint16_t> remainders;
  std::vector<float> joined;
  for (const float value : values) {
    const fused_adamw::SplitWeight split = fused_adamw::split_weight(value);
    params.push_back(split.param.bits);
    remainders.push_back(split.remainder);
    joined.push_back(fused_adamw::join_weight(split.param, split.remainder));
  }
  write(params);
  write(remainders);
  write(joined);
}

void random_words() {
  const std::vector<std::int64_t> numbers = read<std::int64_t>(4);
  std::vector<fused_adamw::RandomBits> bits;
  for (std::int64_t i = 0; i < numbers[3]; ++i) {
    bits.push_back(fused_adamw::random_bits(static_cast<std::uint64_t>(numbers[0]),
                                            static_cast<std::uint64_t>(numbers[1] + i),
                                            static_cast<std::uint64_t>(numbers[2])));
  }
  write(bits);
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 2 && std::strcmp(arguments[1], "update") == 0) {
    update();
  } else if (count == 2 && std::strcmp(arguments[1], "stats") == 0) {
    stats();
  } else if (count == 2 && std::strcmp(arguments[1], "round") == 0) {
    round_weights();
  } else if (count == 2 && std::strcmp(arguments[1], "random") == 0) {
    random_words();
  } else {
    std::fprintf(stderr, "update, stats, round or random is required\n");
    return 1;
  }
  return std::fflush(stdout) == 0 ? 0 : 1;
}
