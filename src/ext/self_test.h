#pragma once

namespace skippy {

// Proves the device interface of ggml_device_abi.h against the loaded library: a tiny graph is cut in two, run stage by
// stage, and its values are compared. Throws std::runtime_error where anything is off.
void self_test();

} // namespace skippy
