// What the kernels share: conversions, scalars, the search for a block's tensor, the end of a launch.
#pragma once

#include "launch_parameters.h"

namespace fused_adamw::cuda {

// Counters of finished blocks. Zero when the module is loaded, and again after each launch that used one.
__device__ unsigned finished_blocks[kSlots];

struct Half {
  unsigned short bits;
};

struct BFloat16 {
  unsigned short bits;
};

__device__ __forceinline__ float to_float32(float value) { return value; }

__device__ __forceinline__ float to_float32(BFloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

__device__ __forceinline__ float to_float32(Half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

// Four gradients by one access of 16 or 8 bytes.
__device__ __forceinline__ void load4(const float* source, float (&values)[4]) {
  const float4 packed = *reinterpret_cast<const float4*>(source);
  values[0] = packed.x;
  values[1] = packed.y;
  values[2] = packed.z;
  values[3] = packed.w;
}

template <typename Element>
__device__ __forceinline__ void load4(const Element* source, float (&values)[4]) {
  const ushort4 packed = *reinterpret_cast<const ushort4*>(source);
  values[0] = to_float32(Element{packed.x});
  values[1] = to_float32(Element{packed.y});
  values[2] = to_float32(Element{packed.z});
  values[3] = to_float32(Element{packed.w});
}

__device__ __forceinline__ void store4(float* target, const float (&values)[4]) {
  *reinterpret_cast<float4*>(target) = make_float4(values[0], values[1], values[2], values[3]);
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

// Whether this is the last of so many blocks that share a slot to get here. Called by one thread. Orders no
// other memory access: see all_finished.
__device__ __forceinline__ bool is_last_block(unsigned slot, unsigned blocks) {
  if (atomicAdd(&finished_blocks[slot], 1u) + 1u != blocks) return false;
  finished_blocks[slot] = 0;
  return true;
}

// The same, called by all threads of a block; the last block may go on with what thread 0 of each block wrote
// before, read through the second-level cache.
__device__ __forceinline__ bool all_finished(unsigned slot, unsigned blocks) {
  __shared__ bool last;
  __syncthreads();  // the last use of the shared value, where this is called more than once
  if (threadIdx.x == 0) {
    __threadfence();
    last = is_last_block(slot, blocks);
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace fused_adamw::cuda
