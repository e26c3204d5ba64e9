#include "launch_layout.h"

#include <cstddef>

#include "../gradient_stats.h"
#include "launch_parameters.h"

namespace fused_adamw::cuda {

std::map<std::string, long long> launch_layout() {
#define FUSED_ADAMW_SIZE(type) {#type, static_cast<long long>(sizeof(type))}
#define FUSED_ADAMW_OFFSET(type, member) {#type "." #member, static_cast<long long>(offsetof(type, member))}
#define FUSED_ADAMW_CONSTANT(name) {#name, static_cast<long long>(name)}
// The parameters of a step on tensors of this kind.
#define FUSED_ADAMW_STEP_MEMBER(type, member) \
  {"StepParameters<" #type ">." #member, static_cast<long long>(offsetof(StepParameters<type>, member))}
#define FUSED_ADAMW_STEP(type)                                                                            \
  {"StepParameters<" #type ">", static_cast<long long>(sizeof(StepParameters<type>))},                    \
      {"StepParameters<" #type ">.capacity", kMaxTensors<type>}, FUSED_ADAMW_STEP_MEMBER(type, settings), \
      FUSED_ADAMW_STEP_MEMBER(type, groups), FUSED_ADAMW_STEP_MEMBER(type, tensors),                      \
      FUSED_ADAMW_STEP_MEMBER(type, slot), FUSED_ADAMW_STEP_MEMBER(type, index.tensors),                  \
      FUSED_ADAMW_STEP_MEMBER(type, index.first_of_run), FUSED_ADAMW_STEP_MEMBER(type, index.first)
  return {
      FUSED_ADAMW_OFFSET(Scalar, value),
      FUSED_ADAMW_OFFSET(Scalar, pointer),
      FUSED_ADAMW_OFFSET(Scalar, code),
      FUSED_ADAMW_CONSTANT(kDeviceFloat32),
      FUSED_ADAMW_CONSTANT(kDeviceFloat64),
      FUSED_ADAMW_CONSTANT(kDeviceInt64),
      FUSED_ADAMW_CONSTANT(kDeviceBool),
      FUSED_ADAMW_OFFSET(TensorShape, size),
      FUSED_ADAMW_OFFSET(TensorShape, grad),
      FUSED_ADAMW_OFFSET(TensorShape, vectorised),
      FUSED_ADAMW_OFFSET(TensorShape, group),
      FUSED_ADAMW_CONSTANT(kFloat32),
      FUSED_ADAMW_CONSTANT(kFloat16),
      FUSED_ADAMW_CONSTANT(kBFloat16),
      FUSED_ADAMW_SIZE(InPlaceTensor),
      FUSED_ADAMW_OFFSET(InPlaceTensor, param),
      FUSED_ADAMW_OFFSET(InPlaceTensor, grad),
      FUSED_ADAMW_OFFSET(InPlaceTensor, exp_avg),
      FUSED_ADAMW_OFFSET(InPlaceTensor, exp_avg_sq),
      FUSED_ADAMW_OFFSET(InPlaceTensor, max_exp_avg_sq),
      FUSED_ADAMW_OFFSET(InPlaceTensor, step),
      FUSED_ADAMW_OFFSET(InPlaceTensor, shape),
      FUSED_ADAMW_SIZE(OutOfPlaceTensor),
      FUSED_ADAMW_OFFSET(OutOfPlaceTensor, param),
      FUSED_ADAMW_OFFSET(OutOfPlaceTensor, grad),
      FUSED_ADAMW_OFFSET(OutOfPlaceTensor, exp_avg),
      FUSED_ADAMW_OFFSET(OutOfPlaceTensor, exp_avg_sq),
      FUSED_ADAMW_OFFSET(OutOfPlaceTensor, max_exp_avg_sq),
      FUSED_ADAMW_OFFSET(OutOfPlaceTensor, new_param),
      FUSED_ADAMW_OFFSET(OutOfPlaceTensor, new_exp_avg),
      FUSED_ADAMW_OFFSET(OutOfPlaceTensor, new_exp_avg_sq),
      FUSED_ADAMW_OFFSET(OutOfPlaceTensor, new_max_exp_avg_sq),
      FUSED_ADAMW_OFFSET(OutOfPlaceTensor, step),
      FUSED_ADAMW_OFFSET(OutOfPlaceTensor, shape),
      FUSED_ADAMW_SIZE(InPlaceMasterTensor),
      FUSED_ADAMW_SIZE(OutOfPlaceMasterTensor),
      // No offsetof in a class with a base; launch_parameters.h asserts that it is this.
      {"InPlaceMasterTensor.rounded", static_cast<long long>(sizeof(InPlaceTensor))},
      {"OutOfPlaceMasterTensor.rounded", static_cast<long long>(sizeof(OutOfPlaceTensor))},
      FUSED_ADAMW_OFFSET(RoundedParam, old_param),
      FUSED_ADAMW_OFFSET(RoundedParam, new_param),
      FUSED_ADAMW_OFFSET(RoundedParam, rounding_seed),
      FUSED_ADAMW_OFFSET(RoundedParam, type),
      FUSED_ADAMW_SIZE(GroupSettings),
      FUSED_ADAMW_OFFSET(GroupSettings, lr),
      FUSED_ADAMW_OFFSET(GroupSettings, beta1),
      FUSED_ADAMW_OFFSET(GroupSettings, beta2),
      FUSED_ADAMW_OFFSET(GroupSettings, weight_decay),
      FUSED_ADAMW_OFFSET(GroupSettings, eps),
      FUSED_ADAMW_OFFSET(GroupSettings, maximize),
      FUSED_ADAMW_OFFSET(StepSettings, grad_scale),
      FUSED_ADAMW_OFFSET(StepSettings, found_inf),
      FUSED_ADAMW_OFFSET(StepSettings, clip),
      FUSED_ADAMW_OFFSET(StepSettings, report),
      FUSED_ADAMW_OFFSET(StepSettings, max_norm),
      FUSED_ADAMW_OFFSET(StepSettings, norm_epsilon),
      FUSED_ADAMW_STEP(InPlaceTensor),
      FUSED_ADAMW_STEP(OutOfPlaceTensor),
      FUSED_ADAMW_STEP(InPlaceMasterTensor),
      FUSED_ADAMW_STEP(OutOfPlaceMasterTensor),
      FUSED_ADAMW_SIZE(GradientTensor),
      FUSED_ADAMW_OFFSET(GradientTensor, grad),
      FUSED_ADAMW_OFFSET(GradientTensor, shape),
      FUSED_ADAMW_OFFSET(MergeParameters, rows),
      FUSED_ADAMW_OFFSET(MergeParameters, scratch),
      FUSED_ADAMW_OFFSET(MergeParameters, report),
      FUSED_ADAMW_OFFSET(MergeParameters, count),
      FUSED_ADAMW_OFFSET(MergeParameters, slot),
      FUSED_ADAMW_SIZE(AnalyzeParameters),
      FUSED_ADAMW_OFFSET(AnalyzeParameters, grad_scale),
      FUSED_ADAMW_OFFSET(AnalyzeParameters, rows),
      FUSED_ADAMW_OFFSET(AnalyzeParameters, gradients),
      FUSED_ADAMW_OFFSET(AnalyzeParameters, index.tensors),
      FUSED_ADAMW_OFFSET(AnalyzeParameters, index.first_of_run),
      FUSED_ADAMW_OFFSET(AnalyzeParameters, index.first),
      {"AnalyzeParameters.capacity", kMaxGradients},
      FUSED_ADAMW_SIZE(MergeParameters),
      FUSED_ADAMW_CONSTANT(kElementsPerRound),
      FUSED_ADAMW_CONSTANT(kStepsPerProcessor),
      FUSED_ADAMW_CONSTANT(kManyBlocks),
      FUSED_ADAMW_CONSTANT(kWays),
      FUSED_ADAMW_CONSTANT(kElementsPerProgram),
      FUSED_ADAMW_CONSTANT(kElementsPerRow),
      FUSED_ADAMW_CONSTANT(kLanes),
      FUSED_ADAMW_CONSTANT(kIndexRun),
  };
#undef FUSED_ADAMW_SIZE
#undef FUSED_ADAMW_OFFSET
#undef FUSED_ADAMW_CONSTANT
#undef FUSED_ADAMW_STEP_MEMBER
#undef FUSED_ADAMW_STEP
}

}  // namespace fused_adamw::cuda
