// The elements of many tensors, laid end to end and shared out evenly among threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "float_environment.h"
#include "parallel.h"

namespace fused_adamw::cpu {

// Part k of n gets the k-th n-th of all elements, whatever tensors they are in: one parallel region serves a
// whole model, with large and small tensors in any order.
class ElementPartition {
 public:
  // A tensor is cut at multiples of `alignment` only. Below `elements_per_thread` a thread costs more to
  // wake than it saves.
  ElementPartition(std::int64_t alignment, std::int64_t elements_per_thread)
      : alignment_(alignment), elements_per_thread_(elements_per_thread) {}

  void add(std::int64_t size) {
    first_.push_back(total_);
    sizes_.push_back(size);
    total_ += size;
  }

  // Calls function(i, begin, end) for ranges of tensor i that cover each element once, on at most `threads`
  // threads, in IEEE arithmetic.
  template <typename Function>
  void run(int threads, const Function& function) const {
    if (total_ == 0) return;
    const std::int64_t useful = (total_ + elements_per_thread_ - 1) / elements_per_thread_;
    struct Context {
      const ElementPartition& partition;
      const Function& function;
    } context{*this, function};
    run_parallel(
        static_cast<int>(std::min<std::int64_t>(threads, useful)),
        [](void* data, int part, int parts) {
          const IeeeFloatEnvironment ieee;
          const Context& context = *static_cast<Context*>(data);
          context.partition.run_part(part, parts, context.function);
        },
        &context);
  }

 private:
  template <typename Function>
  void run_part(int part, int parts, const Function& function) const {
    const std::int64_t begin = part_begin(part, parts);
    const std::int64_t end = part_begin(part + 1, parts);
    if (begin >= end) return;
    std::size_t i = std::upper_bound(first_.begin(), first_.end(), begin) - first_.begin() - 1;
    for (; i < first_.size() && first_[i] < end; ++i) {
      const std::int64_t from = align(begin - first_[i], sizes_[i]);
      const std::int64_t to = align(end - first_[i], sizes_[i]);
      if (from < to) function(i, from, to);
    }
  }

  std::int64_t part_begin(int part, int parts) const {
    // No overflow: `parts` is a number of threads, and both quotients are at most total_.
    return total_ / parts * part + total_ % parts * part / parts;
  }

  // A cut inside a tensor, moved back to the alignment; the parts on its two sides agree on it.
  std::int64_t align(std::int64_t position, std::int64_t size) const {
    if (position <= 0) return 0;
    return position >= size ? size : position / alignment_ * alignment_;
  }

  std::int64_t alignment_;
  std::int64_t elements_per_thread_;
  std::int64_t total_ = 0;
  std::vector<std::int64_t> first_;  // tensor i begins at element first_[i]
  std::vector<std::int64_t> sizes_;
};

}  // namespace fused_adamw::cpu
