// Keeps weights in the processor's cache while their stage waits: another stage's time is enough for other programs to
// push them out, and loading them again is a good part of what a step of few rows takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

struct ggml_cgraph;

namespace skippy {

class WarmWeights {
  public:
    // Notes the weights in this host's memory that the matrix products of a graph read whole, in their order.
    void note(ggml_cgraph *graph);
    // Asks the processor to load the next `n_bytes` of the first `limit` bytes; behind the last, it begins again. Only
    // hints: no page of a mapped file is read for them.
    void load(size_t limit, size_t n_bytes);
    // The next `load` begins with the first byte, which is what a run reads first and has not read for longest.
    void rewind() { range_ = offset_ = before_ = 0; }
    size_t bytes() const;

  private:
    struct Range {
        const uint8_t *data;
        size_t n_bytes;
    };

    std::vector<Range> ranges_;
    size_t range_ = 0, offset_ = 0; // of the next byte
    size_t before_ = 0;             // bytes of the ranges before it
};

} // namespace skippy
