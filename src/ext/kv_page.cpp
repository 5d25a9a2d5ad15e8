#include "kv_page.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>

namespace skippy {
namespace {

// Memory for a saved state of which only the headers between the rows are ever touched.
class SparseBytes {
  public:
    explicit SparseBytes(size_t size)
        : size_(std::max<size_t>(size, 1)),
          data_(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
        if (data_ == MAP_FAILED) {
            throw std::runtime_error("no address space for " + std::to_string(size) + " bytes");
        }
        madvise(data_, size_, MADV_NOHUGEPAGE); // a huge page would be zeroed for a header of 12 bytes
    }
    ~SparseBytes() { munmap(data_, size_); }
    SparseBytes(const SparseBytes &) = delete;
    SparseBytes &operator=(const SparseBytes &) = delete;

    uint8_t *data() const { return static_cast<uint8_t *>(data_); }

  private:
    size_t size_;
    void *data_;
};

std::string architecture(const llama_model *model) {
    char name[128] = "";
    llama_model_meta_val_str(model, "general.architecture", name, sizeof(name));
    return std::string("architecture '") + name + "'";
}

// ggml_validate_row_data looks at values too, but takes three times as long as copying them.
constexpr uint16_t half_exponent = 0x7c00, brain_exponent = 0x7f80; // all ones: infinite or not a number
constexpr uint32_t single_exponent = 0x7f800000;

// Copies floats; false where one is not finite. One pass, so that reading and writing overlap. Payloads need not be
// aligned.
template <typename Bits>
bool copy_finite(uint8_t *__restrict to, const uint8_t *__restrict from, size_t size, Bits exponent) {
    Bits found = 0;
    for (size_t at = 0; at < size; at += sizeof(Bits)) {
        Bits bits;
        std::memcpy(&bits, from + at, sizeof(bits));
        found = static_cast<Bits>(found | static_cast<Bits>((bits & exponent) == exponent));
        std::memcpy(to + at, &bits, sizeof(bits));
    }
    return found == 0;
}

// Copies blocks of whole numbers behind `n_scales` halves.
bool copy_finite_scales(uint8_t *to, const uint8_t *from, size_t size, size_t block, size_t n_scales) {
    const size_t piece = 128 * block; // stays in the nearest cache between looking and copying
    bool finite = true;
    for (size_t at = 0; at < size; at += piece) {
        const size_t length = std::min(piece, size - at);
        for (size_t i = 0; i < length; i += block) {
            for (size_t scale = 0; scale < n_scales; ++scale) {
                uint16_t bits;
                std::memcpy(&bits, from + at + i + scale * sizeof(bits), sizeof(bits));
                finite = finite && (bits & half_exponent) != half_exponent;
            }
        }
        std::memcpy(to + at, from + at, length);
    }
    return finite;
}

bool copy_numbers(ggml_type type, uint8_t *to, const uint8_t *from, size_t size) {
    switch (type) {
    case GGML_TYPE_F32:
        return copy_finite(to, from, size, single_exponent);
    case GGML_TYPE_F16:
        return copy_finite(to, from, size, half_exponent);
    case GGML_TYPE_BF16:
        return copy_finite(to, from, size, brain_exponent);
    case GGML_TYPE_Q8_0:
    case GGML_TYPE_Q4_0:
    case GGML_TYPE_Q5_0:
    case GGML_TYPE_IQ4_NL:
        return copy_finite_scales(to, from, size, ggml_type_size(type), 1);
    case GGML_TYPE_Q4_1: // a scale and a least value
    case GGML_TYPE_Q5_1:
        return copy_finite_scales(to, from, size, ggml_type_size(type), 2);
    default:
        std::memcpy(to, from, size);
        return ggml_validate_row_data(type, from, size);
    }
}

// Where the rows are if this host can reach them.
uint8_t *host_rows(const KvBlock &block) {
    return ggml_backend_buffer_is_host(block.tensor->buffer) ? static_cast<uint8_t *>(block.tensor->data) : nullptr;
}

// Calls copy(offset in the tensor, offset in the page's block, bytes) for tokens [first, first + n) of a lane.
template <typename Copy> void for_each_run(const KvBlock &block, int lane, size_t first, size_t n, Copy copy) {
    const size_t start = block.lane_offset(lane);
    if (block.element_bytes == 0) {
        copy(start + first * block.row_bytes, 0, n * block.row_bytes);
        return;
    }
    for (size_t element = 0; element < block.n_elements; ++element) {
        copy(start + (element * block.cells() + first) * block.element_bytes, element * n * block.element_bytes,
             n * block.element_bytes);
    }
}

} // namespace

void KvPages::note(ggml_cgraph *graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor *root = ggml_graph_node(graph, i);
        if (root->op == GGML_OP_ROPE && root->src[2] != nullptr) {
            for (const char *set : {"long", "short"}) {
                if (std::strstr(root->src[2]->name, (std::string("rope_factors_") + set).c_str()) != nullptr) {
                    rope_factors_ = set;
                }
            }
        }
        while (root->view_src != nullptr) {
            root = root->view_src;
        }
        if (root->buffer != nullptr && std::strncmp(root->name, "cache_", 6) == 0) {
            buffers_.insert(root->buffer);
        }
    }
}

std::vector<ggml_backend_buffer_t> KvPages::buffers() const { return {buffers_.begin(), buffers_.end()}; }

void KvPages::refuse(std::string why) {
    refusal_ = std::move(why);
    own_.clear();
    layers_.clear();
    token_bytes_ = 0;
}

void KvPages::learn(llama_context *context, const StageModel &model, int lanes, int n_ctx) {
    const size_t size = llama_state_seq_get_size(context, 0);
    const SparseBytes saved(size);
    {
        const StateTraffic traffic(buffers());
        if (llama_state_seq_get_data(context, saved.data(), size, 0) == size) {
            state_ = KvState::learn(saved.data(), size, traffic.moves(), lanes);
        }
    }
    if (!state_) {
        refuse(architecture(model.model()) + " keeps its attention state in a form that pages do not know");
        return;
    }
    find_layers(model, n_ctx);
}

void KvPages::find_layers(const StageModel &model, int n_ctx) {
    std::map<int, KvLayerRows> layers;
    for (const KvBlock &block : state_->blocks()) {
        if (block.cells() < static_cast<size_t>(n_ctx)) {
            refuse("the sliding-window cache keeps only the last tokens of a lane: pages need swa_full");
            return;
        }
        const bool is_own = !model.cut().is_away(ggml_backend_buffer_get_type(block.tensor->buffer));
        if (!is_own || block.layer >= model.layers().n_layers) {
            continue;
        }
        if (block.is_v ? layers[block.layer].v_row_bytes != 0 : layers.count(block.layer) != 0) {
            refuse(architecture(model.model()) + " keeps more than keys and values in layer " +
                   std::to_string(block.layer) + ", which pages do not hold");
            return;
        }
        KvLayerRows &rows = layers[block.layer];
        rows.layer = block.layer;
        if (block.is_v) {
            rows.v_type = block.tensor->type;
            rows.v_row_bytes = block.row_bytes;
            rows.v_transposed = block.element_bytes != 0;
        } else {
            rows.k_type = rows.v_type = block.tensor->type;
            rows.k_row_bytes = block.row_bytes;
        }
        own_.push_back(block);
    }
    std::sort(own_.begin(), own_.end(), [](const KvBlock &a, const KvBlock &b) {
        return std::pair(a.layer, a.is_v) < std::pair(b.layer, b.is_v);
    });
    for (const auto &[layer, rows] : layers) {
        layers_.push_back(rows);
        token_bytes_ += rows.k_row_bytes + rows.v_row_bytes;
    }
}

void KvPages::prove_order(llama_context *context, int lane, int n_tokens) {
    const size_t size = llama_state_seq_get_size(context, lane);
    const SparseBytes saved(size);
    const StateTraffic traffic(buffers());
    const bool read = llama_state_seq_get_data(context, saved.data(), size, lane) == size;
    if (!read || !state_->matches(saved.data(), size, lane, n_tokens, 0) ||
        !state_->in_first_cells(traffic.moves(), lane, n_tokens)) {
        refuse("the cells of a lane do not hold its tokens in order, which pages need");
    }
}

std::unique_ptr<uint8_t[]> KvPages::read(int lane, int first, int end) const {
    const auto from = static_cast<size_t>(first), n = static_cast<size_t>(end - first);
    std::unique_ptr<uint8_t[]> payload(new uint8_t[std::max<size_t>(n * token_bytes_, 1)]);
    uint8_t *to = payload.get();
    for (const KvBlock &block : own_) {
        const uint8_t *rows = host_rows(block);
        for_each_run(block, lane, from, n, [&](size_t in_tensor, size_t in_page, size_t size) {
            if (rows != nullptr) {
                std::memcpy(to + in_page, rows + in_tensor, size);
            } else {
                ggml_backend_tensor_get(block.tensor, to + in_page, in_tensor, size);
            }
        });
        to += n * block.row_bytes;
    }
    return payload;
}

bool KvPages::claim(llama_context *context, int lane, int n_tokens) const {
    const size_t size = state_->size(n_tokens);
    const SparseBytes saved(size);
    state_->write(saved.data(), lane, n_tokens);
    const StateTraffic traffic(buffers());
    return llama_state_seq_set_data(context, saved.data(), size, lane) == size &&
           state_->in_first_cells(traffic.moves(), lane, n_tokens);
}

void KvPages::write(int lane, int first, const KvPayload &payload) const {
    const auto to = static_cast<size_t>(first), n = static_cast<size_t>(payload.n_tokens);
    const uint8_t *from = payload.data;
    for (const KvBlock &block : own_) {
        uint8_t *rows = host_rows(block);
        std::vector<uint8_t> checked(rows == nullptr ? n * block.row_bytes : 0);
        bool are_numbers = true;
        for_each_run(block, lane, to, n, [&](size_t in_tensor, size_t in_page, size_t size) {
            uint8_t *place = rows != nullptr ? rows + in_tensor : checked.data() + in_page;
            are_numbers = copy_numbers(block.tensor->type, place, from + in_page, size) && are_numbers;
            if (rows == nullptr && are_numbers) {
                ggml_backend_tensor_set(block.tensor, place, in_tensor, size);
            }
        });
        if (!are_numbers) {
            // Attention multiplies even the cells it masks, a later session's on this lane too: by zero, which makes no
            // number of what is none.
            for_each_run(block, lane, to, n, [&](size_t in_tensor, size_t, size_t size) {
                ggml_backend_tensor_memset(block.tensor, 0, in_tensor, size);
            });
            throw std::invalid_argument("layer " + std::to_string(block.layer) + ": " +
                                        (block.is_v ? "values" : "keys") + " of tokens " + std::to_string(first) +
                                        " to " + std::to_string(first + payload.n_tokens) + " are not finite numbers");
        }
        from += n * block.row_bytes;
    }
}

} // namespace skippy
