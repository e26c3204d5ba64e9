// The CUDA driver, found at run time: contexts, modules and launches. Links nothing and needs no toolkit.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "launcher.h"

namespace fused_adamw::cuda {

class DriverError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Compute capability as major * 10 + minor. Throws DriverError where there is no driver or no such device.
int compute_capability(int device);

// The driver's CUDA version, as 1000 * major + 10 * minor.
int driver_version();

// While it lives, this thread may do while a stream is captured what concerns no captured stream: load
// modules, wait for another stream.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_;  // what was set before
};

// Kernels of one cubin (or of PTX, a string that ends with 0), in the primary context of one device. They
// live as long as the process: unloading would have to wait for every launch and captured graph.
class Module : public Launcher {
 public:
  // `fixed_rounds`: as the launcher tells them.
  Module(int device, const std::string& image, int fixed_rounds = 0);

  // One launch; arguments[i] points to the kernel's parameter i. Throws DriverError; nothing has run then.
  void run(const char* kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, Stream stream,
           void** arguments, Start start = Start::kAfterPrevious) const;

  // The same with the parameters as the one parameter of the kernel, by value.
  void launch(const char* kernel, unsigned blocks, unsigned threads, Stream stream, const void* parameters,
              std::size_t bytes, Start start) const override;

  unsigned next_slots(Stream stream, unsigned count) const override;

  int device() const override { return device_; }

  int fixed_rounds() const override { return fixed_rounds_; }

  unsigned resident_blocks() const override { return resident_blocks_; }

  // The address of a variable on the device.
  void* global(const char* name) const;

 private:
  int device_;
  int fixed_rounds_;
  unsigned resident_blocks_;
  bool can_overlap_;  // launches, from compute capability 9.0 and CUDA 12.3 (in captured graphs) on
  void* context_ = nullptr;
  void* module_ = nullptr;
  mutable std::unordered_map<std::string, void*> functions_;
  mutable unsigned next_eager_slot_ = 0;
  mutable unsigned next_captured_slot_ = 0;
};

}  // namespace fused_adamw::cuda
