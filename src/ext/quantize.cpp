#include "quantize.h"

#include "llama_ext_abi.h"
#include "native_guard.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace skippy {
namespace {

constexpr int64_t chunk_elements = 32 * 512; // a thread takes at a time, in whole rows
constexpr int64_t longest_block = 256;       // of any type

// llama.cpp visits tensors by layer, then by name, and counts those of a kind as it goes.
bool visited_before(const std::string &a, const std::string &b) {
    int layer_a = -1, layer_b = -1;
    std::sscanf(a.c_str(), "blk.%d.", &layer_a);
    std::sscanf(b.c_str(), "blk.%d.", &layer_b);
    return layer_a != layer_b ? layer_a < layer_b : a < b;
}

struct FreeModel {
    void operator()(llama_model *model) const { llama_model_free(model); }
};
struct FreeTensors {
    void operator()(ggml_context *context) const { ggml_free(context); }
};
struct FreeState {
    void operator()(quantize_state_impl *state) const { llama_quant_free(state); }
};
using Model = std::unique_ptr<llama_model, FreeModel>;
using Tensors = std::unique_ptr<ggml_context, FreeTensors>;

Model open_without_weights(const std::string &header, const std::vector<VirtualTensor> &tensors) {
    const VirtualFile file(header, tensors, nullptr, nullptr);
    llama_model_params params = llama_model_default_params();
    params.no_alloc = true;
    params.load_mode = LLAMA_LOAD_MODE_NONE;
    params.lazy_mode = LLAMA_LAZY_MODE_OFF;
    params.n_gpu_layers = 0;
    Model model(llama_model_load_from_file_ptr(file.stream(), params));
    if (model == nullptr) {
        throw std::runtime_error(NativeGuard::error_text("llama.cpp could not read the model"));
    }
    return model;
}

class Recipes {
  public:
    Recipes(llama_model *model, const std::vector<const VirtualTensor *> &visited)
        : model_(model), visited_(visited), params_(llama_model_quantize_default_params()) {}

    // `padded`: as if every row were a whole number of the longest blocks.
    std::vector<ggml_type> types(llama_ftype recipe, bool padded) const {
        const size_t n = visited_.size();
        const Tensors context(ggml_init({(n + 1) * ggml_tensor_overhead(), nullptr, true}));
        std::vector<ggml_tensor *> tensors;
        for (const VirtualTensor *tensor : visited_) {
            std::array<int64_t, GGML_MAX_DIMS> shape = tensor->shape;
            if (padded) {
                shape[0] = (shape[0] + longest_block - 1) / longest_block * longest_block;
            }
            tensors.push_back(ggml_new_tensor(context.get(), tensor->type, GGML_MAX_DIMS, shape.data()));
            ggml_set_name(tensors.back(), tensor->name.c_str());
        }
        std::vector<ggml_type> types(n);
        const std::unique_ptr<quantize_state_impl, FreeState> state(llama_quant_init(model_, &params_));
        llama_quant_compute_types(state.get(), recipe, tensors.data(), types.data(), n);
        return types;
    }

    // llama_quant_compute_types answers as without an importance matrix; the quantizer itself decides four things
    // otherwise where there is one. The early ffn_down layers that some of them are about are those for which a recipe
    // without a matrix raises the type.
    std::vector<ggml_type> types_with_imatrix(llama_ftype recipe, bool padded) const {
        std::vector<ggml_type> types = this->types(recipe, padded);
        const ggml_type base = llama_ftype_get_default_type(recipe);
        const bool legacy = recipe == LLAMA_FTYPE_MOSTLY_Q4_0 || recipe == LLAMA_FTYPE_MOSTLY_Q5_0;
        const bool fours = recipe == LLAMA_FTYPE_MOSTLY_IQ4_NL || recipe == LLAMA_FTYPE_MOSTLY_IQ4_XS;
        const std::vector<ggml_type> marks = legacy ? this->types(LLAMA_FTYPE_MOSTLY_IQ4_XS, padded) : types;
        for (size_t i = 0; i < types.size(); ++i) {
            const std::string &name = visited_[i]->name;
            const bool down = name.find("ffn_down") != std::string::npos;
            const bool value = name.find("attn_v.weight") != std::string::npos ||
                               name.find("attn_qkv.weight") != std::string::npos ||
                               name.find("attn_kv_b.weight") != std::string::npos;
            const bool raised = down && (marks[i] == GGML_TYPE_Q5_K || marks[i] == GGML_TYPE_Q5_1);
            const int64_t length = padded ? longest_block : visited_[i]->shape[0];
            if (legacy && raised && types[i] == base) {
                types[i] = recipe == LLAMA_FTYPE_MOSTLY_Q4_0 ? GGML_TYPE_Q4_1 : GGML_TYPE_Q5_1;
            } else if (fours && raised) {
                types[i] = length % ggml_blck_size(base) == 0 ? base : GGML_TYPE_IQ4_NL;
            } else if (recipe == LLAMA_FTYPE_MOSTLY_IQ3_XXS && value && types[i] == GGML_TYPE_IQ3_S) {
                types[i] = GGML_TYPE_IQ3_XXS;
            } else if (recipe == LLAMA_FTYPE_MOSTLY_IQ3_XXS && down) {
                if (types[i] == GGML_TYPE_Q4_K || types[i] == GGML_TYPE_Q3_K) {
                    types[i] = GGML_TYPE_IQ3_XXS;
                } else if (types[i] == GGML_TYPE_Q5_0 || types[i] == GGML_TYPE_Q4_0) { // their fallbacks
                    types[i] = GGML_TYPE_IQ4_NL;
                }
            }
        }
        return types;
    }

  private:
    llama_model *model_;
    const std::vector<const VirtualTensor *> &visited_;
    llama_model_quantize_params params_;
};

// What threads share while they quantize the same rows.
class Quantizing {
  public:
    explicit Quantizing(const RowsToQuantize &rows, uint8_t *out) : rows_(rows), out_(out) {}

    void work(const std::function<bool()> &go_on) {
        try {
            const NativeGuard guard; // an assertion about strange values becomes an exception
            std::vector<float> values;
            for (int64_t first = 0, n = 0; take(first, n);) {
                chunk(first, n, values);
                if (go_on && !go_on()) {
                    stop();
                    stopped_ = true;
                }
            }
        } catch (...) {
            stop();
            const std::lock_guard<std::mutex> lock(mutex_);
            error_ = error_ ? error_ : std::current_exception();
        }
    }

    bool finish() {
        if (error_) {
            std::rethrow_exception(error_);
        }
        return !stopped_;
    }

  private:
    void stop() {
        const std::lock_guard<std::mutex> lock(mutex_);
        next_ = rows_.n_rows;
    }

    // Chunks never cross from one expert to the next, whose importances differ.
    bool take(int64_t &first, int64_t &n) {
        const std::lock_guard<std::mutex> lock(mutex_);
        first = next_;
        if (first >= rows_.n_rows) {
            return false;
        }
        const int64_t most = std::max<int64_t>(1, (chunk_elements + rows_.row_length - 1) / rows_.row_length);
        const int64_t in_expert = rows_.rows_per_expert - (rows_.first_row + first) % rows_.rows_per_expert;
        n = std::min({most, in_expert, rows_.n_rows - first});
        next_ = first + n;
        return true;
    }

    void chunk(int64_t first, int64_t n, std::vector<float> &values) const {
        const size_t source_bytes = ggml_row_size(rows_.source_type, rows_.row_length);
        const uint8_t *source = rows_.source + static_cast<size_t>(first) * source_bytes;
        const int64_t n_values = n * rows_.row_length;
        if (!ggml_validate_row_data(rows_.source_type, source, static_cast<size_t>(n) * source_bytes)) {
            throw std::runtime_error("holds values that are not finite numbers");
        }
        const auto *f32 = reinterpret_cast<const float *>(source);
        if (rows_.source_type != GGML_TYPE_F32) {
            values.resize(static_cast<size_t>(n_values));
            if (rows_.source_type == GGML_TYPE_F16) {
                ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t *>(source), values.data(), n_values);
            } else {
                ggml_bf16_to_fp32_row(reinterpret_cast<const ggml_bf16_t *>(source), values.data(), n_values);
            }
            f32 = values.data();
        }
        const int64_t expert = (rows_.first_row + first) / rows_.rows_per_expert;
        const float *importances = rows_.imatrix != nullptr ? rows_.imatrix + expert * rows_.row_length : nullptr;
        uint8_t *to = out_ + static_cast<size_t>(first) * ggml_row_size(rows_.type, rows_.row_length);
        const size_t made = ggml_quantize_chunk(rows_.type, f32, to, 0, n, rows_.row_length, importances);
        if (!ggml_validate_row_data(rows_.type, to, made)) {
            throw std::runtime_error(std::string("holds values that do not fit ") + ggml_type_name(rows_.type));
        }
    }

    const RowsToQuantize &rows_;
    uint8_t *out_;
    std::mutex mutex_;
    int64_t next_ = 0; // row that nobody has taken yet
    std::exception_ptr error_;
    bool stopped_ = false;
};

} // namespace

std::vector<RecipeType> recipe_types(const std::string &header, const std::vector<VirtualTensor> &tensors,
                                     llama_ftype recipe, bool has_imatrix) {
    install_callbacks();
    const NativeGuard guard;
    const Model model = open_without_weights(header, tensors);
    std::vector<size_t> order(tensors.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return visited_before(tensors[a].name, tensors[b].name); });
    std::vector<const VirtualTensor *> visited;
    for (const size_t i : order) {
        visited.push_back(&tensors[i]);
    }
    const Recipes recipes(model.get(), visited);
    const auto types = [&](bool padded) {
        return has_imatrix ? recipes.types_with_imatrix(recipe, padded) : recipes.types(recipe, padded);
    };
    const std::vector<ggml_type> real = types(false), padded = types(true);
    std::vector<RecipeType> result(tensors.size());
    for (size_t i = 0; i < order.size(); ++i) {
        result[order[i]] = {real[i], padded[i]};
    }
    return result;
}

bool quantize_rows(const RowsToQuantize &rows, uint8_t *out, int threads, const std::function<bool()> &go_on) {
    Quantizing shared(rows, out);
    std::vector<std::thread> others;
    try {
        for (int i = 1; i < threads; ++i) {
            others.emplace_back([&] { shared.work(nullptr); });
        }
    } catch (const std::system_error &) { // no more threads to be had: those there are do it
    }
    shared.work(go_on);
    for (std::thread &other : others) {
        other.join();
    }
    return shared.finish();
}

} // namespace skippy
