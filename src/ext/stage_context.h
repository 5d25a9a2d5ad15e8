// The lanes of a stage: one KV stream each, run batch by batch.
#pragma once

#include "crossing.h"
#include "kv_page.h"
#include "locked_copies.h"
#include "skipped_compute.h"
#include "stage_model.h"
#include "trial_cache.h"
#include "warm_weights.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace skippy {

// llama.cpp's own meanings (llama_context_params); n_ctx is per lane here.
struct ContextOptions {
    int n_ctx = 0; // tokens a lane can hold; 0: what the model was trained with
    int lanes = 1;
    int n_batch = 2048;
    int n_ubatch = 512;
    int threads = 1, threads_batch = 1;
    std::string cache_type_k = "f16", cache_type_v = "f16";
    int flash_attn = 1; // 1 on, 0 off, -1 auto
    bool swa_full = true;
    bool kv_offload = true;
    bool op_offload = true;
    int max_outputs = 0; // rows of a batch whose logits can be asked for; 0: n_batch
};

// `n_rows` consecutive rows of a batch: `lane` from `position` on.
struct LaneRows {
    int lane, position, n_rows;
};

// Bytes for n rows of a micro-batch: fixed_bytes + n * row_bytes.
struct CrossingSpec {
    CrossingKey key;
    ggml_type type;
    uint64_t row_bytes, fixed_bytes;
};

struct MicroBatchTensor {
    int micro_batch;
    CrossingTensor info;
    const uint8_t *data;              // arriving: owned by the caller
    std::unique_ptr<uint8_t[]> bytes; // leaving: owned here
};

// Rows [first_row, first_row + n_rows) of a batch that llama.cpp runs as one graph.
struct MicroBatch {
    size_t first_rows_index; // into the list of LaneRows
    size_t n_lanes;
    int first_row, n_rows;
};

// Marks the context as in use for one call; a second caller is refused instead of racing.
class InUse {
  public:
    explicit InUse(std::atomic<bool> &flag) : flag_(flag) {
        if (flag_.exchange(true)) {
            throw std::runtime_error("the stage is already running a batch on another thread");
        }
    }
    ~InUse() { flag_.store(false); }
    InUse(const InUse &) = delete;
    InUse &operator=(const InUse &) = delete;

  private:
    std::atomic<bool> &flag_;
};

// One row of what a stage gives: of each tensor of floats that it offers downstream, or its logits and what they are
// made of ("logits" and "norm", 0).
using RowBits = std::map<CrossingKey, std::vector<uint8_t>>;

class StageContext {
  public:
    // Throws std::runtime_error (one line) where llama.cpp refuses.
    StageContext(StageModel &model, const ContextOptions &options);
    ~StageContext();
    StageContext(const StageContext &) = delete;
    StageContext &operator=(const StageContext &) = delete;

    // How a batch is run: consecutive entries with rising consecutive lanes and equal row counts go together, so that
    // llama.cpp makes exactly one micro-batch of each. The same on every stage.
    std::vector<MicroBatch> micro_batches(const std::vector<LaneRows> &rows) const;

    // Runs a batch. `tokens`: ids of all rows. `outputs`: rows (sorted) whose logits are wanted; last stage only.
    // A lane whose KV is ahead of its position is trimmed first. Throws std::invalid_argument before anything changed,
    // std::runtime_error after a failed run, whose lanes then stand at the positions they were called with (or, where
    // the model cannot be trimmed, at 0).
    std::vector<MicroBatchTensor> run(const std::vector<LaneRows> &rows, const std::vector<int32_t> &tokens,
                                      const std::vector<int32_t> &outputs, std::vector<MicroBatchTensor> arriving);

    // Logits of row `row` of the last run, n_vocab floats, valid until the next run.
    const float *logits(int row) const;

    // What this stage asks from upstream and can give downstream, found by dry runs when it was opened.
    const std::vector<CrossingSpec> &wanted() const { return wanted_; }
    const std::vector<CrossingSpec> &offered() const { return offered_; }
    // What downstream asks for; exactly this is given from now on. Throws where it is not on offer.
    void serve(const std::vector<CrossingKey> &keys);

    // Removes the tokens of `lane` from `position` on. Throws where the model cannot forget part of a lane.
    void trim(int lane, int position);
    int position(int lane) const { return positions_.at(static_cast<size_t>(lane)); }
    bool can_trim() const { return can_trim_; }

    int n_ctx() const { return n_ctx_; }
    int n_batch() const { return static_cast<int>(llama_n_batch(context_)); }
    int n_ubatch() const { return static_cast<int>(llama_n_ubatch(context_)); }
    const ContextOptions &options() const { return options_; }
    llama_context *handle() const { return context_; }
    StageModel &model() const { return model_; }

    // ---- trials: what bits does a row get, beside how many others? All lanes must be empty before and are afterwards.

    // Lets a lane hold `n_rows` more tokens with made-up contents, at once: on the CPU nothing is computed for them.
    void pretend(const LaneRows &rows);
    // Runs one row on each of the lanes first..first+n_lanes-1, at the end of what it holds: always the same row on the
    // same lane, with made-up tensors from upstream. Afterwards the lanes hold what they held (where the model cannot
    // be trimmed: one token more, and contents that no trial should see again).
    std::vector<RowBits> trial(int first_lane, int n_lanes);
    // Empties every lane and leaves no trace of trials.
    void forget_trials();

    // ---- pages of lanes (kv_page.h)

    const KvPages &pages() const { return pages_; }
    // The rows of tokens [first, end) of a lane. Throws std::invalid_argument where the lane does not hold them.
    std::unique_ptr<uint8_t[]> export_kv(int lane, int first, int end) const;
    // The lane then holds the tokens of the payloads, one behind the other from position 0 on, and nothing else. Throws
    // std::invalid_argument or std::runtime_error where that cannot be; the lane is then empty.
    void import_kv(int lane, const std::vector<KvPayload> &payloads);

    // Loads some of the weights into the processor's cache (warm_weights.h), after a run the first ones first.
    void warm(size_t limit, size_t n_bytes);
    size_t warmable_bytes() const { return warm_weights_.bytes(); }

    struct Memory {
        uint64_t weights, kv, compute; // bytes in this stage's own buffers
    };
    Memory memory() const;

  private:
    void check(const std::vector<LaneRows> &rows, const std::vector<int32_t> &tokens,
               const std::vector<int32_t> &outputs) const;
    void check_arriving(const std::vector<MicroBatch> &batches, const std::vector<MicroBatchTensor> &arriving) const;
    int decode(const std::vector<LaneRows> &rows, const MicroBatch &batch, const std::vector<int32_t> &tokens,
               const std::vector<int32_t> &outputs);
    void keep_logits(const MicroBatch &batch, const std::vector<int32_t> &outputs, bool copy);
    void restore(const std::vector<LaneRows> &rows);
    void find_crossing();
    void dry_run(int lanes, int rows_per_lane);
    void learn_pages();
    void check_lane(int lane) const;
    // Skips computing while it lives, except on GPUs, whose scheduling looks at values (which experts are used); their
    // graphs are visited only where `on_gpus_too`.
    class Skipping {
      public:
        explicit Skipping(StageContext &context, SkippedCompute::Visit visit = nullptr, bool on_gpus_too = false);
        ~Skipping() { skipped_.restore(); }
        Skipping(const Skipping &) = delete;
        Skipping &operator=(const Skipping &) = delete;

      private:
        SkippedCompute &skipped_;
    };
    void decode_trial(const std::vector<LaneRows> &rows, const std::vector<int32_t> &outputs);
    std::map<CrossingKey, uint64_t> made_up_row_bytes() const;
    std::vector<RowBits> rows_of(const std::vector<LeavingTensor> &leaving, size_t n_rows, bool with_embeddings) const;

    StageModel &model_;
    ContextOptions options_;
    SkippedCompute skipped_;
    TrialCache trial_cache_;
    KvPages pages_;
    WarmWeights warm_weights_;
    LockedCopies locked_copies_;
    llama_context *context_ = nullptr;
    int n_ctx_ = 0, n_vocab_ = 0;
    const bool can_trim_;
    std::vector<int> positions_; // per lane: tokens held
    std::vector<CrossingSpec> wanted_, offered_;
    std::vector<CrossingKey> served_;
    // Row -> logits: into llama.cpp's buffer for the last micro-batch of a run, into kept_ for those before.
    std::vector<std::pair<int, const float *>> logits_;
    std::vector<std::unique_ptr<float[]>> kept_;
    mutable std::atomic<bool> busy_{false};
};

} // namespace skippy
