// Made-up contents of a context's caches for trial runs: held tokens that nobody computed should still matter to the
// rows that are, or a difference between kernels would not show.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

namespace skippy {

class TrialCache {
  public:
    // `sparse_clear`: cell c of a KV cache is row c of each of its tensors, and holds the token at position c.
    explicit TrialCache(bool sparse_clear) : sparse_clear_(sparse_clear) {}

    // Notes the caches that a graph writes to.
    void note(ggml_cgraph *graph);
    // Gives the first `n_cells` cells of every KV stream contents, the same in every stream and every time: the first
    // few cells, and one in a few of the others. Recurrent states get theirs whole, once.
    void fill(int n_cells);
    // A trial computed and stored the token at this position.
    void written(int position) { written_.insert(position); }
    // Puts back the zeros that a cache is made with, where it knows what is not zero. False: all of it has to be
    // cleared.
    bool clear();

  private:
    struct Cache {
        ggml_tensor *tensor;
        std::vector<std::vector<char>> rows; // contents of its rows, taken in turn
    };
    static void write(const Cache &cache, int64_t row, const std::vector<char> &bytes);
    static bool is_recurrent(const ggml_tensor *tensor);

    bool sparse_clear_, knows_all_ = true;
    int filled_ = 0;
    std::vector<Cache> caches_;
    std::set<int> written_;    // by trials since the last fill
    std::set<int> used_cells_; // that are not zero
};

// Repeatable values of about a normal distribution, for element `index` of the sequence `seed`.
float made_up_value(uint64_t seed, uint64_t index);

// n values as `type` at `data`; a type that holds no floats gets zeros.
void write_made_up(ggml_type type, void *data, size_t n, uint64_t seed);

} // namespace skippy
