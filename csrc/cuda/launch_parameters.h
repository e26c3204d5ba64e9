// What a launch hands to its kernel, by value: shared by the kernels and by the host code that fills it.
//
// The table of tensors travels in the kernel's parameters (up to 32,764 bytes since CUDA 12.1, on compute
// capability 7.0 and later), so that there is no table in device memory to allocate, copy or keep alive, and
// a captured graph replays it as it is.
#pragma once

#include "low_precision.h"

namespace fused_adamw::cuda {

constexpr int kThreads = 256;
constexpr int kElementsPerThread = 4;
// What a block of a step has under way at once; it works on as much once or several times (launches.cpp).
constexpr int kElementsPerRound = kThreads * kElementsPerThread;

// How many blocks of a step are to run on a multiprocessor at once, where their registers allow.
constexpr int kStepsPerProcessor = 6;

// The blocks of a tensor that has more than kManyBlocks are counted in kWays counters, and these in one.
constexpr unsigned kWays = 4;
constexpr unsigned kManyBlocks = 64;

// A program of Triton's step works on two rounds, at once.
constexpr int kRoundsPerProgram = 2;
constexpr int kElementsPerProgram = kRoundsPerProgram * kElementsPerRound;

constexpr int kMaxParameterBytes = 32764;

// Groups of different options that share a launch: enough for what models have, at 4 % of the table.
constexpr int kMaxGroups = 16;

enum ScalarCode : int { kOnHost, kDeviceFloat32, kDeviceFloat64, kDeviceInt64, kDeviceBool };

// A number that the host knows, or one that lies on the device.
struct Scalar {
  double value;
  const void* pointer;
  ScalarCode code;
};

struct TensorShape {
  long long size;  // elements
  ElementType grad;
  bool vectorised;       // all pointers allow 16-byte accesses (8 bytes for 16-bit elements)
  unsigned short group;  // of a step: which of the launch's options
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

// A parameter of 16 bits. The `param` beside it is its FP32 master weight or, for kSplitWeights, points to
// the 16 bits of the remainder.
struct RoundedParam {
  const void* old_param;
  void* new_param;
  unsigned long long rounding_seed;  // of kStochasticWeights
  ElementType type;
};

struct InPlaceMasterTensor : InPlaceTensor {
  RoundedParam rounded;
};

struct OutOfPlaceMasterTensor : OutOfPlaceTensor {
  RoundedParam rounded;
};

struct GradientTensor {
  const void* grad;
  TensorShape shape;  // here a block works on one row
};

// Which blocks work on which tensor, for tensors that have any. A block looks its tensor up in two scans
// (find_tensor in device_support.cuh): their loads do not wait for each other, as those of a binary search
// do, each of which may miss the constant cache.
constexpr int kIndexRun = 32;
constexpr unsigned kNoBlock = 0xFFFFFFFFu;

template <int kTensors>
struct BlockIndex {
  static_assert(kTensors % kIndexRun == 0, "");

  int tensors;
  unsigned first_of_run[kTensors / kIndexRun];
  unsigned first[kTensors];  // block of each tensor; kNoBlock behind the last one, as in first_of_run
};

// The most tensors that fit beside so many bytes.
template <typename Tensor, int kOtherBytes>
constexpr int kCapacity =
    (kMaxParameterBytes - 16 - kOtherBytes) /
    (kIndexRun * static_cast<int>(sizeof(Tensor) + sizeof(unsigned)) + static_cast<int>(sizeof(unsigned))) *
    kIndexRun;

// The options of one parameter group.
struct GroupSettings {
  Scalar lr;
  Scalar beta1;
  Scalar beta2;
  double weight_decay;
  double eps;
  bool maximize;
};

// What all tensors of a step share.
struct StepSettings {
  Scalar grad_scale;
  Scalar found_inf;
  double clip;          // known to the host; 1 where a report tells, or clipping is off
  const float* report;  // null without a guard
  double max_norm;      // negative: no clipping
  double norm_epsilon;
};

template <typename Tensor>
constexpr int kMaxTensors = kCapacity<Tensor, sizeof(StepSettings) + kMaxGroups * sizeof(GroupSettings) + 8>;

template <typename Tensor>
struct StepParameters {
  StepSettings settings;
  GroupSettings groups[kMaxGroups];
  Tensor tensors[kMaxTensors<Tensor>];
  unsigned slot;  // of tensor 0; the others follow, then the tensors' slots of each way
  int rounds;     // of kElementsPerRound elements, which a block works on one after another
  BlockIndex<kMaxTensors<Tensor>> index;
};

// So many tensors have so many slots in each way: whole cache lines, so that no two ways share one.
FUSED_ADAMW_FUNCTION unsigned slots_per_way(int tensors) {
  constexpr int kSlotsPerLine = 32;
  return static_cast<unsigned>((tensors + kSlotsPerLine - 1) / kSlotsPerLine * kSlotsPerLine);
}

constexpr int kMaxGradients = kCapacity<GradientTensor, sizeof(Scalar) + sizeof(float*)>;

struct AnalyzeParameters {
  Scalar grad_scale;
  float* rows;  // of block 0; the others follow
  GradientTensor gradients[kMaxGradients];
  BlockIndex<kMaxGradients> index;
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
static_assert(sizeof(StepParameters<InPlaceMasterTensor>) <= kMaxParameterBytes, "");
static_assert(sizeof(StepParameters<OutOfPlaceMasterTensor>) <= kMaxParameterBytes, "");
// For launch_layout.cpp: the members of the base lie where they lie in it, and the other one behind.
static_assert(sizeof(InPlaceMasterTensor) == sizeof(InPlaceTensor) + sizeof(RoundedParam), "");
static_assert(sizeof(OutOfPlaceMasterTensor) == sizeof(OutOfPlaceTensor) + sizeof(RoundedParam), "");
static_assert(sizeof(AnalyzeParameters) <= kMaxParameterBytes, "");

}  // namespace fused_adamw::cuda
