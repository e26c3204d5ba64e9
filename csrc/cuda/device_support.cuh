// What the kernels share: conversions, scalars, the search for a block's tensor, the end of a launch.
#pragma once

#include "launch_parameters.h"
#include "low_precision.h"

namespace fused_adamw {

__device__ __forceinline__ float to_float32(Half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

}  // namespace fused_adamw

namespace fused_adamw::cuda {

// Counters of blocks that have come to some point. Zero when the module is loaded, and again after each
// launch that used one.
__device__ unsigned finished_blocks[kSlots];

// Four neighbours as one access of 16 or 8 bytes brings them. They stay packed while they are under way: a
// conversion would wait for them, and with it every load behind it.
template <typename Element>
struct Packed {
  ushort4 bits;

  __device__ __forceinline__ void load(const Element* source) {
    bits = *reinterpret_cast<const ushort4*>(source);
  }
  // One by one, as far as there are any.
  __device__ __forceinline__ void load_some(const Element* source, long long count) {
    bits = {};
    if (count > 0) bits.x = source[0].bits;
    if (count > 1) bits.y = source[1].bits;
    if (count > 2) bits.z = source[2].bits;
    if (count > 3) bits.w = source[3].bits;
  }
  __device__ __forceinline__ void unpack(float (&values)[4]) const {
    values[0] = to_float32(Element{bits.x});
    values[1] = to_float32(Element{bits.y});
    values[2] = to_float32(Element{bits.z});
    values[3] = to_float32(Element{bits.w});
  }
  __device__ __forceinline__ void unpack(unsigned short (&values)[4]) const {
    values[0] = bits.x;
    values[1] = bits.y;
    values[2] = bits.z;
    values[3] = bits.w;
  }
};

template <>
struct Packed<float> {
  float4 values4;

  __device__ __forceinline__ void load(const float* source) {
    values4 = *reinterpret_cast<const float4*>(source);
  }
  __device__ __forceinline__ void load_some(const float* source, long long count) {
    values4 = {};
    if (count > 0) values4.x = source[0];
    if (count > 1) values4.y = source[1];
    if (count > 2) values4.z = source[2];
    if (count > 3) values4.w = source[3];
  }
  __device__ __forceinline__ void unpack(float (&values)[4]) const {
    values[0] = values4.x;
    values[1] = values4.y;
    values[2] = values4.z;
    values[3] = values4.w;
  }
};

__device__ __forceinline__ void store4(float* target, const float (&values)[4]) {
  *reinterpret_cast<float4*>(target) = make_float4(values[0], values[1], values[2], values[3]);
}

__device__ __forceinline__ void store4(void* target, const unsigned short (&values)[4]) {
  *static_cast<ushort4*>(target) = make_ushort4(values[0], values[1], values[2], values[3]);
}

// Until then, a kernel that was launched as Start::kOverlapping may touch nothing that the launch before it
// writes, nor write what that one reads. Returns at once in any other launch.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// Lets the launch after this one begin when all blocks of this one have got here, if it is
// Start::kOverlapping.
__device__ __forceinline__ void release_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ double read(const Scalar& scalar) {
  switch (scalar.code) {
    case kDeviceFloat32:
      return *static_cast<const float*>(scalar.pointer);
    case kDeviceFloat64:
      return *static_cast<const double*>(scalar.pointer);
    case kDeviceInt64:
      return static_cast<double>(*static_cast<const long long*>(scalar.pointer));
    case kDeviceBool:
      return *static_cast<const bool*>(scalar.pointer) ? 1.0 : 0.0;
    default:
      return scalar.value;
  }
}

// The last tensor that begins at or before a block; tensors without blocks are not in the index.
template <int kCapacity>
__device__ __forceinline__ int find_tensor(const BlockIndex<kCapacity>& index, unsigned block) {
  int run = 0;
#pragma unroll
  for (int i = 1; i < kCapacity / kIndexRun; ++i) run += index.first_of_run[i] <= block ? 1 : 0;
  int tensor = run * kIndexRun;
#pragma unroll
  for (int i = 1; i < kIndexRun; ++i) tensor += index.first[run * kIndexRun + i] <= block ? 1 : 0;
  return tensor;
}

// Counts the calls for a slot: whether this is the last of `all`, after which the slot is 0 again.
__device__ __forceinline__ bool is_last(unsigned slot, unsigned all) {
  if (atomicAdd(&finished_blocks[slot], 1u) + 1u != all) return false;
  finished_blocks[slot] = 0;
  return true;
}

// Whether this is the last of so many blocks that share a slot to get here; called by all threads. The last
// block may go on with what thread 0 of each block wrote before, read through the second-level cache.
__device__ __forceinline__ bool all_finished(unsigned slot, unsigned blocks) {
  __shared__ bool last;
  __syncthreads();  // the last use of the shared value, where this is called more than once
  if (threadIdx.x == 0) {
    __threadfence();
    last = is_last(slot, blocks);
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace fused_adamw::cuda
