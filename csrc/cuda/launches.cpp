#include "launches.h"

#include <cstdint>
#include <initializer_list>
#include <memory>

#include "../gradient_stats.h"

namespace fused_adamw::cuda {
namespace {

constexpr std::int64_t kValuesPerRow = sizeof(StatsRow) / sizeof(float);

enum StepList { kParams, kGrads, kExpAvgs, kExpAvgSqs, kMaxExpAvgSqs, kStateSteps };

GradientCode gradient_code(dlpack::DataType dtype) {
  if (dtype.code == dlpack::kBFloat) return kGradBFloat16;
  return dtype.bits == 16 ? kGradFloat16 : kGradFloat32;
}

bool aligned(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

TensorShape shape_of(const TensorView& grad, std::initializer_list<const void*> floats) {
  TensorShape shape;
  shape.size = grad.size;
  shape.grad = gradient_code(grad.dtype);
  // Four elements at once: a null pointer, of an array that is not there, is aligned.
  shape.vectorised = aligned(grad.data, kElementsPerThread * grad.dtype.bits / 8);
  for (const void* pointer : floats) shape.vectorised &= aligned(pointer, kElementsPerThread * sizeof(float));
  return shape;
}

unsigned blocks_of(long long size, long long per_block) {
  return static_cast<unsigned>((size + per_block - 1) / per_block);
}

template <typename T>
T* pointer(const TensorTable& table, StepList list, std::size_t i) {
  const auto& tensors = table.tensors(list);
  return tensors.empty() ? nullptr : static_cast<T*>(tensors[i].data);
}

// Collects tensors into parameters and launches whenever they are full.
template <typename Tensor>
class StepLauncher {
 public:
  StepLauncher(const Module& module, const StepSettings& settings, Stream stream)
      : module_(module), stream_(stream), parameters_(new StepParameters<Tensor>) {
    parameters_->settings = settings;
    parameters_->settings.tensors = 0;
  }

  void add(Tensor tensor) {
    if (tensor.shape.size == 0) return;
    if (parameters_->settings.tensors == kMaxTensors<Tensor>) flush();
    parameters_->first_block[parameters_->settings.tensors] = blocks_;
    blocks_ += blocks_of(tensor.shape.size, kElementsPerBlock);
    parameters_->tensors[parameters_->settings.tensors++] = tensor;
  }

  void flush() {
    if (parameters_->settings.tensors == 0) return;
    parameters_->settings.slot =
        module_.next_slots(stream_, static_cast<unsigned>(parameters_->settings.tensors));
    module_.launch("adamw_step", blocks_, kThreads, stream_, parameters_.get());
    parameters_->settings.tensors = 0;
    blocks_ = 0;
  }

 private:
  const Module& module_;
  Stream stream_;
  unsigned blocks_ = 0;
  std::unique_ptr<StepParameters<Tensor>> parameters_;  // 32 KB
};

}  // namespace

void step_in_place(const Module& module, const TensorTable& table, const StepSettings& settings,
                   Stream stream) {
  StepLauncher<InPlaceTensor> launcher(module, settings, stream);
  for (std::size_t i = 0; i < table.tensors(kParams).size(); ++i) {
    InPlaceTensor tensor;
    tensor.param = pointer<float>(table, kParams, i);
    tensor.grad = pointer<void>(table, kGrads, i);
    tensor.exp_avg = pointer<float>(table, kExpAvgs, i);
    tensor.exp_avg_sq = pointer<float>(table, kExpAvgSqs, i);
    tensor.max_exp_avg_sq = pointer<float>(table, kMaxExpAvgSqs, i);
    tensor.step = pointer<float>(table, kStateSteps, i);
    tensor.shape = shape_of(table.tensors(kGrads)[i],
                            {tensor.param, tensor.exp_avg, tensor.exp_avg_sq, tensor.max_exp_avg_sq});
    launcher.add(tensor);
  }
  launcher.flush();
}

void step_out_of_place(const Module& module, const std::vector<const TensorTable*>& olds,
                       const std::vector<const TensorTable*>& updateds, const std::vector<Scalar>& steps,
                       const StepSettings& settings, Stream stream) {
  StepLauncher<OutOfPlaceTensor> launcher(module, settings, stream);
  for (std::size_t k = 0; k < olds.size(); ++k) {
    OutOfPlaceTensor tensor;
    tensor.param = pointer<float>(*olds[k], kParams, 0);
    tensor.grad = pointer<void>(*olds[k], kGrads, 0);
    tensor.exp_avg = pointer<float>(*olds[k], kExpAvgs, 0);
    tensor.exp_avg_sq = pointer<float>(*olds[k], kExpAvgSqs, 0);
    tensor.max_exp_avg_sq = pointer<float>(*olds[k], kMaxExpAvgSqs, 0);
    tensor.new_param = pointer<float>(*updateds[k], kParams, 0);
    tensor.new_exp_avg = pointer<float>(*updateds[k], kExpAvgs, 0);
    tensor.new_exp_avg_sq = pointer<float>(*updateds[k], kExpAvgSqs, 0);
    tensor.new_max_exp_avg_sq = pointer<float>(*updateds[k], kMaxExpAvgSqs, 0);
    tensor.step = steps[k];
    tensor.shape =
        shape_of(olds[k]->tensors(kGrads)[0],
                 {tensor.param, tensor.exp_avg, tensor.exp_avg_sq, tensor.max_exp_avg_sq, tensor.new_param,
                  tensor.new_exp_avg, tensor.new_exp_avg_sq, tensor.new_max_exp_avg_sq});
    launcher.add(tensor);
  }
  launcher.flush();
}

void analyze_gradients(const Module& module, const TensorTable& table, const Scalar& grad_scale,
                       Stream stream) {
  const std::unique_ptr<AnalyzeParameters> parameters(new AnalyzeParameters);
  parameters->grad_scale = grad_scale;
  parameters->rows = static_cast<float*>(table.tensors(1)[0].data);
  parameters->tensors = 0;
  unsigned blocks = 0;
  const auto flush = [&] {
    if (parameters->tensors == 0) return;
    module.launch("analyze_gradients", blocks, kThreads, stream, parameters.get());
    parameters->rows += kValuesPerRow * blocks;
    parameters->tensors = 0;
    blocks = 0;
  };
  for (const TensorView& grad : table.tensors(0)) {
    if (grad.size == 0) continue;
    if (parameters->tensors == kMaxGradients) flush();
    parameters->first_block[parameters->tensors] = blocks;
    parameters->gradients[parameters->tensors++] = {grad.data, shape_of(grad, {})};
    blocks += blocks_of(grad.size, kElementsPerRow);
  }
  flush();
}

void merge_rows(const Module& module, const TensorTable& table, Stream stream) {
  const TensorView& rows = table.tensors(0)[0];
  MergeParameters parameters = {};
  parameters.rows = static_cast<const float*>(rows.data);
  parameters.report = static_cast<float*>(table.tensors(1)[0].data);
  parameters.count = rows.size / kValuesPerRow;
  if (parameters.count == 0) return;
  module.launch("merge_rows", blocks_of(parameters.count, kRowsPerMerge), kThreads, stream, &parameters);
}

void merge_all_rows(const Module& module, const TensorTable& table, bool hierarchical, Stream stream) {
  const TensorView& rows = table.tensors(0)[0];
  MergeParameters parameters = {};
  parameters.rows = static_cast<const float*>(rows.data);
  parameters.scratch = static_cast<float*>(table.tensors(1)[0].data);
  parameters.report = static_cast<float*>(table.tensors(2)[0].data);
  parameters.count = rows.size / kValuesPerRow;
  parameters.slot = module.next_slots(stream, 1);
  if (!hierarchical || parameters.count == 0) {
    module.launch("merge_all_rows_serially", 1, 1, stream, &parameters);
  } else {
    module.launch("merge_all_rows", blocks_of(parameters.count, kRowsPerMerge), kThreads, stream,
                  &parameters);
  }
}

}  // namespace fused_adamw::cuda
