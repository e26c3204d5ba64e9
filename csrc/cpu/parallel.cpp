// The module links no OpenMP runtime of its own: a second runtime in the process would bring a second pool
// of threads that spins on the cores torch's pool is spinning on. It enters the runtime that libtorch_cpu
// was linked with, found at run time among the libraries already loaded. GOMP_parallel is the entry that
// compilers emit calls to; libgomp, LLVM's libomp and Intel's libiomp5 all export it.
#include "parallel.h"

#include <dlfcn.h>

namespace fused_adamw::cpu {
namespace {

struct OpenMpRuntime {
  void (*parallel)(void (*function)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
  int (*thread_number)() = nullptr;
  int (*team_size)() = nullptr;

  bool complete() const { return parallel && thread_number && team_size; }
};

template <typename Function>
void load_symbol(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

OpenMpRuntime find_runtime() {
  OpenMpRuntime runtime;
  // RTLD_NOLOAD: torch is imported before this module; dlsym then also searches what it depends on.
  void* torch_cpu = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (torch_cpu == nullptr) return runtime;
  load_symbol(torch_cpu, "GOMP_parallel", runtime.parallel);
  load_symbol(torch_cpu, "omp_get_thread_num", runtime.thread_number);
  load_symbol(torch_cpu, "omp_get_num_threads", runtime.team_size);
  return runtime;
}

const OpenMpRuntime& openmp() {
  static const OpenMpRuntime runtime = find_runtime();
  return runtime;
}

struct Region {
  PartFunction function;
  void* context;
};

void run_part(void* data) {
  const Region& region = *static_cast<Region*>(data);
  region.function(region.context, openmp().thread_number(), openmp().team_size());
}

}  // namespace

void run_parallel(int threads, PartFunction function, void* context) {
  // One thread needs no region, and must not touch the runtime: a forked child cannot.
  if (threads <= 1 || !openmp().complete()) {
    function(context, 0, 1);
    return;
  }
  Region region{function, context};
  openmp().parallel(run_part, &region, static_cast<unsigned>(threads), 0);
}

bool has_openmp_runtime() { return openmp().complete(); }

}  // namespace fused_adamw::cpu
