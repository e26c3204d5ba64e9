// What a launch hands to its kernel, by value: shared by the kernels and by the host code that fills it.
//
// The table of tensors travels in the kernel's parameters (up to 32,764 bytes since CUDA 12.1, on compute
// capability 7.0 and later), so that there is no table in device memory to allocate, copy or keep alive, and
// a captured graph replays it as it is.
#pragma once

namespace fused_adamw::cuda {

constexpr int kThreads = 256;
constexpr int kElementsPerThread = 4;
constexpr int kElementsPerPass = kThreads * kElementsPerThread;

// Of a step: 2048 and 4096 elements a block were no faster on an H200.
constexpr int kElementsPerBlock = kElementsPerPass;

constexpr int kMaxParameterBytes = 32764;

enum GradientCode : unsigned char { kGradFloat32, kGradFloat16, kGradBFloat16 };

enum ScalarCode : int { kOnHost, kDeviceFloat32, kDeviceFloat64, kDeviceInt64, kDeviceBool };

// A number that the host knows, or one that lies on the device.
struct Scalar {
  double value;
  const void* pointer;
  ScalarCode code;
};

struct TensorShape {
  long long size;  // elements
  GradientCode grad;
  bool vectorised;  // all pointers allow 16-byte accesses (8 bytes for 16-bit gradients)
};

struct InPlaceTensor {
  float* param;
  const void* grad;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;
  float* step;  // updates that are complete; the launch adds 1
  TensorShape shape;
};

struct OutOfPlaceTensor {
  const float* param;
  const void* grad;
  const float* exp_avg;  // null before the first update
  const float* exp_avg_sq;
  const float* max_exp_avg_sq;
  float* new_param;
  float* new_exp_avg;
  float* new_exp_avg_sq;
  float* new_max_exp_avg_sq;
  Scalar step;
  TensorShape shape;
};

struct StepSettings {
  Scalar lr;
  Scalar beta1;
  Scalar beta2;
  Scalar grad_scale;
  Scalar found_inf;
  double weight_decay;
  double eps;
  double clip;          // known to the host; 1 where a report tells, or clipping is off
  const float* report;  // null without a guard
  double max_norm;      // negative: no clipping
  double norm_epsilon;
  int tensors;
  unsigned slot;  // of tensor 0; the others follow
  bool maximize;
};

template <typename Tensor>
constexpr int kMaxTensors = (kMaxParameterBytes - static_cast<int>(sizeof(StepSettings))) /
                            (static_cast<int>(sizeof(Tensor)) + static_cast<int>(sizeof(unsigned)));

template <typename Tensor>
struct StepParameters {
  StepSettings settings;
  unsigned
      first_block[kMaxTensors<Tensor>];  // tensor i begins with this block; densely packed for the search
  Tensor tensors[kMaxTensors<Tensor>];
};

struct GradientTensor {
  const void* grad;
  TensorShape shape;  // here a block works on one row
};

constexpr int kMaxGradients =
    (kMaxParameterBytes - 64) / static_cast<int>(sizeof(GradientTensor) + sizeof(unsigned));

struct AnalyzeParameters {
  Scalar grad_scale;
  float* rows;
  int tensors;
  unsigned first_block[kMaxGradients];
  GradientTensor gradients[kMaxGradients];
};

struct MergeParameters {
  const float* rows;
  float* scratch;
  float* report;
  long long count;
  unsigned slot;
};

// 4 MiB: enough that launches in flight together never share one (see Module::next_slots).
constexpr unsigned kSlots = 1u << 20;

static_assert(sizeof(StepParameters<InPlaceTensor>) <= kMaxParameterBytes, "");
static_assert(sizeof(StepParameters<OutOfPlaceTensor>) <= kMaxParameterBytes, "");
static_assert(sizeof(AnalyzeParameters) <= kMaxParameterBytes, "");

}  // namespace fused_adamw::cuda
