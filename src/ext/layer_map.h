// Which layer of the model does a node of llama.cpp's graph belong to? The only logic of the cut.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <unordered_map>

namespace skippy {

class LayerMap {
  public:
    // Norm and head behind the last layer.
    static constexpr int output_layer = 1 << 20;

    explicit LayerMap(int n_layers) : n_layers_(n_layers) {}

    // -1: before the first layer (embedding), 0..n_layers-1, or output_layer.
    int layer_of(const ggml_tensor *node);

    // Answers are remembered only once the model is loaded: while llama.cpp places weights it asks about throw-away
    // nodes.
    void start_remembering() { remembers_ = true; }
    // Nodes live in an arena that llama.cpp fills anew for every graph: what is known of them dies with the graph.
    void forget() { known_.clear(); }

  private:
    int resolve(const ggml_tensor *node);

    int n_layers_;
    bool remembers_ = false;
    std::unordered_map<const ggml_tensor *, int> known_;
};

} // namespace skippy
