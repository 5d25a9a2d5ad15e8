// What llama.cpp moves between the saved state of a lane and its caches, noted instead of done: the book-keeping of a
// lane can then be saved and restored without touching its rows.
#pragma once

#include "ggml_device_abi.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace skippy {

class StateTraffic {
  public:
    struct Move {
        const ggml_tensor *tensor;
        size_t offset, size;
        const uint8_t *at; // in the saved state
    };

    // While one lives, nothing that this thread reads from or writes to `buffers` and the cut devices is moved.
    explicit StateTraffic(const std::vector<ggml_backend_buffer_t> &buffers);
    ~StateTraffic();
    StateTraffic(const StateTraffic &) = delete;
    StateTraffic &operator=(const StateTraffic &) = delete;

    const std::vector<Move> &moves() const { return moves_; }

    // For the cut devices' buffers: false where none lives on this thread.
    static bool note(const ggml_tensor *tensor, const void *at, size_t offset, size_t size);

  private:
    struct Usual {
        ggml_backend_buffer_t buffer;
        decltype(skippy_buffer_interface::set_tensor) set_tensor;
        decltype(skippy_buffer_interface::get_tensor) get_tensor;
    };
    std::vector<Usual> usual_;
    std::vector<Move> moves_;
};

} // namespace skippy
