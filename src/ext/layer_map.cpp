#include "layer_map.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace skippy {
namespace {

constexpr int unknown = -1;

// "l_out-12" -> 12; also "l_out-12 (view)" and "DEVICE#l_out-12#0", the scheduler's copies.
int layer_in_name(const char *name) {
    const char *dash = std::strrchr(name, '-');
    if (dash == nullptr || std::isdigit(static_cast<unsigned char>(dash[1])) == 0) {
        return unknown;
    }
    char *rest = nullptr;
    const long layer = std::strtol(dash + 1, &rest, 10);
    return *rest == '\0' || *rest == ' ' || *rest == '#' ? static_cast<int>(layer) : unknown;
}

// Weights ("blk.12.attn_q.weight", "output.weight") and caches ("cache_k_l12") have a buffer before any graph exists.
int layer_of_stored(const ggml_tensor *tensor) {
    while (tensor->view_src != nullptr) {
        tensor = tensor->view_src;
    }
    if (tensor->buffer == nullptr) {
        return unknown;
    }
    int layer = unknown;
    if (std::sscanf(tensor->name, "blk.%d.", &layer) == 1) {
        return layer;
    }
    const char *suffix = std::strstr(tensor->name, "_l");
    if (std::strncmp(tensor->name, "cache", 5) == 0 && suffix != nullptr && std::sscanf(suffix, "_l%d", &layer) == 1) {
        return layer;
    }
    return std::strncmp(tensor->name, "output", 6) == 0 ? LayerMap::output_layer : unknown;
}

} // namespace

int LayerMap::layer_of(const ggml_tensor *node) {
    if (const auto found = known_.find(node); found != known_.end()) {
        return found->second;
    }
    const int layer = resolve(node);
    if (remembers_) {
        known_.emplace(node, layer);
    }
    return layer;
}

int LayerMap::resolve(const ggml_tensor *node) {
    int layer = unknown;
    for (const ggml_tensor *source : node->src) { // 1. the weights and caches it uses
        if (source == nullptr) {
            continue;
        }
        if (std::strcmp(source->name, "out_ids") == 0) { // the selection of output rows ends the last layer
            layer = std::max(layer, n_layers_ - 1);
        }
        layer = std::max(layer, layer_of_stored(source));
    }
    if (layer != unknown) {
        return layer;
    }
    if ((layer = layer_in_name(node->name)) != unknown) { // 2. its name
        return layer;
    }
    if (std::strncmp(node->name, "result_", 7) == 0) {
        return output_layer;
    }
    if ((layer = layer_of_stored(node)) != unknown) {
        return layer;
    }
    if (node->view_src != nullptr) { // 3. the latest layer among its sources
        layer = layer_of(node->view_src);
    }
    for (const ggml_tensor *source : node->src) {
        if (source != nullptr) {
            layer = std::max(layer, layer_of(source));
        }
    }
    return layer;
}

} // namespace skippy
