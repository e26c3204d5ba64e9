// The AdamW / AMSGrad step: 28 bytes per parameter (36 with AMSGrad), 2 fewer for 16-bit gradients.
//
// A block of 256 threads updates 1024 elements of one tensor in a round, four neighbours a thread, by 16-byte
// accesses where the pointers allow, for one round or several. While the elements of the first are under way,
// three threads form the scalars of the tensor in float64 (bias corrections, clip coefficient) from what lies
// on the device: nothing is read back, and a replayed graph counts on. The last block of a tensor to read its
// step counter advances it.
#include "device_support.cuh"
#include "gradient_stats.h"
#include "philox.h"
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

__device__ __forceinline__ OutOfPlaceMasterTensor arrays(const InPlaceMasterTensor& tensor) {
  RoundedParam rounded = tensor.rounded;
  rounded.new_param = const_cast<void*>(rounded.old_param);  // the same: it need not be read, too
  return {arrays(static_cast<const InPlaceTensor&>(tensor)), rounded};
}

template <typename Tensor>
__device__ __forceinline__ const Tensor& arrays(const Tensor& tensor) {
  return tensor;
}

// The tensors of a step, in place or not, whose weights are kept in a form.
template <bool kInPlace, WeightForm kForm>
struct TensorOf {
  using type = InPlaceMasterTensor;
};
template <WeightForm kForm>
struct TensorOf<false, kForm> {
  using type = OutOfPlaceMasterTensor;
};
template <>
struct TensorOf<true, kFloat32Weights> {
  using type = InPlaceTensor;
};
template <>
struct TensorOf<false, kFloat32Weights> {
  using type = OutOfPlaceTensor;
};

// The options with the values that lie on the device; the clip coefficient of the report comes later.
__device__ __forceinline__ StepOptions read_options(const StepSettings& settings,
                                                    const GroupSettings& group) {
  return {read(group.lr), read(group.beta1),         read(group.beta2), group.weight_decay,
          group.eps,      read(settings.grad_scale), settings.clip,     group.maximize};
}

// Whether nothing is to be updated, whatever the report says.
__device__ __forceinline__ bool skips(const StepSettings& settings, const StepOptions& options) {
  // The host refuses such a scale where it can see it.
  const float inverse = inverse_grad_scale(options.grad_scale);
  return !(inverse > 0.0f && inverse < __int_as_float(0x7f800000)) || read(settings.found_inf) != 0.0;
}

// What form_scalars forms for a block.
struct BlockScalars {
  UpdateScalars scalars;
  long long update_number;
  bool skip;
};

// Four elements of a thread that are all there, and that one access reaches. Where its block begins is the
// same for all threads: kept apart, it and the pointers take registers that a warp shares.
struct WholeQuad {
  long long first_of_block;
  unsigned lane;

  template <typename Element>
  __device__ __forceinline__ void load(Packed<Element>& packed, const Element* source) const {
    packed.load(source + first_of_block + lane);
  }
  template <typename Element>
  __device__ __forceinline__ void store(Element* target, const Element (&values)[4]) const {
    store4(target + first_of_block + lane, values);
  }
};

// Four of which some may lie behind the tensor's end; one by one.
struct PartialQuad {
  long long first;
  long long size;

  template <typename Element>
  __device__ __forceinline__ void load(Packed<Element>& packed, const Element* source) const {
    packed.load_some(source + first, size - first);
  }
  template <typename Element>
  __device__ __forceinline__ void store(Element* target, const Element (&values)[4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (first + k < size) target[first + k] = values[k];
    }
  }
};

// Four weights of a thread, a class per form. Without state there is no master weight yet: the parameter is
// it.
template <WeightForm kForm>
struct Weights;

template <>
struct Weights<kFloat32Weights> {
  Packed<float> param;

  template <typename Place>
  __device__ __forceinline__ void load(const OutOfPlaceTensor& tensor, const Place& place, bool) {
    place.load(param, tensor.param);
  }
  __device__ __forceinline__ void unpack(const OutOfPlaceTensor&, bool, float (&weights)[4]) const {
    param.unpack(weights);
  }
  template <typename Place>
  __device__ __forceinline__ void store(const OutOfPlaceTensor& tensor, const Place& place, long long,
                                        const BlockScalars&, const float (&weights)[4]) const {
    place.store(tensor.new_param, weights);
  }
  // As they were read.
  template <typename Place>
  __device__ __forceinline__ void copy(const OutOfPlaceTensor& tensor, const Place& place, bool) const {
    float weights[4];
    param.unpack(weights);
    place.store(tensor.new_param, weights);
  }
};

template <bool kStochastic>
struct RoundedWeights {
  Packed<float> master;
  Packed<BFloat16> param;  // or float16: the bits alone

  template <typename Place>
  __device__ __forceinline__ void load(const OutOfPlaceMasterTensor& tensor, const Place& place,
                                       bool has_state) {
    master = {};
    if (has_state) place.load(master, tensor.param);
    place.load(param, static_cast<const BFloat16*>(tensor.rounded.old_param));
  }
  __device__ __forceinline__ void unpack(const OutOfPlaceMasterTensor& tensor, bool has_state,
                                         float (&weights)[4]) const {
    if (tensor.rounded.type == kFloat16) {
      unpack_as<Half>(has_state, weights);
    } else {
      unpack_as<BFloat16>(has_state, weights);
    }
  }
  template <typename Place>
  __device__ __forceinline__ void store(const OutOfPlaceMasterTensor& tensor, const Place& place,
                                        long long first, const BlockScalars& shared,
                                        const float (&weights)[4]) const {
    place.store(tensor.new_param, weights);
    RandomBits random = {};
    if (kStochastic) {
      random = random_bits(tensor.rounded.rounding_seed, first / 4, shared.update_number);
    }
    unsigned short params[4];
    if (tensor.rounded.type == kFloat16) {
      round_to<Half>(weights, random, params);
    } else {
      round_to<BFloat16>(weights, random, params);
    }
    place.store(static_cast<unsigned short*>(tensor.rounded.new_param), params);
  }
  template <typename Place>
  __device__ __forceinline__ void copy(const OutOfPlaceMasterTensor& tensor, const Place& place,
                                       bool has_state) const {
    unsigned short params[4];
    param.unpack(params);
    place.store(static_cast<unsigned short*>(tensor.rounded.new_param), params);
    float weights[4];
    if (has_state) {
      master.unpack(weights);
    } else {
      unpack(tensor, has_state, weights);
    }
    place.store(tensor.new_param, weights);
  }

 private:
  template <typename Param>
  __device__ __forceinline__ void unpack_as(bool has_state, float (&weights)[4]) const {
    unsigned short params[4];
    param.unpack(params);
    master.unpack(weights);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      weights[k] = has_state ? current_master<kStochastic>(weights[k], Param{params[k]})
                             : to_float32(Param{params[k]});
    }
  }
  template <typename Param>
  __device__ __forceinline__ void round_to(const float (&weights)[4], const RandomBits& random,
                                           unsigned short (&params)[4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      params[k] = (kStochastic ? round_stochastically(weights[k], random.words[k], Param{})
                               : round_to_nearest(weights[k], Param{}))
                      .bits;
    }
  }
};

template <>
struct Weights<kMasterWeights> : RoundedWeights<false> {};
template <>
struct Weights<kStochasticWeights> : RoundedWeights<true> {};

template <>
struct Weights<kSplitWeights> {
  Packed<BFloat16> param;
  Packed<BFloat16> remainder;  // 16 bits each

  template <typename Place>
  __device__ __forceinline__ void load(const OutOfPlaceMasterTensor& tensor, const Place& place,
                                       bool has_state) {
    place.load(param, static_cast<const BFloat16*>(tensor.rounded.old_param));
    remainder = {};
    if (has_state) place.load(remainder, reinterpret_cast<const BFloat16*>(tensor.param));
  }
  __device__ __forceinline__ void unpack(const OutOfPlaceMasterTensor&, bool, float (&weights)[4]) const {
    unsigned short params[4], remainders[4];
    param.unpack(params);
    remainder.unpack(remainders);
#pragma unroll
    for (int k = 0; k < 4; ++k) weights[k] = join_weight(BFloat16{params[k]}, remainders[k]);
  }
  template <typename Place>
  __device__ __forceinline__ void store(const OutOfPlaceMasterTensor& tensor, const Place& place, long long,
                                        const BlockScalars&, const float (&weights)[4]) const {
    unsigned short params[4], remainders[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const SplitWeight split = split_weight(weights[k]);
      params[k] = split.param.bits;
      remainders[k] = split.remainder;
    }
    store_both(tensor, place, params, remainders);
  }
  template <typename Place>
  __device__ __forceinline__ void copy(const OutOfPlaceMasterTensor& tensor, const Place& place, bool) const {
    unsigned short params[4], remainders[4];
    param.unpack(params);
    remainder.unpack(remainders);
    store_both(tensor, place, params, remainders);
  }

 private:
  template <typename Place>
  __device__ __forceinline__ void store_both(const OutOfPlaceMasterTensor& tensor, const Place& place,
                                             const unsigned short (&params)[4],
                                             const unsigned short (&remainders)[4]) const {
    place.store(static_cast<unsigned short*>(tensor.rounded.new_param), params);
    place.store(reinterpret_cast<unsigned short*>(tensor.new_param), remainders);
  }
};

// Four elements of a thread. `Tensor` is OutOfPlaceTensor or OutOfPlaceMasterTensor, `first` the first
// element of the block's round.
template <typename Gradient, bool kAmsgrad, WeightForm kForm>
struct Quad {
  Packed<Gradient> grad;
  Weights<kForm> weights4;
  Packed<float> exp_avg4, exp_avg_sq4, max_exp_avg_sq4;
  float weights[4], exp_avg[4], exp_avg_sq[4], max_exp_avg_sq[4];

  // `has_state`: there are moments; else they are taken as 0.
  template <typename Tensor>
  __device__ __forceinline__ void load(const Tensor& tensor, long long first, bool has_state) {
    // All accesses in one branch or the other, here and below, so that they are under way together.
    if (is_whole(tensor, first)) {
      load_at(tensor, WholeQuad{first, lane()}, has_state);
    } else {
      load_at(tensor, PartialQuad{first + lane(), tensor.shape.size}, has_state);
    }
  }

  template <typename Tensor>
  __device__ __forceinline__ void update(const Tensor& tensor, long long first, bool has_state,
                                         const BlockScalars& shared) {
    weights4.unpack(tensor, has_state, weights);
    unpack_state();
    float gradients[4];
    grad.unpack(gradients);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Element old = {weights[k], exp_avg[k], exp_avg_sq[k], max_exp_avg_sq[k]};
      const Element element = adamw_update<kAmsgrad>(old, gradients[k], shared.scalars);
      weights[k] = element.param;
      exp_avg[k] = element.exp_avg;
      exp_avg_sq[k] = element.exp_avg_sq;
      max_exp_avg_sq[k] = element.max_exp_avg_sq;
    }
    if (is_whole(tensor, first)) {
      store_at(tensor, WholeQuad{first, lane()}, first, shared);
    } else {
      store_at(tensor, PartialQuad{first + lane(), tensor.shape.size}, first, shared);
    }
  }

  // Of a step that is skipped, out of place.
  template <typename Tensor>
  __device__ __forceinline__ void copy(const Tensor& tensor, long long first, bool has_state) {
    unpack_state();
    if (is_whole(tensor, first)) {
      copy_at(tensor, WholeQuad{first, lane()}, has_state);
    } else {
      copy_at(tensor, PartialQuad{first + lane(), tensor.shape.size}, has_state);
    }
  }

 private:
  static __device__ __forceinline__ unsigned lane() { return threadIdx.x * kElementsPerThread; }
  static __device__ __forceinline__ bool is_whole(const OutOfPlaceTensor& tensor, long long first) {
    return tensor.shape.vectorised && first + lane() + kElementsPerThread <= tensor.shape.size;
  }
  template <typename Tensor, typename Place>
  __device__ __forceinline__ void load_at(const Tensor& tensor, const Place& place, bool has_state) {
    exp_avg4 = exp_avg_sq4 = max_exp_avg_sq4 = {};
    weights4.load(tensor, place, has_state);
    place.load(grad, static_cast<const Gradient*>(tensor.grad));
    if (has_state) {
      place.load(exp_avg4, tensor.exp_avg);
      place.load(exp_avg_sq4, tensor.exp_avg_sq);
      if (kAmsgrad) place.load(max_exp_avg_sq4, tensor.max_exp_avg_sq);
    }
  }
  template <typename Tensor, typename Place>
  __device__ __forceinline__ void store_at(const Tensor& tensor, const Place& place, long long first,
                                           const BlockScalars& shared) const {
    weights4.store(tensor, place, first + lane(), shared, weights);
    store_state(tensor, place);
  }
  template <typename Tensor, typename Place>
  __device__ __forceinline__ void copy_at(const Tensor& tensor, const Place& place, bool has_state) const {
    weights4.copy(tensor, place, has_state);
    store_state(tensor, place);
  }
  __device__ __forceinline__ void unpack_state() {
    exp_avg4.unpack(exp_avg);
    exp_avg_sq4.unpack(exp_avg_sq);
    max_exp_avg_sq4.unpack(max_exp_avg_sq);
  }
  template <typename Place>
  __device__ __forceinline__ void store_state(const OutOfPlaceTensor& tensor, const Place& place) const {
    place.store(tensor.new_exp_avg, exp_avg);
    place.store(tensor.new_exp_avg_sq, exp_avg_sq);
    if (kAmsgrad) place.store(tensor.new_max_exp_avg_sq, max_exp_avg_sq);
  }
};

// The first element of this block in a round.
template <typename Tensor>
__device__ __forceinline__ long long first_element(const StepParameters<Tensor>& parameters, int index,
                                                   int round) {
  const long long block = blockIdx.x - parameters.index.first[index];
  return (block * parameters.rounds + round) * kElementsPerRound;
}

// Says that a block, in place, has read the counter of its tensor; the last one that does so advances it.
template <typename Tensor>
__device__ __forceinline__ void count_block(const StepParameters<Tensor>& parameters, int index, bool skip) {
  if (threadIdx.x != 0) return;
  const Tensor& tensor = parameters.tensors[index];
  const unsigned first = parameters.index.first[index];
  const unsigned next = index + 1 < kMaxTensors<Tensor> ? parameters.index.first[index + 1] : kNoBlock;
  const unsigned blocks = min(next, gridDim.x) - first;
  const unsigned slot = parameters.slot + index;
  if (blocks > kManyBlocks) {
    // Were they all to meet at one address, the part of the second-level cache that holds it would keep the
    // whole memory waiting.
    const unsigned way = (blockIdx.x - first) % kWays;
    const unsigned of_way = (blocks - way + kWays - 1) / kWays;
    if (!is_last(slot + (1 + way) * slots_per_way(parameters.index.tensors), of_way)) return;
    if (!is_last(slot, kWays)) return;
  } else if (!is_last(slot, blocks)) {
    return;
  }
  if (!skip) *tensor.step += 1.0f;
}

template <typename Gradient, bool kInPlace, bool kAmsgrad, WeightForm kForm, typename Tensor>
__device__ __forceinline__ void update_block(const StepParameters<Tensor>& parameters, int index,
                                             const BlockScalars& shared) {
  int round = 0;
#pragma unroll 1
  do {
    // The scalars and the addresses are read anew here and below: kept while the elements are under way, they
    // would take some twenty registers.
    const auto forget = [&] { asm volatile("" : "+r"(index) : : "memory"); };
    Quad<Gradient, kAmsgrad, kForm> quad;
    forget();
    {
      const auto tensor = arrays(parameters.tensors[index]);
      quad.load(tensor, first_element(parameters, index, round), kInPlace || tensor.exp_avg != nullptr);
    }
    if (round == 0) {
      __syncthreads();
      if constexpr (kInPlace) {
        // While its elements are under way: at the end, the whole block would wait for the atomic.
        count_block(parameters, index, shared.skip);
        if (shared.skip) return;
      }
    }
    forget();
    const auto tensor = arrays(parameters.tensors[index]);
    const long long first = first_element(parameters, index, round);
    const bool has_state = kInPlace || tensor.exp_avg != nullptr;
    if (!kInPlace && shared.skip) {
      quad.copy(tensor, first, has_state);
    } else {
      quad.update(tensor, first, has_state, shared);
    }
    ++round;
  } while (round < parameters.rounds &&
           first_element(parameters, index, round) < parameters.tensors[index].shape.size);
}

// The scalars of a tensor, formed by the first threads of three warps, each its part. They do it before they
// load their elements, or the float64 values would take registers beside those; the other warps do not wait
// for them to load theirs. (A prefetch for them gained nothing.)
template <typename Tensor>
__device__ __forceinline__ void form_scalars(const StepParameters<Tensor>& parameters, int index,
                                             BlockScalars& shared) {
  const StepSettings& settings = parameters.settings;
  const Tensor& tensor = parameters.tensors[index];
  const GroupSettings& group = parameters.groups[tensor.shape.group];
  if (threadIdx.x == 0) {
    shared.scalars.step_size = step_size(read(group.lr), read(group.beta1), steps_done(tensor) + 1);
  } else if (threadIdx.x == 32) {
    shared.scalars.rsqrt_bias2 = rsqrt_bias2(read(group.beta2), steps_done(tensor) + 1);
  } else if (threadIdx.x == 64) {
    const StepOptions options = read_options(settings, group);
    shared.update_number = steps_done(tensor) + 1;
    set_constant_scalars(shared.scalars, options);
    bool skip = skips(settings, options);
    // What all threads read before, the launches before this one only read as well. Elements are written
    // after the barrier that this thread comes to.
    wait_for_previous();
    if (settings.report != nullptr) {
      const StatsRow report = {settings.report[0], settings.report[1], settings.report[2]};
      skip |= report.nonfinite != 0.0f;
      if (settings.max_norm >= 0.0) {
        set_clip(shared.scalars, clip_coefficient(report, settings.max_norm, settings.norm_epsilon));
      }
    }
    shared.skip = skip;
  }
}

template <bool kInPlace, bool kAmsgrad, WeightForm kForm>
__device__ __forceinline__ void step(
    const StepParameters<typename TensorOf<kInPlace, kForm>::type>& parameters) {
  __shared__ BlockScalars shared;
  int index = find_tensor(parameters.index, blockIdx.x);
  form_scalars(parameters, index, shared);
  // No address of an element is to be formed before: it would take registers beside the float64 values.
  asm volatile("" : "+r"(index));
  switch (parameters.tensors[index].shape.grad) {
    case kFloat16:
      update_block<Half, kInPlace, kAmsgrad, kForm>(parameters, index, shared);
      break;
    case kBFloat16:
      update_block<BFloat16, kInPlace, kAmsgrad, kForm>(parameters, index, shared);
      break;
    default:
      update_block<float, kInPlace, kAmsgrad, kForm>(parameters, index, shared);
  }
}

// How many blocks are to fit on a multiprocessor, which limits a thread's registers: as many as have enough
// of them. A block waits for its scalars as long as for its elements, so the others have to keep the memory
// busy.
__device__ constexpr int blocks_per_processor(bool in_place, bool amsgrad, WeightForm form) {
  int fitting = amsgrad ? (in_place ? 5 : 4) : (in_place && form == kStochasticWeights ? 5 : 6);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ > 900
  // NVRTC 13.0 would keep random bits in local memory: in place with AMSGrad, and out of place without.
  if (form == kStochasticWeights && in_place == amsgrad) --fitting;
#endif
  return fitting < kStepsPerProcessor ? fitting : kStepsPerProcessor;
}

}  // namespace fused_adamw::cuda

using namespace fused_adamw;

// One variant a compilation: FUSED_ADAMW_IN_PLACE and FUSED_ADAMW_AMSGRAD are bools, FUSED_ADAMW_WEIGHTS is a
// WeightForm. A step needs one or two of them, and each takes 40 ms to compile.
extern "C" __global__ void __launch_bounds__(cuda::kThreads, cuda::blocks_per_processor(FUSED_ADAMW_IN_PLACE,
                                                                                        FUSED_ADAMW_AMSGRAD,
                                                                                        FUSED_ADAMW_WEIGHTS))
    adamw_step(const __grid_constant__
                   cuda::StepParameters<cuda::TensorOf<FUSED_ADAMW_IN_PLACE, FUSED_ADAMW_WEIGHTS>::type>
                       parameters) {
  cuda::step<FUSED_ADAMW_IN_PLACE, FUSED_ADAMW_AMSGRAD, FUSED_ADAMW_WEIGHTS>(parameters);
}
