#include "stage_context.h"

#include "llama_ext_abi.h"
#include "native_guard.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

namespace skippy {
namespace {

constexpr int stream_padding = 256; // llama.cpp rounds a stream's cells up to this
// The int32 list of output rows comes before the activations in a buffer that ggml aligns to 32 bytes. Unless it fills
// lines of 64 bytes, every wide store crosses two of them, which makes AMX prefill a quarter slower.
constexpr int outputs_per_line = 16;

ggml_type cache_type(const std::string &name) {
    constexpr std::array types = {GGML_TYPE_F32,  GGML_TYPE_F16,    GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
                                  GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1};
    for (const ggml_type type : types) {
        if (name == ggml_type_name(type)) {
            return type;
        }
    }
    throw std::runtime_error("cache type '" + name +
                             "': wanted f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0 or q5_1");
}

bool can_forget_parts(const StageModel &model, const ContextOptions &options) {
    const bool rolling_window = llama_model_n_swa(model.model()) > 0 && !options.swa_full;
    return !llama_model_is_recurrent(model.model()) && !llama_model_is_hybrid(model.model()) && !rolling_window;
}

std::string lane_text(const LaneRows &rows) {
    return "lane " + std::to_string(rows.lane) + " at position " + std::to_string(rows.position);
}

} // namespace

StageContext::StageContext(StageModel &model, const ContextOptions &options)
    : model_(model), options_(options), trial_cache_(options.flash_attn == 1 && can_forget_parts(model, options)),
      can_trim_(can_forget_parts(model, options)) {
    if (options.lanes < 1 || options.n_ctx < 0 || options.n_batch < 1 || options.n_ubatch < 1 || options.threads < 1 ||
        options.threads_batch < 1 || (options.max_outputs != 0 && options.max_outputs < options.lanes)) {
        throw std::runtime_error("lanes, batch sizes and threads must be at least 1, outputs as many as lanes");
    }
    if (!options.kv_offload && model.has_gpu_layers()) {
        // llama.cpp would put every layer's cache into this host's memory, other stages' too
        throw std::runtime_error("KV caches of GPU layers cannot stay on the CPU in a stage: leave kv_offload on");
    }
    n_ctx_ = options.n_ctx != 0 ? options.n_ctx : llama_model_n_ctx_train(model.model());
    n_vocab_ = llama_vocab_n_tokens(model.vocab());
    const int64_t cells = (int64_t{n_ctx_} + stream_padding - 1) / stream_padding * stream_padding * options.lanes;
    if (n_ctx_ < 1 || cells > INT32_MAX) {
        throw std::runtime_error("a context of " + std::to_string(n_ctx_) + " tokens on " +
                                 std::to_string(options.lanes) + " lanes: wanted 1 to 2^31 tokens in all");
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<uint32_t>(cells);
    params.n_batch = static_cast<uint32_t>(options.n_batch);
    params.n_ubatch = static_cast<uint32_t>(options.n_ubatch);
    params.n_seq_max = static_cast<uint32_t>(options.lanes);
    const int output_lines = (options.max_outputs + outputs_per_line - 1) / outputs_per_line;
    params.n_outputs_max = static_cast<uint32_t>(output_lines * outputs_per_line);
    params.n_threads = options.threads;
    params.n_threads_batch = options.threads_batch;
    params.type_k = cache_type(options.cache_type_k);
    params.type_v = cache_type(options.cache_type_v);
    params.flash_attn_type = static_cast<llama_flash_attn_type>(options.flash_attn);
    params.offload_kqv = true;
    params.op_offload = options.op_offload;
    params.swa_full = options.swa_full;
    params.kv_unified = false; // a session's bits must not depend on where its neighbours' cells lie
    params.no_perf = true;

    install_callbacks();
    const NativeGuard guard;
    context_ = llama_init_from_model(model.model(), params);
    if (context_ == nullptr) {
        throw std::runtime_error(NativeGuard::error_text("llama.cpp could not create the context"));
    }
    skipped_.stop_noting();
    positions_.assign(static_cast<size_t>(options.lanes), 0);
    try {
        {
            const bool mlock = model_.options().mlock;
            const auto look = [this, mlock](ggml_cgraph *graph) {
                warm_weights_.note(graph);
                if (mlock) {
                    locked_copies_.lock(graph);
                }
            };
            const Skipping skipping(*this, look, mlock);
            find_crossing();
        }
        learn_pages();
    } catch (...) {
        llama_free(context_);
        throw;
    }
}

StageContext::Skipping::Skipping(StageContext &context, SkippedCompute::Visit visit, bool on_gpus_too)
    : skipped_(context.skipped_) {
    if (!context.model_.has_gpu_layers()) {
        skipped_.skip(std::move(visit));
    } else if (on_gpus_too) {
        skipped_.watch(std::move(visit));
    }
}

StageContext::~StageContext() { llama_free(context_); }

std::vector<MicroBatch> StageContext::micro_batches(const std::vector<LaneRows> &rows) const {
    std::vector<MicroBatch> batches;
    int row = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
        const bool joins = i > 0 && rows[i].lane == rows[i - 1].lane + 1 && rows[i].n_rows == rows[i - 1].n_rows;
        if (joins) {
            batches.back().n_lanes++;
            batches.back().n_rows += rows[i].n_rows;
        } else {
            batches.push_back({i, 1, row, rows[i].n_rows});
        }
        row += rows[i].n_rows;
    }
    return batches;
}

void StageContext::check(const std::vector<LaneRows> &rows, const std::vector<int32_t> &tokens,
                         const std::vector<int32_t> &outputs) const {
    const auto refuse = [](const std::string &what) { throw std::invalid_argument(what); };
    size_t n_rows = 0;
    std::vector<bool> used(positions_.size());
    for (const LaneRows &entry : rows) {
        if (entry.lane < 0 || static_cast<size_t>(entry.lane) >= positions_.size()) {
            refuse("lane " + std::to_string(entry.lane) + ": wanted 0 to " + std::to_string(positions_.size() - 1));
        }
        const auto lane = static_cast<size_t>(entry.lane);
        if (used[lane]) {
            refuse("lane " + std::to_string(entry.lane) + " stands twice in one batch");
        }
        used[lane] = true;
        if (entry.n_rows < 1) {
            refuse(lane_text(entry) + ": " + std::to_string(entry.n_rows) + " rows, wanted at least 1");
        }
        if (entry.position < 0 || entry.n_rows > n_ctx_ - entry.position) {
            refuse(lane_text(entry) + ": " + std::to_string(entry.n_rows) + " rows do not fit in a context of " +
                   std::to_string(n_ctx_));
        }
        if (entry.position > positions_[lane]) {
            refuse(lane_text(entry) + " would leave a gap: this stage holds " + std::to_string(positions_[lane]) +
                   " tokens of it");
        }
        if (entry.position != 0 && entry.position < positions_[lane] && !can_trim_) {
            refuse(lane_text(entry) + ": this model cannot forget part of a lane that holds " +
                   std::to_string(positions_[lane]) + " tokens");
        }
        n_rows += static_cast<size_t>(entry.n_rows);
    }
    for (const MicroBatch &batch : micro_batches(rows)) {
        if (batch.n_rows > n_ubatch()) {
            refuse("a micro-batch of " + std::to_string(batch.n_rows) + " rows: wanted at most " +
                   std::to_string(n_ubatch()));
        }
    }
    if (n_rows == 0 || n_rows > static_cast<size_t>(n_batch()) || n_rows != tokens.size()) {
        refuse("a batch of " + std::to_string(n_rows) + " rows and " + std::to_string(tokens.size()) +
               " tokens: wanted equal numbers from 1 to " + std::to_string(n_batch()));
    }
    for (const int32_t token : tokens) {
        if (token < 0 || token >= n_vocab_) {
            refuse("token " + std::to_string(token) + ": wanted 0 to " + std::to_string(n_vocab_ - 1));
        }
    }
    if (!outputs.empty() && !model_.cut().is_last()) {
        refuse("logits were asked of a stage that is not the last");
    }
    int previous = -1;
    for (const int32_t row : outputs) {
        if (row <= previous || static_cast<size_t>(row) >= n_rows) {
            refuse("output row " + std::to_string(row) + ": wanted rising rows below " + std::to_string(n_rows));
        }
        previous = row;
    }
    if (options_.max_outputs != 0 && outputs.size() > static_cast<size_t>(options_.max_outputs)) {
        refuse(std::to_string(outputs.size()) + " output rows: wanted at most " + std::to_string(options_.max_outputs));
    }
}

void StageContext::check_arriving(const std::vector<MicroBatch> &batches,
                                  const std::vector<MicroBatchTensor> &arriving) const {
    const auto refuse = [](const std::string &what) { throw std::invalid_argument(what); };
    if (arriving.size() != wanted_.size() * batches.size()) {
        refuse(std::to_string(arriving.size()) + " tensors arrived, wanted " +
               std::to_string(wanted_.size() * batches.size()));
    }
    std::vector<bool> seen(arriving.size());
    for (const MicroBatchTensor &tensor : arriving) {
        const auto spec = std::find_if(wanted_.begin(), wanted_.end(),
                                       [&](const CrossingSpec &s) { return s.key == tensor.info.key; });
        const std::string name =
            "tensor '" + tensor.info.key.first + "' of micro-batch " + std::to_string(tensor.micro_batch);
        if (spec == wanted_.end() || tensor.micro_batch < 0 ||
            static_cast<size_t>(tensor.micro_batch) >= batches.size()) {
            refuse(name + " was not asked for");
        }
        const auto micro_batch = static_cast<size_t>(tensor.micro_batch);
        const size_t slot = static_cast<size_t>(spec - wanted_.begin()) * batches.size() + micro_batch;
        if (seen[slot]) {
            refuse(name + " arrived twice");
        }
        seen[slot] = true;
        const uint64_t bytes = spec->fixed_bytes + spec->row_bytes * static_cast<uint64_t>(batches[micro_batch].n_rows);
        uint64_t elements = 1;
        for (const int64_t n : tensor.info.shape) {
            if (n < 1 || static_cast<uint64_t>(n) > bytes / elements) {
                refuse(name + " has a dimension that does not fit its " + std::to_string(bytes) + " bytes");
            }
            elements *= static_cast<uint64_t>(n);
        }
        if (tensor.info.type != spec->type || tensor.info.nbytes != bytes ||
            elements * ggml_type_size(spec->type) != bytes) {
            refuse(name + " is " + std::to_string(tensor.info.nbytes) + " bytes of " +
                   ggml_type_name(tensor.info.type) + " with " + std::to_string(elements) + " elements, wanted " +
                   std::to_string(bytes) + " bytes of " + ggml_type_name(spec->type) + " with " +
                   std::to_string(bytes / ggml_type_size(spec->type)));
        }
    }
}

int StageContext::decode(const std::vector<LaneRows> &rows, const MicroBatch &batch, const std::vector<int32_t> &tokens,
                         const std::vector<int32_t> &outputs) {
    const auto n = static_cast<size_t>(batch.n_rows);
    const auto first = static_cast<size_t>(batch.first_row);
    std::vector<llama_token> ids(tokens.begin() + batch.first_row, tokens.begin() + batch.first_row + batch.n_rows);
    std::vector<llama_pos> positions;
    std::vector<int32_t> counts(n, 1);
    std::vector<llama_seq_id> lanes;
    std::vector<int8_t> marks(n, 0);
    positions.reserve(n);
    lanes.reserve(n);
    for (size_t i = 0; i < batch.n_lanes; ++i) {
        const LaneRows &entry = rows[batch.first_rows_index + i];
        for (int k = 0; k < entry.n_rows; ++k) {
            positions.push_back(entry.position + k);
            lanes.push_back(entry.lane);
        }
    }
    std::vector<llama_seq_id *> lane_pointers(n);
    for (size_t i = 0; i < n; ++i) {
        lane_pointers[i] = &lanes[i];
    }
    for (const int32_t row : outputs) {
        if (static_cast<size_t>(row) >= first && static_cast<size_t>(row) < first + n) {
            marks[static_cast<size_t>(row) - first] = 1;
        }
    }
    llama_batch native{};
    native.n_tokens = batch.n_rows;
    native.token = ids.data();
    native.pos = positions.data();
    native.n_seq_id = counts.data();
    native.seq_id = lane_pointers.data();
    native.logits = marks.data();
    const int status = llama_decode(context_, native);
    llama_synchronize(context_);
    return status;
}

void StageContext::keep_logits(const MicroBatch &batch, const std::vector<int32_t> &outputs, bool copy) {
    for (const int32_t row : outputs) {
        if (row < batch.first_row || row >= batch.first_row + batch.n_rows) {
            continue;
        }
        const float *values = llama_get_logits_ith(context_, row - batch.first_row);
        if (values != nullptr && copy) { // the next micro-batch overwrites them
            kept_.emplace_back(new float[static_cast<size_t>(n_vocab_)]);
            std::memcpy(kept_.back().get(), values, static_cast<size_t>(n_vocab_) * sizeof(float));
            values = kept_.back().get();
        }
        logits_.emplace_back(row, values);
    }
}

void StageContext::restore(const std::vector<LaneRows> &rows) {
    for (const LaneRows &entry : rows) {
        const bool part = can_trim_ && entry.position > 0;
        const bool done = part && llama_memory_seq_rm(llama_get_memory(context_), entry.lane, entry.position, -1);
        if (!done) {
            llama_memory_seq_rm(llama_get_memory(context_), entry.lane, -1, -1);
        }
        positions_[static_cast<size_t>(entry.lane)] = done ? entry.position : 0;
    }
}

std::vector<MicroBatchTensor> StageContext::run(const std::vector<LaneRows> &rows, const std::vector<int32_t> &tokens,
                                                const std::vector<int32_t> &outputs,
                                                std::vector<MicroBatchTensor> arriving) {
    const InUse in_use(busy_);
    check(rows, tokens, outputs);
    const std::vector<MicroBatch> batches = micro_batches(rows);
    check_arriving(batches, arriving);
    const NativeGuard guard;
    warm_weights_.rewind();
    logits_.clear();
    kept_.clear();
    for (const LaneRows &entry : rows) {
        if (entry.position < positions_[static_cast<size_t>(entry.lane)]) {
            trim(entry.lane, entry.position);
        }
    }
    std::vector<MicroBatchTensor> leaving;
    for (size_t index = 0; index < batches.size(); ++index) {
        std::vector<ArrivedTensor> here;
        for (MicroBatchTensor &tensor : arriving) {
            if (static_cast<size_t>(tensor.micro_batch) == index) {
                here.push_back({tensor.info, tensor.data});
            }
        }
        Crossing &crossing = model_.cut().crossing();
        crossing.begin(std::move(here), &served_);
        std::string problem;
        try {
            const int status = decode(rows, batches[index], tokens, outputs);
            if (status != 0) {
                problem = NativeGuard::error_text("llama_decode failed with status " + std::to_string(status));
            }
        } catch (const std::exception &error) {
            problem = error.what();
        }
        if (problem.empty()) {
            problem = crossing.fault();
        }
        if (problem.empty() && crossing.leaving().size() != served_.size()) {
            problem = "only " + std::to_string(crossing.leaving().size()) + " of " + std::to_string(served_.size()) +
                      " tensors for downstream left this stage";
        }
        for (LeavingTensor &tensor : crossing.take_leaving()) {
            leaving.push_back({static_cast<int>(index), std::move(tensor.info), nullptr, std::move(tensor.data)});
        }
        crossing.end();
        if (!problem.empty()) {
            restore(rows);
            throw std::runtime_error(problem);
        }
        keep_logits(batches[index], outputs, index + 1 < batches.size());
    }
    for (const LaneRows &entry : rows) {
        positions_[static_cast<size_t>(entry.lane)] = entry.position + entry.n_rows;
    }
    return leaving;
}

const float *StageContext::logits(int row) const {
    for (const auto &[known, values] : logits_) {
        if (known == row && values != nullptr) {
            return values;
        }
    }
    throw std::invalid_argument("row " + std::to_string(row) + " of the last batch has no logits");
}

void StageContext::trim(int lane, int position) {
    if (lane < 0 || static_cast<size_t>(lane) >= positions_.size() || position < 0) {
        throw std::invalid_argument("trim of lane " + std::to_string(lane) + " to " + std::to_string(position) +
                                    ": wanted lanes 0 to " + std::to_string(positions_.size() - 1));
    }
    int &held = positions_[static_cast<size_t>(lane)];
    if (position >= held) {
        return;
    }
    if (position == 0) {
        llama_memory_seq_rm(llama_get_memory(context_), lane, -1, -1);
    } else if (!can_trim_ || !llama_memory_seq_rm(llama_get_memory(context_), lane, position, -1)) {
        throw std::invalid_argument("this model cannot forget part of a lane: lane " + std::to_string(lane) +
                                    " holds " + std::to_string(held) + " tokens, wanted to keep " +
                                    std::to_string(position));
    }
    held = position;
}

void StageContext::serve(const std::vector<CrossingKey> &keys) {
    for (const CrossingKey &key : keys) {
        const bool known =
            std::any_of(offered_.begin(), offered_.end(), [&](const CrossingSpec &spec) { return spec.key == key; });
        if (!known) {
            throw std::invalid_argument("tensor '" + key.first + "' is not on offer");
        }
    }
    served_ = keys;
}

void StageContext::warm(size_t limit, size_t n_bytes) {
    const InUse in_use(busy_);
    warm_weights_.load(limit, n_bytes);
}

StageContext::Memory StageContext::memory() const {
    Memory memory{model_.own_bytes(), 0, 0};
    for (const auto &[type, bytes] : llama_get_memory_breakdown(context_)) {
        if (!model_.cut().is_away(type)) {
            memory.kv += bytes.context;
            memory.compute += bytes.compute;
        }
    }
    return memory;
}

// ---- what crosses

void StageContext::dry_run(int lanes, int rows_per_lane) {
    std::vector<LaneRows> rows;
    for (int lane = 0; lane < lanes; ++lane) {
        rows.push_back({lane, 0, rows_per_lane});
    }
    const std::vector<int32_t> tokens(static_cast<size_t>(lanes) * static_cast<size_t>(rows_per_lane), 0);
    const std::vector<int32_t> outputs = model_.cut().is_last() ? std::vector<int32_t>{0} : std::vector<int32_t>{};
    Crossing &crossing = model_.cut().crossing();
    crossing.begin_recording();
    const MicroBatch batch{0, rows.size(), 0, static_cast<int>(tokens.size())};
    const int status = decode(rows, batch, tokens, outputs);
    if (status != 0) {
        throw std::runtime_error(NativeGuard::error_text("the trial run failed with status " + std::to_string(status)));
    }
    if (!crossing.fault().empty()) {
        throw std::runtime_error(crossing.fault());
    }
    for (const LaneRows &entry : rows) {
        llama_memory_seq_rm(llama_get_memory(context_), entry.lane, -1, -1);
    }
}

// A tensor's size is linear in the rows of a micro-batch; two sizes give the line, further runs prove it.
void StageContext::find_crossing() {
    struct Trial {
        int lanes, rows_per_lane;
        std::vector<CrossingTensor> asked, offered;
    };
    std::vector<Trial> trials;
    const int longest = std::min({4, n_ubatch(), n_ctx_});
    for (const auto &[lanes, rows] : {std::pair{1, longest}, std::pair{1, 1}, std::pair{2, longest > 3 ? 2 : 1}}) {
        if (lanes > options_.lanes || lanes * rows > n_ubatch() || rows > n_ctx_) {
            continue;
        }
        dry_run(lanes, rows);
        Crossing &crossing = model_.cut().crossing();
        Trial trial{lanes, rows, crossing.asked(), {}};
        for (const LeavingTensor &tensor : crossing.leaving()) {
            trial.offered.push_back(tensor.info);
        }
        crossing.end();
        trials.push_back(std::move(trial));
    }
    const auto fit = [&](std::vector<CrossingTensor> Trial::*list, bool all_must_fit) {
        std::vector<CrossingSpec> specs;
        for (const CrossingTensor &tensor : trials.front().*list) {
            std::vector<std::pair<uint64_t, uint64_t>> points; // (rows, bytes)
            for (const Trial &trial : trials) {
                for (const CrossingTensor &other : trial.*list) {
                    if (other.key == tensor.key && other.type == tensor.type) {
                        points.emplace_back(static_cast<uint64_t>(trial.lanes) *
                                                static_cast<uint64_t>(trial.rows_per_lane),
                                            other.nbytes);
                    }
                }
            }
            CrossingSpec spec{tensor.key, tensor.type, 0, tensor.nbytes};
            const auto [fewest, most] = std::minmax_element(points.begin(), points.end());
            if (most->first > fewest->first && most->second >= fewest->second) {
                spec.row_bytes = (most->second - fewest->second) / (most->first - fewest->first);
                spec.fixed_bytes = fewest->second - std::min(fewest->second, spec.row_bytes * fewest->first);
            }
            bool fits = points.size() == trials.size();
            for (const auto &[rows, bytes] : points) {
                fits = fits && spec.fixed_bytes + spec.row_bytes * rows == bytes;
            }
            if (fits) {
                specs.push_back(std::move(spec));
            } else if (all_must_fit) {
                throw std::runtime_error("tensor '" + tensor.key.first +
                                         "' is needed from upstream in a form that changes with the batch: this model "
                                         "cannot be cut here");
            }
        }
        for (const Trial &trial : trials) {
            if (all_must_fit && (trial.*list).size() != (trials.front().*list).size()) {
                throw std::runtime_error(
                    "what is needed from upstream changes with the batch: this model cannot be cut "
                    "here");
            }
        }
        return specs;
    };
    wanted_ = fit(&Trial::asked, true);
    offered_ = fit(&Trial::offered, false);
}

} // namespace skippy
