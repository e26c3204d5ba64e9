#include "tensor_table.h"

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace fused_adamw {
namespace {

struct FingerprintHash {
  std::size_t operator()(const Fingerprint& fingerprint) const { return fingerprint.low; }
};

// Models in a process, times their groups, are few; a program that makes up layouts without end must not
// make the memories grow without end.
constexpr std::size_t kRememberedLayouts = 4096;
constexpr std::size_t kRememberedCalls = 64;

std::unordered_set<Fingerprint, FingerprintHash>& known_layouts() {
  static std::unordered_set<Fingerprint, FingerprintHash> layouts;
  return layouts;
}

struct Interval {
  std::uintptr_t begin;
  std::uintptr_t end;
  TensorPosition position;
};

using Intervals = std::vector<Interval>;

template <typename Function>
void for_each_tensor(const std::vector<const TensorTable*>& tables, bool written, Function function) {
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const auto& lists = tables[t]->lists();
    for (std::size_t l = 0; l < lists.size(); ++l) {
      if (lists[l].written != written) continue;
      for (std::size_t i = 0; i < lists[l].tensors.size(); ++i) {
        const TensorView& tensor = lists[l].tensors[i];
        if (tensor.size == 0) continue;
        const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data);
        function(Interval{begin, begin + static_cast<std::uintptr_t>(tensor.bytes), {t, l, i}});
      }
    }
  }
}

// What a call writes, in the order of its tensors and in that of the addresses; and what it read the last
// time, which shared nothing with that.
struct CallMemory {
  Intervals written;
  Intervals sorted;
  Intervals read;
  bool elementwise = false;
};

// The numbers of tensors and the first address of each written list.
Fingerprint sketch_written(const std::vector<const TensorTable*>& tables) {
  Fingerprint key;
  for (const TensorTable* table : tables) {
    for (const TensorTable::List& list : table->lists()) {
      if (!list.written) continue;
      key.add(list.tensors.size());
      if (!list.tensors.empty()) key.add(reinterpret_cast<std::uintptr_t>(list.tensors.front().data));
    }
  }
  return key;
}

// Whether these are the tensors that the tables write, or read, at the same places of the same lists.
bool are_tensors(const Intervals& expected, const std::vector<const TensorTable*>& tables, bool written) {
  std::size_t i = 0;
  bool same = true;
  for_each_tensor(tables, written, [&](const Interval& interval) {
    same = same && i < expected.size() && interval.begin == expected[i].begin &&
           interval.end == expected[i].end && interval.position.table == expected[i].position.table &&
           interval.position.list == expected[i].position.list &&
           interval.position.index == expected[i].position.index;
    ++i;
  });
  return same && i == expected.size();
}

Intervals intervals_of(const std::vector<const TensorTable*>& tables, bool written) {
  Intervals intervals;
  for_each_tensor(tables, written, [&](const Interval& interval) { intervals.push_back(interval); });
  return intervals;
}

// Brings the written tensors into the order of their addresses, or returns the first two that overlap.
std::optional<Overlap> sort_written(Intervals& intervals) {
  // Stable, so that of two tensors at one place the same is always named first.
  std::stable_sort(intervals.begin(), intervals.end(),
                   [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < intervals.size(); ++i) {
    if (intervals[i].begin < intervals[i - 1].end) {
      return Overlap{intervals[i - 1].position, intervals[i].position};
    }
  }
  return std::nullopt;
}

}  // namespace

void Fingerprint::add(std::uint64_t low_word, std::uint64_t high_word) {
  low = (low ^ low_word) * kLowMultiplier;
  low ^= low >> 32;
  high = (high + high_word) * kHighMultiplier;
  high ^= high >> 29;
}

TensorTable::TensorTable(std::string_view op) { layout_.add(std::hash<std::string_view>{}(op)); }

void TensorTable::begin_list(bool written, std::size_t size) {
  lists_.push_back({written, {}});
  lists_.back().tensors.reserve(size);
  layout_.add(size);
  layout_.add(written);
}

std::int64_t TensorTable::add(const dlpack::Tensor& tensor) {
  FingerprintWords layout;
  layout.add(static_cast<std::uint64_t>(tensor.ndim) << 32 | tensor.dtype.lanes << 16 |
             tensor.dtype.bits << 8 | tensor.dtype.code);
  layout.add(static_cast<std::uint64_t>(tensor.device.type) << 32 |
             static_cast<std::uint32_t>(tensor.device.id));
  if (!first_device_) first_device_ = tensor.device;
  std::int64_t size = 1;
  for (std::int32_t d = 0; d < tensor.ndim; ++d) {
    size *= tensor.shape[d];
    for (const std::int64_t extent : {tensor.shape[d], tensor.strides[d]}) {
      if (layout.full()) {
        layout_.add(layout);
        layout = {};
      }
      layout.add(static_cast<std::uint64_t>(extent));
    }
  }
  layout_.add(layout);
  lists_.back().tensors.push_back({static_cast<char*>(tensor.data) + tensor.byte_offset, size,
                                   size * (tensor.dtype.bits / 8), tensor.dtype});
  return size;
}

void TensorTable::set_rounding_seeds(std::vector<std::int64_t> seeds) {
  layout_.add(seeds.size());
  rounding_seeds_ = std::move(seeds);
}

std::uint64_t TensorTable::rounding_seed(std::size_t i) const {
  return rounding_seeds_.empty() ? 0 : static_cast<std::uint64_t>(rounding_seeds_[i]);
}

WeightForm TensorTable::weights() const {
  const std::vector<TensorView>& masters = tensors(kMasters);
  if (masters.empty()) return kFloat32Weights;
  if (masters.front().dtype.code == dlpack::kInt) return kSplitWeights;
  return rounding_seeds_.empty() ? kMasterWeights : kStochasticWeights;
}

bool TensorTable::layout_known() const { return known_layouts().count(layout_) != 0; }

void TensorTable::remember_layout() const {
  if (known_layouts().size() >= kRememberedLayouts) known_layouts().clear();
  known_layouts().insert(layout_);
}

std::optional<Overlap> find_overlap(const std::vector<const TensorTable*>& tables, bool elementwise) {
  // Parameters and states keep their addresses, and gradients often get those of the step before: so what was
  // found is remembered. Comparing with those of before is a third of the work of hashing them all, so the
  // key takes only a few of them.
  static std::unordered_map<Fingerprint, CallMemory, FingerprintHash> remembered;
  const Fingerprint key = sketch_written(tables);
  auto found = remembered.find(key);
  if (found == remembered.end() || !are_tensors(found->second.written, tables, true)) {
    CallMemory memory;
    memory.written = intervals_of(tables, true);
    memory.sorted = memory.written;
    if (const auto overlap = sort_written(memory.sorted)) return overlap;
    if (found == remembered.end() && remembered.size() >= kRememberedCalls) remembered.clear();
    found = remembered.insert_or_assign(key, std::move(memory)).first;
  }
  CallMemory& memory = found->second;
  if (memory.elementwise == elementwise && are_tensors(memory.read, tables, false)) return std::nullopt;

  Intervals reads = intervals_of(tables, false);
  for (const Interval& read : reads) {
    // The first written tensor that ends behind the read one's beginning; those before cannot touch it.
    const auto next =
        std::upper_bound(memory.sorted.begin(), memory.sorted.end(), read.begin,
                         [](std::uintptr_t begin, const Interval& interval) { return begin < interval.end; });
    if (next == memory.sorted.end() || next->begin >= read.end) continue;
    const bool same_place =
        next->position.table == read.position.table && next->position.index == read.position.index;
    if (elementwise && same_place && next->begin == read.begin && next->end == read.end) continue;
    return Overlap{next->position, read.position};
  }
  memory.read = std::move(reads);
  memory.elementwise = elementwise;
  return std::nullopt;
}

}  // namespace fused_adamw
