// How llama.cpp lays out the saved attention state of a lane, learned from a lane of one token (its llama-kv-cache.cpp,
// state_write): one or more caches in a row, each with the cells' positions and then the rows of every layer.
#pragma once

#include "state_traffic.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace skippy {

// K or V of one layer of the model. The tensor is [row, cells, lanes]; where `element_bytes` is not 0, a lane's part of
// it is transposed: for each element of a row the values of all cells.
struct KvBlock {
    int layer;
    bool is_v;
    ggml_tensor *tensor;
    uint64_t row_bytes;
    uint32_t element_bytes, n_elements;

    size_t lane_offset(int lane) const { return static_cast<size_t>(lane) * tensor->nb[2]; }
    size_t cells() const { return static_cast<size_t>(tensor->ne[1]); }
};

class KvState {
  public:
    // `saved`: the state of lane 0 with token 0 at position 0, its rows noted in `moves` and not written. Nothing where
    // it is not laid out in the way known here.
    static std::optional<KvState> learn(const uint8_t *saved, size_t size, const std::vector<StateTraffic::Move> &moves,
                                        int lanes);

    // Of all layers of the model, in the order they are saved.
    const std::vector<KvBlock> &blocks() const { return blocks_; }

    // Bytes of the saved state of a lane with `n_tokens` tokens.
    size_t size(int n_tokens) const;
    // Writes such a state, its rows left out, for a lane that holds positions 0..n_tokens-1 in that order.
    void write(uint8_t *to, int lane, int n_tokens) const;
    // Is `saved` just that, and did llama.cpp move the rows from or to cells 0..n_tokens-1 of the lane? Where the model
    // saves token ids too, all of them are `token`.
    bool matches(const uint8_t *saved, size_t size, int lane, int n_tokens, int32_t token) const;
    bool in_first_cells(const std::vector<StateTraffic::Move> &moves, int lane, int n_tokens) const;

  private:
    struct Cache {
        bool v_transposed;
        std::vector<KvBlock> keys, values;
    };
    class Reader;
    class Sink;
    struct Measure;
    struct Writer;
    struct Comparison;

    bool read(Reader &reader, int lanes);
    bool read_cache(Reader &reader, int lanes);
    void put(Sink &sink, int lane, int n_tokens, int32_t token) const;

    uint32_t magic_ = 0;
    int lanes_ = 0;
    bool has_extra_ = false; // two further coordinates and the token id of each cell
    std::vector<Cache> caches_;
    std::vector<KvBlock> blocks_;
};

} // namespace skippy
