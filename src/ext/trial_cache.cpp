#include "trial_cache.h"

#include "ggml_device_abi.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace skippy {
namespace {

constexpr int first_cells = 16; // all filled
constexpr int cell_step = 16;   // of those behind, one in so many: filling takes time, and this is enough
constexpr int different_rows = 7;

bool has_contents(int cell) { return cell < first_cells || cell % cell_step == 0; }

} // namespace

float made_up_value(uint64_t seed, uint64_t index) {
    float sum = 0;
    for (uint64_t part = 0; part < 4; ++part) { // splitmix64
        uint64_t x = seed * 0x9E3779B97F4A7C15U + index * 4 + part;
        x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
        x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
        x ^= x >> 31U;
        sum += static_cast<float>(x >> 40U) / static_cast<float>(1U << 24U);
    }
    return (sum - 2.0F) * std::sqrt(3.0F); // four uniform values have a variance of 1/3
}

void write_made_up(ggml_type type, void *data, size_t n, uint64_t seed) {
    std::vector<float> values(n);
    for (size_t i = 0; i < n; ++i) {
        values[i] = made_up_value(seed, i);
    }
    const auto from_float = ggml_get_type_traits(type)->from_float_ref;
    if (type == GGML_TYPE_F32) {
        std::memcpy(data, values.data(), n * sizeof(float));
    } else if (from_float != nullptr) {
        from_float(values.data(), data, static_cast<int64_t>(n));
    } else {
        std::memset(data, 0, ggml_row_size(type, static_cast<int64_t>(n)));
    }
}

bool TrialCache::is_recurrent(const ggml_tensor *tensor) {
    return std::strstr(tensor->name, "_r_l") != nullptr || std::strstr(tensor->name, "_s_l") != nullptr;
}

void TrialCache::write(const Cache &cache, int64_t row, const std::vector<char> &bytes) {
    ggml_backend_tensor_set(cache.tensor, bytes.data(), static_cast<size_t>(row) * bytes.size(), bytes.size());
}

void TrialCache::note(ggml_cgraph *graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor *root = ggml_graph_node(graph, i);
        if (root->view_src == nullptr) {
            continue;
        }
        while (root->view_src != nullptr) {
            root = root->view_src;
        }
        const bool known =
            std::any_of(caches_.begin(), caches_.end(), [&](const Cache &cache) { return cache.tensor == root; });
        // what is neither a weight nor temporary is kept from batch to batch
        if (known || root->buffer == nullptr || root->buffer->usage != GGML_BACKEND_BUFFER_USAGE_ANY) {
            continue;
        }
        if (std::strncmp(root->name, "cache_", 6) != 0 || !ggml_is_contiguous(root)) {
            knows_all_ = false;
            continue;
        }
        Cache cache{root, {}};
        uint64_t seed = 1;
        for (const char *c = root->name; *c != '\0'; ++c) {
            seed = seed * 31 + static_cast<unsigned char>(*c);
        }
        const int n_rows = is_recurrent(root) ? 1 : different_rows;
        for (int row = 0; row < n_rows; ++row) {
            cache.rows.emplace_back(ggml_row_size(root->type, root->ne[0]));
            write_made_up(root->type, cache.rows.back().data(), static_cast<size_t>(root->ne[0]),
                          seed + static_cast<uint64_t>(row));
        }
        caches_.push_back(std::move(cache));
    }
}

void TrialCache::fill(int n_cells) {
    std::vector<int> cells(written_.begin(), written_.end());
    for (int cell = filled_; cell < n_cells; ++cell) {
        if (has_contents(cell)) {
            cells.push_back(cell);
        }
    }
    for (const Cache &cache : caches_) {
        const int64_t n_rows = ggml_nrows(cache.tensor), per_stream = cache.tensor->ne[1];
        if (is_recurrent(cache.tensor)) {
            for (int64_t row = 0; filled_ == 0 && row < n_rows; ++row) {
                write(cache, row, cache.rows.front());
            }
            continue;
        }
        const std::vector<char> zeros(cache.rows.front().size());
        for (int64_t first = 0; first < n_rows; first += per_stream) {
            for (const int cell : cells) {
                if (cell < per_stream) { // a rolling window holds fewer than the lane
                    write(cache, first + cell,
                          has_contents(cell) ? cache.rows[static_cast<size_t>(cell % different_rows)] : zeros);
                }
            }
        }
    }
    used_cells_.insert(cells.begin(), cells.end());
    written_.clear();
    filled_ = std::max(filled_, n_cells);
}

bool TrialCache::clear() {
    used_cells_.insert(written_.begin(), written_.end());
    const bool clears = sparse_clear_ && knows_all_ && !caches_.empty();
    for (const Cache &cache : caches_) {
        const size_t row_bytes = cache.rows.front().size();
        const int64_t n_rows = clears ? ggml_nrows(cache.tensor) : 0, per_stream = cache.tensor->ne[1];
        for (int64_t first = 0; first < n_rows; first += per_stream) {
            for (const int cell : used_cells_) {
                ggml_backend_tensor_memset(cache.tensor, 0, static_cast<size_t>(first + cell) * row_bytes, row_bytes);
            }
        }
    }
    filled_ = 0;
    written_.clear();
    used_cells_.clear();
    return clears;
}

} // namespace skippy
