// What launches.cpp launches through: a module of compiled kernels, or a recorder of what would be launched.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "launch_parameters.h"

namespace fused_adamw::cuda {

using Stream = void*;

// When a launch may begin. Overlapping: when the blocks of the launch before it in the stream have ended, or
// allowed it (release_next), without waiting until what they wrote is seen; the kernel waits for that itself
// (wait_for_previous).
enum class Start { kAfterPrevious, kOverlapping };

class Launcher {
 public:
  virtual ~Launcher() = default;

  // One launch with these parameters, which it copies.
  virtual void launch(const char* kernel, unsigned blocks, unsigned threads, Stream stream,
                      const void* parameters, std::size_t bytes,
                      Start start = Start::kAfterPrevious) const = 0;

  // The first of `count` counters of finished blocks for a launch on this stream (see all_finished in
  // device_support.cuh). Launches in flight together get different ones; a captured launch keeps its own for
  // all replays.
  virtual unsigned next_slots(Stream stream, unsigned count) const = 0;

  // How many rounds a block of a step works on (StepParameters), where that is fixed; else 0.
  virtual int fixed_rounds() const = 0;

  // How many blocks of a step the device works on at once, where the rounds are to be chosen by it.
  virtual unsigned resident_blocks() const { return 0; }

  // The index of the CUDA device; -1 where there is none.
  virtual int device() const = 0;
};

// Keeps what would be launched: for kernels that an interpreter runs, and for tests.
class Recorder : public Launcher {
 public:
  // Without resident blocks, steps are recorded as Triton's kernels take them.
  explicit Recorder(unsigned resident_blocks = 0) : resident_blocks_(resident_blocks) {}

  struct Launch {
    std::string kernel;
    unsigned blocks;
    std::string parameters;  // bytes
  };

  void launch(const char* kernel, unsigned blocks, unsigned, Stream, const void* parameters,
              std::size_t bytes, Start) const override {
    launches_.push_back({kernel, blocks, std::string(static_cast<const char*>(parameters), bytes)});
  }

  unsigned next_slots(Stream, unsigned) const override { return 0; }

  int fixed_rounds() const override { return resident_blocks_ == 0 ? kRoundsPerProgram : 0; }

  unsigned resident_blocks() const override { return resident_blocks_; }

  int device() const override { return -1; }

  const std::vector<Launch>& launches() const { return launches_; }

 private:
  unsigned resident_blocks_;
  mutable std::vector<Launch> launches_;
};

}  // namespace fused_adamw::cuda
