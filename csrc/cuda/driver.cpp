#include "driver.h"

#include <dlfcn.h>

#include "launch_parameters.h"

namespace fused_adamw::cuda {
namespace {

// The part of the driver's ABI that is used here (cuda.h); handles are pointers, results and devices ints.
constexpr int kSuccess = 0;
constexpr int kMultiprocessorCount = 16;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;
constexpr int kCaptureModeRelaxed = 2;

constexpr int kProgrammaticStreamSerialization = 6;

struct LaunchAttribute {
  int id;
  char padding[4];
  int value;
  char rest[60];
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
  int (*init)(unsigned);
  int (*driver_version)(int*);
  int (*device_get)(int*, int);
  int (*device_attribute)(int*, int, int);
  int (*primary_context)(void**, int);
  int (*push_context)(void*);
  int (*pop_context)(void**);
  int (*load_module)(void**, const void*);
  int (*get_function)(void**, void*, const char*);
  int (*get_global)(void**, std::size_t*, void*, const char*);
  int (*launch_kernel)(const LaunchConfig*, void*, void**, void**);
  int (*error_name)(int, const char**);
  int (*is_capturing)(void*, int*);
  int (*exchange_capture_mode)(int*);
};

template <typename Function>
void load_symbol(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw DriverError(std::string("libcuda.so.1 has no ") + name);
}

void check(const Driver& driver, int result, const std::string& what) {
  if (result == kSuccess) return;
  const char* name = nullptr;
  driver.error_name(result, &name);
  throw DriverError(what + " failed: " + (name != nullptr ? name : "error " + std::to_string(result)));
}

Driver load_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) throw DriverError("no CUDA driver: libcuda.so.1 was not found");
  Driver driver;
  load_symbol(library, "cuInit", driver.init);
  load_symbol(library, "cuDriverGetVersion", driver.driver_version);
  load_symbol(library, "cuDeviceGet", driver.device_get);
  load_symbol(library, "cuDeviceGetAttribute", driver.device_attribute);
  load_symbol(library, "cuDevicePrimaryCtxRetain", driver.primary_context);
  load_symbol(library, "cuCtxPushCurrent_v2", driver.push_context);
  load_symbol(library, "cuCtxPopCurrent_v2", driver.pop_context);
  load_symbol(library, "cuModuleLoadData", driver.load_module);
  load_symbol(library, "cuModuleGetFunction", driver.get_function);
  load_symbol(library, "cuModuleGetGlobal_v2", driver.get_global);
  load_symbol(library, "cuLaunchKernelEx", driver.launch_kernel);
  load_symbol(library, "cuGetErrorName", driver.error_name);
  load_symbol(library, "cuStreamIsCapturing", driver.is_capturing);
  load_symbol(library, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode);
  check(driver, driver.init(0), "cuInit");
  return driver;
}

const Driver& driver() {
  static const Driver loaded = load_driver();
  return loaded;
}

int device_handle(int device) {
  int handle = 0;
  check(driver(), driver().device_get(&handle, device), "cuDeviceGet(" + std::to_string(device) + ")");
  return handle;
}

int device_attribute(int device, int attribute) {
  int value = 0;
  check(driver(), driver().device_attribute(&value, attribute, device_handle(device)),
        "cuDeviceGetAttribute");
  return value;
}

class ContextScope {
 public:
  explicit ContextScope(void* context) {
    check(driver(), driver().push_context(context), "cuCtxPushCurrent");
  }
  ~ContextScope() {
    void* context = nullptr;
    driver().pop_context(&context);
  }
};

}  // namespace

int compute_capability(int device) {
  return 10 * device_attribute(device, kComputeCapabilityMajor) +
         device_attribute(device, kComputeCapabilityMinor);
}

int driver_version() {
  int version = 0;
  check(driver(), driver().driver_version(&version), "cuDriverGetVersion");
  return version;
}

RelaxedCapture::RelaxedCapture() : mode_(kCaptureModeRelaxed) {
  check(driver(), driver().exchange_capture_mode(&mode_), "cuThreadExchangeStreamCaptureMode");
}

RelaxedCapture::~RelaxedCapture() { driver().exchange_capture_mode(&mode_); }

Module::Module(int device, const std::string& image, int fixed_rounds)
    : device_(device),
      fixed_rounds_(fixed_rounds),
      resident_blocks_(static_cast<unsigned>(device_attribute(device, kMultiprocessorCount)) *
                       kStepsPerProcessor),
      can_overlap_(compute_capability(device) >= 90 && driver_version() >= 12030) {
  const RelaxedCapture relaxed;
  check(driver(), driver().primary_context(&context_, device_handle(device)), "cuDevicePrimaryCtxRetain");
  const ContextScope scope(context_);
  check(driver(), driver().load_module(&module_, image.c_str()), "cuModuleLoadData");
}

void Module::run(const char* kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, Stream stream,
                 void** arguments, Start start) const {
  const ContextScope scope(context_);
  void*& function = functions_[kernel];
  if (function == nullptr) {
    const RelaxedCapture relaxed;
    check(driver(), driver().get_function(&function, module_, kernel),
          std::string("cuModuleGetFunction ") + kernel);
  }
  LaunchAttribute overlapping = {kProgrammaticStreamSerialization, {}, 1, {}};
  const bool overlap = start == Start::kOverlapping && can_overlap_;
  const LaunchConfig config = {blocks,           1, 1, threads, 1, 1, shared_bytes, stream, &overlapping,
                               overlap ? 1u : 0u};
  check(driver(), driver().launch_kernel(&config, function, arguments, nullptr),
        std::string("launch of ") + kernel);
}

void Module::launch(const char* kernel, unsigned blocks, unsigned threads, Stream stream,
                    const void* parameters, std::size_t, Start start) const {
  void* arguments[] = {const_cast<void*>(parameters)};
  run(kernel, blocks, threads, 0, stream, arguments, start);
}

void* Module::global(const char* name) const {
  const ContextScope scope(context_);
  const RelaxedCapture relaxed;
  void* pointer = nullptr;
  std::size_t bytes = 0;
  check(driver(), driver().get_global(&pointer, &bytes, module_, name),
        std::string("cuModuleGetGlobal ") + name);
  return pointer;
}

unsigned Module::next_slots(Stream stream, unsigned count) const {
  int capturing = 0;
  {
    const ContextScope scope(context_);
    check(driver(), driver().is_capturing(stream, &capturing), "cuStreamIsCapturing");
  }
  // Half of the slots each, taken in turn. A slot comes up again after hundreds of launches with full tables:
  // more than a stream holds, and it is 0 again by then.
  constexpr unsigned kHalf = kSlots / 2;
  unsigned& next = capturing == 0 ? next_eager_slot_ : next_captured_slot_;
  if (next + count > kHalf) next = 0;
  const unsigned first = next;
  next += count;
  return capturing == 0 ? first : kHalf + first;
}

}  // namespace fused_adamw::cuda
