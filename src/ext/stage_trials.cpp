// Trial runs of a stage (stage_context.h): rows on lanes that hold made-up contents.
#include "stage_context.h"

#include "native_guard.h"

#include <algorithm>
#include <stdexcept>

namespace skippy {
namespace {

constexpr int32_t token_step = 7919; // between the tokens that neighbouring lanes get

std::vector<uint8_t> bytes_of(const float *values, int n) {
    const auto *bytes = reinterpret_cast<const uint8_t *>(values);
    return {bytes, bytes + static_cast<size_t>(n) * sizeof(float)};
}

// Makes llama.cpp keep the input of the head beside the logits; of models with recurrent layers not, whose batches it
// would then split by lane.
class WithEmbeddings {
  public:
    WithEmbeddings(llama_context *context, bool is_last) : context_(context), on(is_last && can_have(context)) {
        llama_set_embeddings(context, on);
    }
    ~WithEmbeddings() { llama_set_embeddings(context_, false); }
    WithEmbeddings(const WithEmbeddings &) = delete;
    WithEmbeddings &operator=(const WithEmbeddings &) = delete;

  private:
    static bool can_have(const llama_context *context) {
        const llama_model *model = llama_get_model(context);
        return llama_pooling_type(context) == LLAMA_POOLING_TYPE_NONE && !llama_model_is_recurrent(model) &&
               !llama_model_is_hybrid(model);
    }

    llama_context *context_;

  public:
    const bool on;
};

class CrossingEnd {
  public:
    explicit CrossingEnd(Crossing &crossing) : crossing_(crossing) {}
    ~CrossingEnd() { crossing_.end(); }
    CrossingEnd(const CrossingEnd &) = delete;
    CrossingEnd &operator=(const CrossingEnd &) = delete;

  private:
    Crossing &crossing_;
};

} // namespace

void StageContext::decode_trial(const std::vector<LaneRows> &rows, const std::vector<int32_t> &outputs) {
    std::vector<int32_t> tokens;
    for (const LaneRows &entry : rows) {
        tokens.insert(tokens.end(), static_cast<size_t>(std::max(entry.n_rows, 0)),
                      (entry.lane + 1) * token_step % n_vocab_);
    }
    check(rows, tokens, outputs);
    const int status = decode(rows, {0, rows.size(), 0, static_cast<int>(tokens.size())}, tokens, outputs);
    if (status != 0) {
        throw std::runtime_error(NativeGuard::error_text("the trial run failed with status " + std::to_string(status)));
    }
    if (!model_.cut().crossing().fault().empty()) {
        throw std::runtime_error(model_.cut().crossing().fault());
    }
    for (const LaneRows &entry : rows) {
        positions_[static_cast<size_t>(entry.lane)] = entry.position + entry.n_rows;
    }
}

std::map<CrossingKey, uint64_t> StageContext::made_up_row_bytes() const {
    std::map<CrossingKey, uint64_t> row_bytes;
    for (const CrossingSpec &spec : wanted_) {
        row_bytes[spec.key] = spec.fixed_bytes == 0 ? spec.row_bytes : 0;
    }
    return row_bytes;
}

void StageContext::pretend(const LaneRows &rows) {
    const InUse in_use(busy_);
    const NativeGuard guard;
    Crossing &crossing = model_.cut().crossing();
    const std::vector<CrossingKey> none;
    crossing.begin_made_up(made_up_row_bytes(), static_cast<uint64_t>(rows.lane), &none);
    const CrossingEnd end(crossing);
    const Skipping skipping(*this, [this](ggml_cgraph *graph) { trial_cache_.note(graph); });
    decode_trial({rows}, {});
}

std::vector<RowBits> StageContext::trial(int first_lane, int n_lanes) {
    const InUse in_use(busy_);
    const NativeGuard guard;
    if (first_lane < 0 || n_lanes < 1 || first_lane > options_.lanes - n_lanes) {
        throw std::invalid_argument("a trial on " + std::to_string(n_lanes) + " lanes from lane " +
                                    std::to_string(first_lane) + " on: wanted lanes 0 to " +
                                    std::to_string(options_.lanes - 1));
    }
    logits_.clear();
    kept_.clear();
    trial_cache_.fill(*std::max_element(positions_.begin(), positions_.end()));
    std::vector<LaneRows> rows;
    std::vector<int32_t> outputs;
    for (int row = 0; row < n_lanes; ++row) {
        const int position = positions_[static_cast<size_t>(first_lane + row)];
        rows.push_back({first_lane + row, position, 1});
        trial_cache_.written(position);
        if (model_.cut().is_last()) {
            outputs.push_back(row);
        }
    }
    std::vector<CrossingKey> offered;
    for (const CrossingSpec &spec : offered_) {
        offered.push_back(spec.key);
    }
    Crossing &crossing = model_.cut().crossing();
    crossing.begin_made_up(made_up_row_bytes(), static_cast<uint64_t>(first_lane), &offered);
    const CrossingEnd end(crossing);
    const WithEmbeddings with_embeddings(context_, model_.cut().is_last());
    decode_trial(rows, outputs);
    std::vector<RowBits> bits = rows_of(crossing.leaving(), rows.size(), with_embeddings.on);
    for (const LaneRows &entry : rows) {
        if (can_trim_) {
            trim(entry.lane, entry.position);
        }
    }
    return bits;
}

// Integers, and masks, whose size follows the context, are inputs that every stage makes for itself.
std::vector<RowBits> StageContext::rows_of(const std::vector<LeavingTensor> &leaving, size_t n_rows,
                                           bool with_embeddings) const {
    std::vector<RowBits> bits(n_rows);
    if (model_.cut().is_last()) {
        for (size_t row = 0; row < n_rows; ++row) {
            const float *values = llama_get_logits_ith(context_, static_cast<int32_t>(row));
            if (values == nullptr) {
                throw std::runtime_error("the trial run gave no logits");
            }
            bits[row][{"logits", 0}] = bytes_of(values, n_vocab_);
            // the head's quantized input hides small differences that the lane's next tokens would show
            const float *norm =
                with_embeddings ? llama_get_embeddings_ith(context_, static_cast<int32_t>(row)) : nullptr;
            if (norm != nullptr) {
                bits[row][{"norm", 0}] = bytes_of(norm, llama_model_n_embd_out(model_.model()));
            }
        }
        return bits;
    }
    for (const LeavingTensor &tensor : leaving) {
        const auto spec = std::find_if(offered_.begin(), offered_.end(),
                                       [&](const CrossingSpec &s) { return s.key == tensor.info.key; });
        const bool is_float = tensor.info.type == GGML_TYPE_F32 || tensor.info.type == GGML_TYPE_F16 ||
                              tensor.info.type == GGML_TYPE_BF16;
        if (!is_float || spec->fixed_bytes != 0 || spec->row_bytes * n_rows != tensor.info.nbytes) {
            continue;
        }
        for (size_t row = 0; row < n_rows; ++row) {
            const uint8_t *bytes = tensor.data.get() + row * spec->row_bytes;
            bits[row][tensor.info.key] = {bytes, bytes + spec->row_bytes};
        }
    }
    return bits;
}

void StageContext::forget_trials() {
    const InUse in_use(busy_);
    const NativeGuard guard;
    logits_.clear();
    llama_memory_clear(llama_get_memory(context_), !trial_cache_.clear());
    std::fill(positions_.begin(), positions_.end(), 0);
}

} // namespace skippy
