#include "warm_weights.h"

#include "host_weights.h"

#include <algorithm>

namespace skippy {
namespace {

constexpr size_t line_bytes = 64;

} // namespace

void WarmWeights::note(ggml_cgraph *graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor *node = ggml_graph_node(graph, i);
        // Not of experts, which are chosen by the row, nor of a head that is tied to the first stage's embeddings,
        // whose product has no rows here.
        if (node->op != GGML_OP_MUL_MAT || ggml_is_empty(node) || !is_weight_of_host(node->src[0])) {
            continue;
        }
        const auto *data = static_cast<const uint8_t *>(node->src[0]->data);
        const bool known = std::any_of(ranges_.begin(), ranges_.end(), [&](const Range &r) { return r.data == data; });
        if (!known) {
            ranges_.push_back({data, ggml_nbytes(node->src[0])});
        }
    }
}

void WarmWeights::load(size_t limit, size_t n_bytes) {
    limit = std::min(limit, bytes());
    n_bytes = std::min(n_bytes, limit);
    while (n_bytes > 0) {
        if (range_ == ranges_.size() || before_ + offset_ >= limit) {
            rewind();
        }
        const Range &range = ranges_[range_];
        const size_t part = std::min({n_bytes, range.n_bytes - offset_, limit - before_ - offset_});
        for (size_t at = 0; at < part; at += line_bytes) {
            __builtin_prefetch(range.data + offset_ + at, 0, 2);
        }
        n_bytes -= part;
        offset_ += part;
        if (offset_ == range.n_bytes) {
            before_ += range.n_bytes;
            ++range_;
            offset_ = 0;
        }
    }
}

size_t WarmWeights::bytes() const {
    size_t sum = 0;
    for (const Range &range : ranges_) {
        sum += range.n_bytes;
    }
    return sum;
}

} // namespace skippy
