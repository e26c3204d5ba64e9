// The AdamW / AMSGrad step: 28 bytes per parameter (36 with AMSGrad), 2 fewer for 16-bit gradients.
//
// A block of 256 threads updates 2048 elements of one tensor, twice four neighbours a thread, by 16-byte
// accesses where the pointers allow. While its elements are under way, one thread forms the scalars of the
// tensor in float64 (bias corrections, clip coefficient) from what lies on the device: nothing is read back,
// and a replayed graph counts on. The last block of a tensor to finish advances its step counter, when all
// have read it.
#include "device_support.cuh"
#include "gradient_stats.h"
#include "update_scalars.h"

namespace fused_adamw::cuda {

__device__ __forceinline__ long long steps_done(const InPlaceTensor& tensor) {
  return static_cast<long long>(*tensor.step);
}

__device__ __forceinline__ long long steps_done(const OutOfPlaceTensor& tensor) {
  // From 2^62 on, one more would overflow, and the bias corrections have been 1 for long.
  return static_cast<long long>(fmin(read(tensor.step), 0x1.0p62));
}

// In place, an array is read and written; see the CPU's TensorUpdate for what may share memory.
__device__ __forceinline__ OutOfPlaceTensor arrays(const InPlaceTensor& tensor) {
  return {tensor.param,          tensor.grad,  tensor.exp_avg, tensor.exp_avg_sq,
          tensor.max_exp_avg_sq, tensor.param, tensor.exp_avg, tensor.exp_avg_sq,
          tensor.max_exp_avg_sq, {},           tensor.shape};
}

__device__ __forceinline__ const OutOfPlaceTensor& arrays(const OutOfPlaceTensor& tensor) { return tensor; }

template <typename Tensor>
constexpr bool kInPlace = false;
template <>
constexpr bool kInPlace<InPlaceTensor> = true;

// Whether nothing is to be updated; else the options with the values that lie on the device.
__device__ __forceinline__ bool read_options(const StepSettings& settings, const GroupSettings& group,
                                             StepOptions& options) {
  options = {read(group.lr), read(group.beta1),         read(group.beta2), group.weight_decay,
             group.eps,      read(settings.grad_scale), settings.clip,     group.maximize};
  bool skip = read(settings.found_inf) != 0.0;
  // The host refuses such a scale where it can see it.
  const float inverse = inverse_grad_scale(options.grad_scale);
  skip |= !(inverse > 0.0f && inverse < __int_as_float(0x7f800000));
  if (settings.report != nullptr) {
    const StatsRow report = {settings.report[0], settings.report[1], settings.report[2]};
    skip |= report.nonfinite != 0.0f;
    if (settings.max_norm >= 0.0) {
      options.clip = clip_coefficient(report, settings.max_norm, settings.norm_epsilon);
    }
  }
  return skip;
}

// What thread 0 forms for its block.
struct BlockScalars {
  UpdateScalars scalars;
  bool skip;
};

// Four elements of a thread.
template <typename Gradient, bool kAmsgrad>
struct Quad {
  Packed<Gradient> grad;
  Packed<float> param4, exp_avg4, exp_avg_sq4, max_exp_avg_sq4;
  float param[4], exp_avg[4], exp_avg_sq[4], max_exp_avg_sq[4];

  // `has_state`: there are moments; else they are taken as 0.
  __device__ __forceinline__ void load(const OutOfPlaceTensor& tensor, long long first, bool has_state) {
    const Gradient* grads = static_cast<const Gradient*>(tensor.grad);
    exp_avg4 = exp_avg_sq4 = max_exp_avg_sq4 = {};
    if (whole(tensor, first)) {
      param4.load(tensor.param + first);
      grad.load(grads + first);
      if (has_state) {
        exp_avg4.load(tensor.exp_avg + first);
        exp_avg_sq4.load(tensor.exp_avg_sq + first);
        if (kAmsgrad) max_exp_avg_sq4.load(tensor.max_exp_avg_sq + first);
      }
      return;
    }
    const long long count = tensor.shape.size - first;
    param4.load_some(tensor.param + first, count);
    grad.load_some(grads + first, count);
    if (has_state) {
      exp_avg4.load_some(tensor.exp_avg + first, count);
      exp_avg_sq4.load_some(tensor.exp_avg_sq + first, count);
      if (kAmsgrad) max_exp_avg_sq4.load_some(tensor.max_exp_avg_sq + first, count);
    }
  }

  __device__ __forceinline__ void unpack() {
    param4.unpack(param);
    exp_avg4.unpack(exp_avg);
    exp_avg_sq4.unpack(exp_avg_sq);
    max_exp_avg_sq4.unpack(max_exp_avg_sq);
  }

  __device__ __forceinline__ void update(const UpdateScalars& scalars) {
    float gradients[4];
    grad.unpack(gradients);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Element old = {param[k], exp_avg[k], exp_avg_sq[k], max_exp_avg_sq[k]};
      const Element element = adamw_update<kAmsgrad>(old, gradients[k], scalars);
      param[k] = element.param;
      exp_avg[k] = element.exp_avg;
      exp_avg_sq[k] = element.exp_avg_sq;
      max_exp_avg_sq[k] = element.max_exp_avg_sq;
    }
  }

  __device__ __forceinline__ void store(const OutOfPlaceTensor& tensor, long long first) const {
    if (whole(tensor, first)) {
      store4(tensor.new_param + first, param);
      store4(tensor.new_exp_avg + first, exp_avg);
      store4(tensor.new_exp_avg_sq + first, exp_avg_sq);
      if (kAmsgrad) store4(tensor.new_max_exp_avg_sq + first, max_exp_avg_sq);
      return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (first + k < tensor.shape.size) {
        tensor.new_param[first + k] = param[k];
        tensor.new_exp_avg[first + k] = exp_avg[k];
        tensor.new_exp_avg_sq[first + k] = exp_avg_sq[k];
        if (kAmsgrad) tensor.new_max_exp_avg_sq[first + k] = max_exp_avg_sq[k];
      }
    }
  }

 private:
  static __device__ __forceinline__ bool whole(const OutOfPlaceTensor& tensor, long long first) {
    return tensor.shape.vectorised && first + 4 <= tensor.shape.size;
  }
};

template <typename Gradient, bool kAmsgrad>
__device__ __forceinline__ void update_block(const OutOfPlaceTensor& tensor, long long first, bool in_place,
                                             const BlockScalars& shared) {
  Quad<Gradient, kAmsgrad> quads[kStepPasses];
#pragma unroll
  for (int i = 0; i < kStepPasses; ++i) {
    quads[i].load(tensor, first + i * kElementsPerPass, in_place || tensor.exp_avg != nullptr);
  }
  __syncthreads();
  if (shared.skip && in_place) return;
#pragma unroll
  for (int i = 0; i < kStepPasses; ++i) {
    asm volatile("" : : : "memory");  // the scalars are read anew: kept, they would take ten registers
    quads[i].unpack();
    if (!shared.skip) quads[i].update(shared.scalars);
    quads[i].store(tensor, first + i * kElementsPerPass);
  }
}

// The end of a block's work in place: the last block of a tensor advances its counter, when all have read it.
__device__ __forceinline__ void finish(const StepParameters<InPlaceTensor>& parameters, bool skip) {
  if (threadIdx.x != 0) return;
  // Searched for again: kept until here, it would cost the elements registers.
  const int index = find_tensor(parameters.index, blockIdx.x);
  const InPlaceTensor& tensor = parameters.tensors[index];
  const unsigned blocks =
      static_cast<unsigned>((tensor.shape.size + kElementsPerBlock - 1) / kElementsPerBlock);
  unsigned& finished = finished_blocks[parameters.slot + index];
  if (atomicAdd(&finished, 1u) + 1u != blocks) return;
  finished = 0;
  if (!skip) *tensor.step += 1.0f;
}

__device__ __forceinline__ void finish(const StepParameters<OutOfPlaceTensor>&, bool) {}

// The first element of this thread.
template <typename Tensor>
__device__ __forceinline__ long long first_element(const StepParameters<Tensor>& parameters, int index) {
  const long long block = blockIdx.x - parameters.index.first[index];
  return block * kElementsPerBlock + threadIdx.x * kElementsPerThread;
}

template <typename Tensor, bool kAmsgrad>
__device__ __forceinline__ void step(const StepParameters<Tensor>& parameters) {
  __shared__ BlockScalars shared;
  int index = find_tensor(parameters.index, blockIdx.x);
  // Before this warp's loads, or the float64 values would take registers beside the elements; the seven other
  // warps do not wait for it to ask for theirs. (A prefetch for it gained nothing.)
  if (threadIdx.x == 0) {
    // The other threads may load what they update at once: the launches before this one only read it. They
    // write after the barrier that this thread comes to.
    wait_for_previous();
    const Tensor& tensor = parameters.tensors[index];
    StepOptions options;
    shared.skip = read_options(parameters.settings, parameters.groups[tensor.shape.group], options);
    shared.scalars = update_scalars(options, steps_done(tensor) + 1);
  }
  asm volatile("" : "+r"(index));  // no address of an element is to be formed before, for the same reason
  const Tensor& tensor = parameters.tensors[index];
  const long long first = first_element(parameters, index);
  const OutOfPlaceTensor all = arrays(tensor);
  constexpr bool in_place = kInPlace<Tensor>;
  switch (tensor.shape.grad) {
    case kGradFloat16:
      update_block<Half, kAmsgrad>(all, first, in_place, shared);
      break;
    case kGradBFloat16:
      update_block<BFloat16, kAmsgrad>(all, first, in_place, shared);
      break;
    default:
      update_block<float, kAmsgrad>(all, first, in_place, shared);
  }
  finish(parameters, shared.skip);
}

// How many blocks are to fit on a multiprocessor, which limits a thread's registers: as many as have enough
// of them. Four on Hopper have 128 KB of loads under way.
__device__ constexpr int blocks_per_processor(bool in_place, bool amsgrad) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  return in_place && !amsgrad ? 4 : 3;
#else
  return amsgrad ? 2 : 3;
#endif
}

}  // namespace fused_adamw::cuda

using namespace fused_adamw::cuda;

// One variant a compilation: FUSED_ADAMW_TENSOR is InPlaceTensor or OutOfPlaceTensor, FUSED_ADAMW_AMSGRAD a
// bool. A step needs one or two of the four, and each takes 40 ms to compile.
extern "C" __global__ void __launch_bounds__(kThreads, blocks_per_processor(kInPlace<FUSED_ADAMW_TENSOR>,
                                                                            FUSED_ADAMW_AMSGRAD))
    adamw_step(const __grid_constant__ StepParameters<FUSED_ADAMW_TENSOR> parameters) {
  step<FUSED_ADAMW_TENSOR, FUSED_ADAMW_AMSGRAD>(parameters);
}
