#include "locked_copies.h"

#include "host_weights.h"

#include <algorithm>
#include <stdexcept>
#include <sys/mman.h>

namespace skippy {

void LockedCopies::lock(ggml_cgraph *graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        for (const ggml_tensor *source : ggml_graph_node(graph, i)->src) {
            if (!is_weight_of_host(source) || ggml_backend_buffer_is_host(source->buffer)) {
                continue;
            }
            ggml_backend_buffer_t buffer = source->buffer;
            if (std::find(locked_.begin(), locked_.end(), buffer) != locked_.end()) {
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
