// The instruction sets that the CPU loops are compiled for, and the choice at run time.
#pragma once

#include <string_view>

namespace fused_adamw::cpu {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

inline constexpr InstructionSet kInstructionSets[] = {InstructionSet::kBaseline, InstructionSet::kAvx2,
                                                      InstructionSet::kAvx512};

std::string_view name(InstructionSet set);

// Whether this build has loops for the set and this processor runs them.
bool supported(InstructionSet set);

// The best supported set, unless the environment variable FUSED_ADAMW_CPU_CAPABILITY or
// select_instruction_set() says otherwise. All sets give the same bits.
InstructionSet selected_instruction_set();

// Throws std::invalid_argument where the set is unknown or not supported; the message names those that are.
void select_instruction_set(std::string_view name);

}  // namespace fused_adamw::cpu
