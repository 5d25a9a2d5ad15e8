// For dry runs: while it skips, the back ends that a context was made with compute nothing, so that a graph is built,
// cut and its crossing tensors copied without the time a real run takes. Values are then meaningless.
#pragma once

#include "ggml_device_abi.h"

#include <functional>
#include <utility>
#include <vector>

namespace skippy {

class SkippedCompute {
  public:
    using Visit = std::function<void(ggml_cgraph *)>;

    // Notes every back end that this thread makes until `stop_noting`. Contexts made by other threads are left alone.
    SkippedCompute();
    ~SkippedCompute();
    SkippedCompute(const SkippedCompute &) = delete;
    SkippedCompute &operator=(const SkippedCompute &) = delete;

    void stop_noting();
    // From now on every graph is handed to `visit` instead of being computed, until `restore`. For the thread that
    // runs the context.
    void skip(Visit visit = nullptr);
    // The same, but the graphs are computed as well.
    void watch(Visit visit);
    // Before the context is freed, and at the end.
    void restore();

  private:
    using Compute = ggml_status (*)(ggml_backend_t, ggml_cgraph *);

    void replace(Visit visit, Compute compute);
    static ggml_status visit_and_compute(ggml_backend_t backend, ggml_cgraph *graph);
    static ggml_backend_t init_and_note(ggml_backend_dev_t device, const char *params);

    bool noting_ = true, replaced_ = false;
    std::vector<std::pair<ggml_backend_t, Compute>> backends_;
};

} // namespace skippy
