// The element loop of the CPU step. CMakeLists.txt compiles this file once per instruction set, with
// FUSED_ADAMW_INSTRUCTION_SET naming the namespace. Everything called here is inlined: see adamw_update.h.
#include "adamw_step.h"

// Vectorise without proof that the arrays are disjoint: one iteration reads all its inputs before it writes,
// and arrays are the same or disjoint, so no iteration depends on another.
#if defined(__clang__)
#define FUSED_ADAMW_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define FUSED_ADAMW_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

namespace fused_adamw::cpu::FUSED_ADAMW_INSTRUCTION_SET {
namespace {

template <typename Gradient, bool kAmsgrad, bool kFirst>
void update_elements(const TensorUpdate& update, std::int64_t begin, std::int64_t end) {
  const UpdateScalars scalars = update.scalars;
  const Gradient* grad = static_cast<const Gradient*>(update.grad);
  const float* param = update.param;
  const float* exp_avg = update.exp_avg;
  const float* exp_avg_sq = update.exp_avg_sq;
  const float* max_exp_avg_sq = update.max_exp_avg_sq;
  float* new_param = update.new_param;
  float* new_exp_avg = update.new_exp_avg;
  float* new_exp_avg_sq = update.new_exp_avg_sq;
  float* new_max_exp_avg_sq = update.new_max_exp_avg_sq;
  FUSED_ADAMW_INDEPENDENT_ITERATIONS
  for (std::int64_t i = begin; i < end; ++i) {
    const Element old = {param[i], kFirst ? 0.0f : exp_avg[i], kFirst ? 0.0f : exp_avg_sq[i],
                         kFirst || !kAmsgrad ? 0.0f : max_exp_avg_sq[i]};
    const Element element = adamw_update<kAmsgrad>(old, to_float32(grad[i]), scalars);
    new_param[i] = element.param;
    new_exp_avg[i] = element.exp_avg;
    new_exp_avg_sq[i] = element.exp_avg_sq;
    if (kAmsgrad) new_max_exp_avg_sq[i] = element.max_exp_avg_sq;
  }
}

template <typename Gradient>
void select_loop(const TensorUpdate& update, std::int64_t begin, std::int64_t end) {
  const bool amsgrad = update.new_max_exp_avg_sq != nullptr;
  const bool first = update.exp_avg == nullptr;
  if (amsgrad) {
    first ? update_elements<Gradient, true, true>(update, begin, end)
          : update_elements<Gradient, true, false>(update, begin, end);
  } else {
    first ? update_elements<Gradient, false, true>(update, begin, end)
          : update_elements<Gradient, false, false>(update, begin, end);
  }
}

}  // namespace

void update_range(const TensorUpdate& update, std::int64_t begin, std::int64_t end) {
  switch (update.grad_type) {
    case GradientType::kFloat32:
      return select_loop<float>(update, begin, end);
    case GradientType::kFloat16:
      return select_loop<Half>(update, begin, end);
    case GradientType::kBFloat16:
      return select_loop<BFloat16>(update, begin, end);
  }
}

}  // namespace fused_adamw::cpu::FUSED_ADAMW_INSTRUCTION_SET
