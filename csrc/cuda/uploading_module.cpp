#include "uploading_module.h"

#include <array>
#include <cstring>
#include <utility>

#include "launch_parameters.h"

namespace fused_adamw::cuda {
namespace {

// Parameters in words of 8 bytes; a pointer and these are the upload's own parameters.
constexpr unsigned kWords = (kMaxParameterBytes - sizeof(void*)) / 8;
constexpr unsigned kUploadThreads = 256;
constexpr unsigned kUploadBlocks = (kWords + kUploadThreads - 1) / kUploadThreads;
// After the two pointers: memory that Triton asks for besides, which no kernel here does.
constexpr std::size_t kPointers = 8;

struct Upload {
  void* target;
  std::array<unsigned long long, kWords> words;
};

// A thread writes one word.
std::string upload_ptx() {
  const std::string words = std::to_string(kWords);
  return R"(.version 8.1
.target sm_70
.address_size 64

.global .align 4 .b8 finished_blocks[)" +
         std::to_string(sizeof(unsigned) * kSlots) + R"(];

.visible .entry upload(.param .u64 target, .param .align 8 .b8 words[)" +
         std::to_string(8 * kWords) + R"(])
{
  .reg .pred %p;
  .reg .b32 %block, %thread, %word;
  .reg .b64 %from, %to, %offset, %value;

  mov.u32 %block, %ctaid.x;
  mov.u32 %thread, %tid.x;
  mad.lo.u32 %word, %block, )" +
         std::to_string(kUploadThreads) + R"(, %thread;
  setp.ge.u32 %p, %word, )" +
         words + R"(;
  @%p ret;
  mul.wide.u32 %offset, %word, 8;
  mov.b64 %from, words;
  add.s64 %from, %from, %offset;
  ld.param.u64 %value, [%from];
  ld.param.u64 %to, [target];
  cvta.to.global.u64 %to, %to;
  add.s64 %to, %to, %offset;
  st.global.u64 [%to], %value;
  ret;
}
)";
}

}  // namespace

UploadingModule::UploadingModule(int device, Allocate allocate)
    : upload_(device, upload_ptx()),
      finished_blocks_(upload_.global("finished_blocks")),
      allocate_(std::move(allocate)) {}

void UploadingModule::add(const std::string& kernel, const std::string& cubin, const std::string& entry,
                          unsigned threads, unsigned shared_bytes) {
  kernels_[kernel] = {std::make_unique<Module>(device(), cubin), entry, threads, shared_bytes};
}

void UploadingModule::launch(const char* kernel, unsigned blocks, unsigned, Stream stream,
                             const void* parameters, std::size_t bytes, Start) const {
  const Kernel& compiled = kernels_.at(kernel);
  const Allocation allocation = allocate_(sizeof(Upload::words));
  Upload upload = {allocation.pointer, {}};
  std::memcpy(upload.words.data(), parameters, bytes);
  void* upload_arguments[] = {&upload.target, upload.words.data()};
  upload_.run("upload", kUploadBlocks, kUploadThreads, 0, stream, upload_arguments);

  std::array<const void*, kPointers> pointers = {allocation.pointer, finished_blocks_};
  std::array<void*, kPointers> arguments;
  for (std::size_t i = 0; i < kPointers; ++i) arguments[i] = &pointers[i];
  compiled.module->run(compiled.entry.c_str(), blocks, compiled.threads, compiled.shared_bytes, stream,
                       arguments.data());
}

}  // namespace fused_adamw::cuda
