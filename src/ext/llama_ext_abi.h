// The few functions that libllama exports beyond llama.h (its llama-ext.h, C++ linkage, not installed); see
// third_party/llama.cpp/README.md.
#pragma once

#include "llama.h"

#include <cstddef>
#include <map>

struct llama_memory_breakdown_data {
    size_t model = 0;   // bytes of weights
    size_t context = 0; // bytes of KV cache
    size_t compute = 0; // bytes of temporary buffers
};
using llama_memory_breakdown = std::map<ggml_backend_buffer_type_t, llama_memory_breakdown_data>;

LLAMA_API llama_memory_breakdown llama_get_memory_breakdown(const llama_context *context);

LLAMA_API ggml_type llama_ftype_get_default_type(llama_ftype recipe);

struct quantize_state_impl;

// `params` must outlive the state.
LLAMA_API quantize_state_impl *llama_quant_init(const llama_model *model, const llama_model_quantize_params *params);
LLAMA_API void llama_quant_free(quantize_state_impl *state);
LLAMA_API void llama_quant_compute_types(quantize_state_impl *state, llama_ftype recipe, ggml_tensor **tensors,
                                         ggml_type *result_types, size_t n_tensors);
