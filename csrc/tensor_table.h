// The tensors of one call, read once: where each one's storage is, and a fingerprint of how all are laid out.
//
// Reading 2,000 tensors takes a tenth of the time that checking them in Python would. So the checks
// (torch_library/checks.py, the only place where anything is refused) run once per layout: a layout that
// passed is remembered by its fingerprint. Addresses change from step to step (gradients are allocated
// anew), so they are not part of it; the one check on addresses, for overlap, runs every time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "dlpack_abi.h"
#include "low_precision.h"

namespace fused_adamw {

struct TensorView {
  void* data;
  std::int64_t size;   // elements
  std::int64_t bytes;  // of the storage between the first and the last element of a dense tensor
  dlpack::DataType dtype;

  // Of a parameter or a gradient.
  ElementType type() const {
    if (dtype.code == dlpack::kBFloat) return kBFloat16;
    return dtype.bits == 16 ? kFloat16 : kFloat32;
  }
};

// What both halves of a fingerprint are multiplied by, from word to word.
inline constexpr std::uint64_t kLowMultiplier = 0x9FB21C651E98DF25u;
inline constexpr std::uint64_t kHighMultiplier = 0xD6E8FEB86659FD93u;

// Words that are added to a fingerprint together, each multiplied by a number of its place: unlike those that
// are added one after another, none has to wait for another.
class FingerprintWords {
 public:
  static constexpr std::size_t kPlaces = 16;

  bool full() const { return count_ == kPlaces; }
  void add(std::uint64_t word) {
    low_ += word * kMultipliers[count_].low;
    high_ += word * kMultipliers[count_].high;
    ++count_;
  }

  std::uint64_t low() const { return low_; }
  std::uint64_t high() const { return high_; }

 private:
  struct Multiplier {
    std::uint64_t low = kLowMultiplier;
    std::uint64_t high = kHighMultiplier;
  };

  // Powers of the first.
  static constexpr std::array<Multiplier, kPlaces> multipliers() {
    std::array<Multiplier, kPlaces> powers = {};
    for (std::size_t i = 1; i < kPlaces; ++i) {
      powers[i].low = powers[i - 1].low * powers[0].low;
      powers[i].high = powers[i - 1].high * powers[0].high;
    }
    return powers;
  }
  static const std::array<Multiplier, kPlaces> kMultipliers;

  std::uint64_t low_ = 0;
  std::uint64_t high_ = 0;
  std::size_t count_ = 0;
};

inline constexpr std::array<FingerprintWords::Multiplier, FingerprintWords::kPlaces>
    FingerprintWords::kMultipliers = multipliers();

// 128 bits: two layouts that differ share a fingerprint with a probability of about 2^-128.
struct Fingerprint {
  std::uint64_t low = 0x9E3779B97F4A7C15u;
  std::uint64_t high = 0xC2B2AE3D27D4EB4Fu;

  void add(std::uint64_t word) { add(word, word); }
  void add(const FingerprintWords& words) { add(words.low(), words.high()); }
  bool operator==(const Fingerprint& other) const { return low == other.low && high == other.high; }

 private:
  void add(std::uint64_t low_word, std::uint64_t high_word);
};

// The order of a step's lists; `written` flags are the caller's.
enum StepList { kParams, kGrads, kExpAvgs, kExpAvgSqs, kMaxExpAvgSqs, kStateSteps, kMasters };

class TensorTable {
 public:
  // One list of tensors, all written by the call or all only read.
  struct List {
    bool written;
    std::vector<TensorView> tensors;
  };

  // `op` is part of the fingerprint: what passed one op's checks need not pass another's.
  explicit TensorTable(std::string_view op);

  void begin_list(bool written, std::size_t size);
  // Returns the number of elements.
  std::int64_t add(const dlpack::Tensor& tensor);

  // Of a step whose parameters are rounded stochastically: a seed for each.
  void set_rounding_seeds(std::vector<std::int64_t> seeds);
  std::uint64_t rounding_seed(std::size_t i) const;

  // How the weights of a step are kept: the same for all its tensors.
  WeightForm weights() const;

  // Makes what DLPack does not tell of the last tensor a part of the layout.
  void add_to_layout(std::uint64_t word) { layout_.add(word); }

  const std::vector<List>& lists() const { return lists_; }

  // The tensors of one list; none where the op has no such list.
  const std::vector<TensorView>& tensors(std::size_t list) const {
    return list < lists_.size() ? lists_[list].tensors : kNone;
  }

  // Where tensor i of a list lies; null where the op has no such list.
  template <typename T>
  T* pointer(StepList list, std::size_t i) const {
    const std::vector<TensorView>& own = tensors(list);
    return own.empty() ? nullptr : static_cast<T*>(own[i].data);
  }

  // The device of the first tensor, and so of all once the layout was checked.
  dlpack::Device device() const { return first_device_.value_or(dlpack::Device{dlpack::kCpu, 0}); }

  // Whether remember_layout() was called for a table of the same op, lists, dtypes, devices, shapes, strides.
  bool layout_known() const;
  void remember_layout() const;

 private:
  inline static const std::vector<TensorView> kNone;

  std::vector<List> lists_;
  std::optional<dlpack::Device> first_device_;
  std::vector<std::int64_t> rounding_seeds_;
  Fingerprint layout_;
};

// The gradient and the moments that the update of tensor i of a step reads, into a backend's struct for it.
template <typename Arrays>
void set_read_arrays(Arrays& arrays, const TensorTable& table, std::size_t i) {
  arrays.grad = table.pointer<void>(kGrads, i);
  arrays.exp_avg = table.pointer<float>(kExpAvgs, i);
  arrays.exp_avg_sq = table.pointer<float>(kExpAvgSqs, i);
  arrays.max_exp_avg_sq = table.pointer<float>(kMaxExpAvgSqs, i);
}

// The moments that it writes.
template <typename Arrays>
void set_written_moments(Arrays& arrays, const TensorTable& table, std::size_t i) {
  arrays.new_exp_avg = table.pointer<float>(kExpAvgs, i);
  arrays.new_exp_avg_sq = table.pointer<float>(kExpAvgSqs, i);
  arrays.new_max_exp_avg_sq = table.pointer<float>(kMaxExpAvgSqs, i);
}

struct TensorPosition {
  std::size_t table;
  std::size_t list;
  std::size_t index;
};

struct Overlap {
  TensorPosition written;
  TensorPosition other;
};

// Two tensors that share memory though one of them is written, or nothing. The layouts must have been
// checked: tensors are taken as dense. With `elementwise` a read tensor may be exactly a written one at the
// same place of the same table, for such an op reads an element before it writes it.
std::optional<Overlap> find_overlap(const std::vector<const TensorTable*>& tables, bool elementwise);

}  // namespace fused_adamw
