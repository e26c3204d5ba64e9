#include "instruction_set.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace fused_adamw::cpu {
namespace {

constexpr char kEnvironmentVariable[] = "FUSED_ADAMW_CPU_CAPABILITY";

InstructionSet find(std::string_view wanted, const char* source) {
  std::string choices;
  for (const InstructionSet set : kInstructionSets) {
    if (!supported(set)) continue;
    if (name(set) == wanted) return set;
    if (!choices.empty()) choices += ", ";
    choices += name(set);
  }
  throw std::invalid_argument(std::string(source) + ": this build and processor have no instruction set '" +
                              std::string(wanted) + "'; they have " + choices);
}

InstructionSet best_supported() {
  InstructionSet best = InstructionSet::kBaseline;
  for (const InstructionSet set : kInstructionSets) {
    if (supported(set)) best = set;
  }
  return best;
}

InstructionSet& selection() {
  static InstructionSet set = [] {
    const char* wanted = std::getenv(kEnvironmentVariable);
    return wanted != nullptr && *wanted != '\0' ? find(wanted, kEnvironmentVariable) : best_supported();
  }();
  return set;
}

}  // namespace

std::string_view name(InstructionSet set) {
  switch (set) {
    case InstructionSet::kBaseline:
      return "baseline";
    case InstructionSet::kAvx2:
      return "avx2";
    case InstructionSet::kAvx512:
      return "avx512";
  }
  return "";
}

bool supported(InstructionSet set) {
  if (set == InstructionSet::kBaseline) return true;
#if defined(__x86_64__)
  // The psABI level that the loops are compiled for (see CMakeLists.txt), with the operating system's
  // support for the registers; compilers know these names since gcc 11 and clang 12.
  __builtin_cpu_init();
  return set == InstructionSet::kAvx2 ? __builtin_cpu_supports("x86-64-v3") != 0
                                      : __builtin_cpu_supports("x86-64-v4") != 0;
#else
  return false;
#endif
}

InstructionSet selected_instruction_set() { return selection(); }

void select_instruction_set(std::string_view wanted) { selection() = find(wanted, "set_cpu_capability"); }

}  // namespace fused_adamw::cpu
