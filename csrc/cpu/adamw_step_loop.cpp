// The element loop of the CPU step. CMakeLists.txt compiles this file once per instruction set, with
// FUSED_ADAMW_INSTRUCTION_SET naming the namespace. Everything called here is inlined: see adamw_update.h.
#include "../philox.h"
#include "adamw_step.h"
#include "half.h"

// Vectorise without proof that the arrays are disjoint: one iteration reads all its inputs before it writes,
// and arrays are the same or disjoint, so no iteration depends on another.
#if defined(__clang__)
#define FUSED_ADAMW_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define FUSED_ADAMW_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

namespace fused_adamw::cpu::FUSED_ADAMW_INSTRUCTION_SET {
namespace {

// How the weights of a tensor lie in memory, one class per form: reads and writes element i.
class Float32Weights {
 public:
  static constexpr bool kStochastic = false;
  explicit Float32Weights(const TensorUpdate& update)
      : param_(static_cast<const float*>(update.param)), new_param_(static_cast<float*>(update.new_param)) {}

  template <bool kFirst>
  float read(std::int64_t i) const {
    return param_[i];
  }
  void write(std::int64_t i, float weight, std::uint32_t) const { new_param_[i] = weight; }

 private:
  const float* param_;
  float* new_param_;
};

template <typename Param, bool kByChance>
class MasterWeights {
 public:
  static constexpr bool kStochastic = kByChance;
  explicit MasterWeights(const TensorUpdate& update)
      : param_(static_cast<const Param*>(update.param)),
        master_(static_cast<const float*>(update.master)),
        new_param_(static_cast<Param*>(update.new_param)),
        new_master_(static_cast<float*>(update.new_master)) {}

  template <bool kFirst>
  float read(std::int64_t i) const {
    return kFirst ? to_float32(param_[i]) : current_master<kStochastic>(master_[i], param_[i]);
  }
  void write(std::int64_t i, float weight, std::uint32_t random) const {
    new_master_[i] = weight;
    new_param_[i] =
        kStochastic ? round_stochastically(weight, random, Param{}) : round_to_nearest(weight, Param{});
  }

 private:
  const Param* param_;
  const float* master_;
  Param* new_param_;
  float* new_master_;
};

class SplitWeights {
 public:
  static constexpr bool kStochastic = false;
  explicit SplitWeights(const TensorUpdate& update)
      : param_(static_cast<const BFloat16*>(update.param)),
        remainder_(static_cast<const unsigned short*>(update.master)),
        new_param_(static_cast<BFloat16*>(update.new_param)),
        new_remainder_(static_cast<unsigned short*>(update.new_master)) {}

  template <bool kFirst>
  float read(std::int64_t i) const {
    return join_weight(param_[i], kFirst ? 0 : remainder_[i]);
  }
  void write(std::int64_t i, float weight, std::uint32_t) const {
    const SplitWeight split = split_weight(weight);
    new_param_[i] = split.param;
    new_remainder_[i] = split.remainder;
  }

 private:
  const BFloat16* param_;
  const unsigned short* remainder_;
  BFloat16* new_param_;
  unsigned short* new_remainder_;
};

// Elements whose random bits are made at once, and stay in the first-level cache.
constexpr std::int64_t kRandomElements = 1024;

// `first` is a multiple of 4.
void fill_random(const TensorUpdate& update, std::int64_t first, std::uint32_t (&words)[kRandomElements]) {
  const std::uint64_t seed = update.rounding_seed;
  const std::uint64_t number = update.update_number;
  for (std::int64_t quad = 0; quad < kRandomElements / 4; ++quad) {
    const RandomBits bits = random_bits(seed, first / 4 + quad, number);
    for (int k = 0; k < 4; ++k) words[4 * quad + k] = bits.words[k];
  }
}

template <typename Gradient, typename Weights, bool kAmsgrad, bool kFirst>
void update_elements(const TensorUpdate& update, std::int64_t begin, std::int64_t end) {
  const UpdateScalars scalars = update.scalars;
  const Gradient* grad = static_cast<const Gradient*>(update.grad);
  const Weights weights(update);
  const float* exp_avg = update.exp_avg;
  const float* exp_avg_sq = update.exp_avg_sq;
  const float* max_exp_avg_sq = update.max_exp_avg_sq;
  float* new_exp_avg = update.new_exp_avg;
  float* new_exp_avg_sq = update.new_exp_avg_sq;
  float* new_max_exp_avg_sq = update.new_max_exp_avg_sq;
  std::uint32_t random[kRandomElements];
  const std::int64_t stride = Weights::kStochastic ? kRandomElements : end - begin;
  for (std::int64_t from = begin; from < end; from += stride) {
    const std::int64_t to = from + stride < end ? from + stride : end;
    if (Weights::kStochastic) fill_random(update, from, random);
    FUSED_ADAMW_INDEPENDENT_ITERATIONS
    for (std::int64_t i = from; i < to; ++i) {
      const Element old = {weights.template read<kFirst>(i), kFirst ? 0.0f : exp_avg[i],
                           kFirst ? 0.0f : exp_avg_sq[i], kFirst || !kAmsgrad ? 0.0f : max_exp_avg_sq[i]};
      const Element element = adamw_update<kAmsgrad>(old, to_float32(grad[i]), scalars);
      weights.write(i, element.param, Weights::kStochastic ? random[i - from] : 0);
      new_exp_avg[i] = element.exp_avg;
      new_exp_avg_sq[i] = element.exp_avg_sq;
      if (kAmsgrad) new_max_exp_avg_sq[i] = element.max_exp_avg_sq;
    }
  }
}

template <typename Gradient, typename Weights>
void select_loop(const TensorUpdate& update, std::int64_t begin, std::int64_t end) {
  const bool amsgrad = update.new_max_exp_avg_sq != nullptr;
  const bool first = update.exp_avg == nullptr;
  if (amsgrad) {
    first ? update_elements<Gradient, Weights, true, true>(update, begin, end)
          : update_elements<Gradient, Weights, true, false>(update, begin, end);
  } else {
    first ? update_elements<Gradient, Weights, false, true>(update, begin, end)
          : update_elements<Gradient, Weights, false, false>(update, begin, end);
  }
}

template <typename Gradient, bool kStochastic>
void select_master(const TensorUpdate& update, std::int64_t begin, std::int64_t end) {
  update.param_type == kFloat16
      ? select_loop<Gradient, MasterWeights<Half, kStochastic>>(update, begin, end)
      : select_loop<Gradient, MasterWeights<BFloat16, kStochastic>>(update, begin, end);
}

template <typename Gradient>
void select_weights(const TensorUpdate& update, std::int64_t begin, std::int64_t end) {
  switch (update.weights) {
    case kFloat32Weights:
      return select_loop<Gradient, Float32Weights>(update, begin, end);
    case kMasterWeights:
      return select_master<Gradient, false>(update, begin, end);
    case kStochasticWeights:
      return select_master<Gradient, true>(update, begin, end);
    case kSplitWeights:
      return select_loop<Gradient, SplitWeights>(update, begin, end);
  }
}

}  // namespace

void update_range(const TensorUpdate& update, std::int64_t begin, std::int64_t end) {
  switch (update.grad_type) {
    case kFloat32:
      return select_weights<float>(update, begin, end);
    case kFloat16:
      return select_weights<Half>(update, begin, end);
    case kBFloat16:
      return select_weights<BFloat16>(update, begin, end);
  }
}

}  // namespace fused_adamw::cpu::FUSED_ADAMW_INSTRUCTION_SET
