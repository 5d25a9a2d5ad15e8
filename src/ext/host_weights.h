#pragma once

#include <ggml-backend.h>
#include <ggml.h>

namespace skippy {

// Whether a tensor is a weight in this host's memory, be it laid out for the processor or as in its file.
inline bool is_weight_of_host(const ggml_tensor *tensor) {
    if (tensor == nullptr || tensor->data == nullptr || tensor->buffer == nullptr ||
        ggml_backend_buffer_get_usage(tensor->buffer) != GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
        return false;
    }
    ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
    return device == nullptr || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

} // namespace skippy
