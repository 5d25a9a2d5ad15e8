#include "locked_copies.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <stdexcept>
#include <sys/mman.h>

namespace skippy {
namespace {

bool is_copy(ggml_backend_buffer_t buffer) {
    if (buffer == nullptr || ggml_backend_buffer_get_usage(buffer) != GGML_BACKEND_BUFFER_USAGE_WEIGHTS ||
        ggml_backend_buffer_is_host(buffer)) {
        return false;
    }
    ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer));
    return device != nullptr && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

} // namespace

void LockedCopies::lock(ggml_cgraph *graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        for (const ggml_tensor *source : ggml_graph_node(graph, i)->src) {
            ggml_backend_buffer_t buffer = source == nullptr ? nullptr : source->buffer;
            if (!is_copy(buffer) || std::find(locked_.begin(), locked_.end(), buffer) != locked_.end()) {
                continue;
            }
            if (mlock(ggml_backend_buffer_get_base(buffer), ggml_backend_buffer_get_size(buffer)) != 0) {
                throw std::runtime_error("the weights could not be locked in memory: raise `ulimit -l`");
            }
            locked_.push_back(buffer);
        }
    }
}

} // namespace skippy
