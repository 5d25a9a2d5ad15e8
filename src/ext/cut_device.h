// The two ggml devices that stand for the layers before and behind a stage. They compute nothing and their buffers are
// addresses without memory; ggml's scheduler cuts the graph at them and copies what crosses (docs/design.md).
#pragma once

#include "crossing.h"
#include "ggml_device_abi.h"
#include "layer_map.h"

namespace skippy {

class CutDevice;

// One stage's cut: its layers, its two devices and the traffic across them. Must outlive the model and the context
// that were opened with its devices. Pinned in memory: ggml keeps pointers into it.
class Cut {
  public:
    // layers [begin, end) of n_layers; whatever the model stores for layers beyond n_layers belongs to the last stage.
    Cut(int n_layers, int begin, int end);
    ~Cut();
    Cut(const Cut &) = delete;
    Cut &operator=(const Cut &) = delete;

    ggml_backend_dev_t before();
    ggml_backend_dev_t after();
    ggml_backend_buffer_type_t before_buffer_type();
    bool is_away(ggml_backend_buffer_type_t type) const;

    // Does a node of the graph belong to this stage's own layers?
    bool runs_here(const ggml_tensor *node) { return (is_first() || !runs_before(node)) && !runs_after(node); }

    bool is_first() const { return begin_ == 0; }
    bool is_last() const { return end_ == n_layers_; }

    // Call when the model is loaded, before a context is made.
    void start_remembering() { layers_.start_remembering(); }

    Crossing &crossing() { return crossing_; }

  private:
    friend class CutDevice;
    bool runs_before(const ggml_tensor *node) { return layers_.layer_of(node) < begin_; }
    bool runs_after(const ggml_tensor *node) { return !is_last() && layers_.layer_of(node) >= end_; }

    int n_layers_, begin_, end_;
    LayerMap layers_;
    Crossing crossing_;
    CutDevice *before_;
    CutDevice *after_;
};

} // namespace skippy
