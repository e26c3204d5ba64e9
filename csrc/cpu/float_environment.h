// IEEE arithmetic for the length of a scope: round to nearest, subnormals kept.
#pragma once

#include <cstdint>

namespace fused_adamw::cpu {

// torch.set_flush_denormal() and some libraries make a thread flush subnormals to zero; the bits that the
// formula promises must not depend on it. The thread's setting is restored at the end of the scope.
class IeeeFloatEnvironment {
 public:
  IeeeFloatEnvironment() : saved_(read()) { write(kDefault); }
  ~IeeeFloatEnvironment() { write(saved_); }
  IeeeFloatEnvironment(const IeeeFloatEnvironment&) = delete;
  IeeeFloatEnvironment& operator=(const IeeeFloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  using Word = std::uint32_t;
  static constexpr Word kDefault = 0x1F80;  // MXCSR: all exceptions masked, nothing else
  static Word read() { return __builtin_ia32_stmxcsr(); }
  static void write(Word word) { __builtin_ia32_ldmxcsr(word); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  static constexpr Word kDefault = 0;  // FPCR
  static Word read() {
    Word word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { __asm__ volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#else
#error "fused_adamw supports x86-64 and AArch64"
#endif

  Word saved_;
};

// Fences arithmetic into such a scope, which compilers know nothing of: on what goes in after the scope has
// begun, on what comes out before it ends. Calls through a function pointer need no fence.
template <typename Value>
void fence_arithmetic(Value& value) {
  __asm__ volatile("" : "+m"(value));
}

}  // namespace fused_adamw::cpu
