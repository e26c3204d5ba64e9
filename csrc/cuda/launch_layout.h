// Where the members of launch_parameters.h lie, for kernels that are not written in C++.
#pragma once

#include <map>
#include <string>

namespace fused_adamw::cuda {

// Offsets in bytes by "Struct.member", sizes by "Struct", and the constants.
std::map<std::string, long long> launch_layout();

}  // namespace fused_adamw::cuda
