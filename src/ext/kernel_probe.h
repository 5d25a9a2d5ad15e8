// Whether the matrix kernels that llama.cpp chose for this processor run at all.
#pragma once

#include <string>

namespace skippy {

// Whether llama.cpp would lay weights out for AMX.
bool has_amx();

// What is wrong with the AMX kernels of the loaded library, or "" where they run or are not there. Asks once.
//
// GCC before 11.5, 12.4 and 13.3 drops most of the tile configuration (GCC bug 114098), and the first product of two
// rows ends the process with SIGSEGV. So a child process tries one; it shares nothing with this one that it changes.
const std::string &amx_fault();

} // namespace skippy
