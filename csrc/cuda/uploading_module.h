// Kernels that take their parameters by pointer, as Triton compiles them: a small kernel writes the
// parameters to device memory first, since what it writes travels by value in its own.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "driver.h"

namespace fused_adamw::cuda {

// Device memory of so many bytes, for work on the stream that is current; it is not to be used again before
// the work that was enqueued while the owner lives.
struct Allocation {
  void* pointer;
  std::shared_ptr<void> owner;
};
using Allocate = std::function<Allocation(std::size_t bytes)>;

class UploadingModule : public Launcher {
 public:
  UploadingModule(int device, Allocate allocate);

  // A kernel of one cubin, whose parameters are two pointers: to the bytes that `launch` is given, and to the
  // counters of finished blocks. Others that follow are null.
  void add(const std::string& kernel, const std::string& cubin, const std::string& entry, unsigned threads,
           unsigned shared_bytes);

  // The kernel has its own number of threads.
  void launch(const char* kernel, unsigned blocks, unsigned threads, Stream stream, const void* parameters,
              std::size_t bytes, Start start) const override;

  unsigned next_slots(Stream stream, unsigned count) const override {
    return upload_.next_slots(stream, count);
  }

  int fixed_rounds() const override { return kRoundsPerProgram; }

  int device() const override { return upload_.device(); }

 private:
  struct Kernel {
    std::unique_ptr<Module> module;
    std::string entry;
    unsigned threads;
    unsigned shared_bytes;
  };

  Module upload_;
  void* finished_blocks_;
  Allocate allocate_;
  std::map<std::string, Kernel> kernels_;
};

}  // namespace fused_adamw::cuda
