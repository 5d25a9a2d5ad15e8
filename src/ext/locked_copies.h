// Weights that llama.cpp laid out for the processor (repacked, AMX): its own locking in memory leaves them out.
#pragma once

#include "ggml_device_abi.h"

#include <vector>

namespace skippy {

class LockedCopies {
  public:
    // Locks the buffers of such weights that a graph uses, until they are freed. Throws std::runtime_error where that
    // is not allowed.
    void lock(ggml_cgraph *graph);

  private:
    std::vector<ggml_backend_buffer_t> locked_;
};

} // namespace skippy
