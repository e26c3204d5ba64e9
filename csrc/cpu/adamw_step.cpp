#include "adamw_step.h"

#include "element_partition.h"
#include "instruction_set.h"

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

}  // namespace

void adamw_step(const std::vector<TensorUpdate>& updates, int threads) {
  ElementPartition partition(kPartAlignment, kElementsPerThread);
  for (const TensorUpdate& update : updates) partition.add(update.size);
  const UpdateRange update_range = update_range_for(selected_instruction_set());
  partition.run(threads, [&](std::size_t i, std::int64_t begin, std::int64_t end) {
    update_range(updates[i], begin, end);
  });
}

}  // namespace fused_adamw::cpu
