// One parallel region on the threads that torch already has.
#pragma once

namespace fused_adamw::cpu {

// A part of the work: called once for each `part` of 0 .. parts-1.
using PartFunction = void (*)(void* context, int part, int parts);

// Runs all parts and returns when the last has ended. `threads` is the most that may take part; the OpenMP
// runtime may give fewer. Where torch has no OpenMP runtime, the calling thread does all the work.
void run_parallel(int threads, PartFunction function, void* context);

// Whether an OpenMP runtime was found in this process.
bool has_openmp_runtime();

}  // namespace fused_adamw::cpu
