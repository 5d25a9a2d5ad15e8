// What crosses the boundaries of a stage while it runs one micro-batch: the tensors that arrived from upstream, and
// those that leave for downstream. Filled and read by the cut device, owned by the stage's context.
#pragma once

#include "ggml.h"

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace skippy {

// Names need not be unique: occurrence counts the tensors of one name in the scheduler's copy order.
using CrossingKey = std::pair<std::string, int>;
using Shape = std::array<int64_t, GGML_MAX_DIMS>; // elements, innermost first

struct CrossingTensor {
    CrossingKey key;
    ggml_type type;
    Shape shape;
    size_t nbytes;
};

struct ArrivedTensor {
    CrossingTensor info;
    const uint8_t *data; // owned by the caller of StageContext::run for the length of the call
};

struct LeavingTensor {
    CrossingTensor info;
    std::unique_ptr<uint8_t[]> data; // empty while only the names are recorded
};

// The traffic of one micro-batch. Not thread-safe: one thread runs a stage.
class Crossing {
  public:
    // A dry run records what is asked for and offered; what is asked for reads as zeros.
    void begin_recording();
    // A real run serves `arrived` and keeps the bytes of the tensors named in `wanted_downstream`.
    void begin(std::vector<ArrivedTensor> arrived, const std::vector<CrossingKey> *wanted_downstream);
    // A trial run: what is asked for reads as made-up values, for each row (of `row_bytes`; 0: not in rows) others. The
    // first one's are those of `first_row`.
    void begin_made_up(std::map<CrossingKey, uint64_t> row_bytes, uint64_t first_row,
                       const std::vector<CrossingKey> *wanted_downstream);
    // Outside of begin..end the device neither serves nor keeps anything (loading, state export).
    void end();

    void fetch(const ggml_tensor *tensor, void *data, size_t offset, size_t size);
    // A weight of other stages is read: right only where it goes on to the layers behind this stage (a tied output
    // matrix seen from a middle stage), which do not exist here either.
    void fetch_weight(const ggml_tensor *tensor);
    void store(const ggml_tensor *tensor, const void *data, size_t offset, size_t size);

    const std::vector<CrossingTensor> &asked() const { return asked_; }
    std::vector<LeavingTensor> take_leaving() { return std::move(leaving_); }
    const std::vector<LeavingTensor> &leaving() const { return leaving_; }
    // First thing that went wrong since begin(), or "".
    const std::string &fault();

  private:
    enum class Mode { idle, recording, made_up, running };
    void make_up(const CrossingTensor &asked, void *data, size_t offset, size_t size);
    static std::string original_name(const char *name);
    static CrossingTensor describe(const ggml_tensor *tensor, CrossingKey key);
    void fail(std::string what);
    void expect_no_weight();

    Mode mode_ = Mode::idle;
    std::string fault_;
    std::string weight_in_transit_;
    std::vector<ArrivedTensor> arrived_;
    std::map<CrossingKey, uint64_t> made_up_row_bytes_;
    uint64_t made_up_first_row_ = 0;
    const std::vector<CrossingKey> *wanted_downstream_ = nullptr;
    std::vector<CrossingTensor> asked_;
    std::vector<LeavingTensor> leaving_;
    // A tensor can be asked for more than once (by two CPU backends): remember which occurrence it was.
    std::unordered_map<const ggml_tensor *, size_t> asked_index_;
    std::unordered_map<const ggml_tensor *, long> leaving_index_;
    std::map<std::string, int> asked_count_;
    std::map<std::string, int> leaving_count_;
};

} // namespace skippy
