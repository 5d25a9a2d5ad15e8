// Quantizing as llama.cpp's own quantizer does it: the type of every tensor, and the bytes of rows.
#pragma once

#include "virtual_file.h"

#include "llama.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace skippy {

struct RecipeType {
    ggml_type type;
    ggml_type without_fallback; // what it would be if its rows had a length that every type can hold
};

// The types that llama_model_quantize gives the tensors of a model whose file begins with `header`, in their order.
// Throws std::runtime_error where llama.cpp refuses the model or has no type for a tensor.
std::vector<RecipeType> recipe_types(const std::string &header, const std::vector<VirtualTensor> &tensors,
                                     llama_ftype recipe, bool has_imatrix);

struct RowsToQuantize {
    const uint8_t *source; // rows of source_type: F32, F16 or BF16
    ggml_type source_type;
    ggml_type type;
    int64_t row_length;
    int64_t first_row; // of the tensor; tells which expert's importances apply
    int64_t n_rows;
    int64_t rows_per_expert;
    const float *imatrix; // row_length importances per expert, or null
};

// Writes n_rows rows of `type` to `out`. The calling thread works too and asks `go_on` now and then. Returns false
// where that said stop. Throws std::runtime_error where values are no finite numbers or do not fit the type.
bool quantize_rows(const RowsToQuantize &rows, uint8_t *out, int threads, const std::function<bool()> &go_on);

} // namespace skippy
