#include "adamw_step.h"

#include <algorithm>

#include "float_environment.h"
#include "instruction_set.h"
#include "parallel.h"

namespace fused_adamw::cpu {
namespace {

// Below this many elements a thread costs more to wake (some microseconds) than it saves.
constexpr std::int64_t kElementsPerThread = 16384;

// Parts of a tensor begin at multiples of this, so that no two threads write to one cache line.
constexpr std::int64_t kPartAlignment = 64;

UpdateRange update_range_for(InstructionSet set) {
  switch (set) {
#if defined(__x86_64__)
    case InstructionSet::kAvx512:
      return avx512::update_range;
    case InstructionSet::kAvx2:
      return avx2::update_range;
#endif
    default:
      return baseline::update_range;
  }
}

// The updates laid end to end; part k of n gets the k-th n-th of the elements, whatever tensors they are in.
struct Work {
  const std::vector<TensorUpdate>& updates;
  std::vector<std::int64_t> first;  // updates[i] begins at element first[i]
  std::int64_t total = 0;
  UpdateRange update_range;

  explicit Work(const std::vector<TensorUpdate>& all)
      : updates(all), update_range(update_range_for(selected_instruction_set())) {
    first.reserve(all.size());
    for (const TensorUpdate& update : all) {
      first.push_back(total);
      total += update.size;
    }
  }

  void run_part(int part, int parts) const {
    const IeeeFloatEnvironment ieee;
    const std::int64_t begin = part_begin(part, parts);
    const std::int64_t end = part_begin(part + 1, parts);
    if (begin >= end) return;
    std::size_t i = std::upper_bound(first.begin(), first.end(), begin) - first.begin() - 1;
    for (; i < updates.size() && first[i] < end; ++i) {
      const std::int64_t size = updates[i].size;
      const std::int64_t from = align(begin - first[i], size);
      const std::int64_t to = align(end - first[i], size);
      if (from < to) update_range(updates[i], from, to);
    }
  }

 private:
  std::int64_t part_begin(int part, int parts) const {
    // No overflow: parts is a number of threads, the quotient at most total.
    return total / parts * part + total % parts * part / parts;
  }

  // A cut inside a tensor, moved to the alignment before it; the same for the part on either side.
  static std::int64_t align(std::int64_t position, std::int64_t size) {
    if (position <= 0) return 0;
    return position >= size ? size : position / kPartAlignment * kPartAlignment;
  }
};

}  // namespace

void adamw_step(const std::vector<TensorUpdate>& updates, int threads) {
  const Work work(updates);
  if (work.total == 0) return;
  const std::int64_t useful = (work.total + kElementsPerThread - 1) / kElementsPerThread;
  run_parallel(
      static_cast<int>(std::min<std::int64_t>(threads, useful)),
      [](void* context, int part, int parts) { static_cast<const Work*>(context)->run_part(part, parts); },
      const_cast<Work*>(&work));
}

}  // namespace fused_adamw::cpu
