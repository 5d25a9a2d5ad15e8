// Pages: the rows of keys and values that a stage's own layers keep of some tokens of a lane, read from and written to
// the caches themselves. A lane's cell i holds its token i (proved on the opened context), so a page costs its own
// bytes however long the lane is.
#pragma once

#include "kv_state.h"
#include "stage_model.h"

#include "llama.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace skippy {

// What one layer keeps of one token; 0 bytes of V where it has none of its own.
struct KvLayerRows {
    int layer;
    ggml_type k_type, v_type;
    uint64_t k_row_bytes, v_row_bytes;
    bool v_transposed;
};

struct KvPayload {
    const uint8_t *data; // owned by the caller
    size_t size;
    int n_tokens;
};

class KvPages {
  public:
    // Notes the caches that a graph of this stage writes to, and what it rotates keys with.
    void note(ggml_cgraph *graph);
    // Learns how the state is kept from lane 0, which holds token 0 at position 0 and nothing else.
    void learn(llama_context *context, const StageModel &model, int lanes, int n_ctx);
    // Whether the lane's tokens, of which it holds `n_tokens` with the id 0, stand in its first cells. Where the answer
    // is no, there are no pages.
    void prove_order(llama_context *context, int lane, int n_tokens);
    void refuse(std::string why);

    // "" or why there are no pages.
    const std::string &refusal() const { return refusal_; }
    // Some models have two sets of factors for rotary positions, of which the size of the context selects one for good:
    // "long" or "short"; else "". Keys that were rotated with one are wrong with the other.
    const std::string &rope_factors() const { return rope_factors_; }
    const std::vector<KvLayerRows> &layers() const { return layers_; }
    uint64_t token_bytes() const { return token_bytes_; }

    // Tokens [first, end) of a lane: for each layer a block of K and one of V, of rows in the order of tokens or, where
    // V is transposed, for each element of a row the values of all tokens.
    std::unique_ptr<uint8_t[]> read(int lane, int first, int end) const;
    // Lets a lane that holds nothing hold `n_tokens` tokens, whatever its cells contain. False where llama.cpp did not
    // put them into the lane's first cells.
    bool claim(llama_context *context, int lane, int n_tokens) const;
    // Writes tokens from `first` on. Throws std::invalid_argument at a block that holds no numbers: zeros stand in its
    // place then, and what is behind it is not written.
    void write(int lane, int first, const KvPayload &payload) const;

  private:
    std::vector<ggml_backend_buffer_t> buffers() const;
    void find_layers(const StageModel &model, int n_ctx);

    std::set<ggml_backend_buffer_t> buffers_;
    std::optional<KvState> state_;
    std::string refusal_, rope_factors_;
    std::vector<KvBlock> own_; // by layer, K before V
    std::vector<KvLayerRows> layers_;
    uint64_t token_bytes_ = 0;
};

} // namespace skippy
