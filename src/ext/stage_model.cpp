#include "stage_model.h"

#include "loading_view.h"
#include "native_guard.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <stdexcept>

namespace skippy {
namespace {

constexpr size_t usual_piece = 256; // bytes; a longer one is asked for again

// A regular expression for the decimal numbers first..last, short because llama.cpp compiles it once per tensor.
std::string number_range(int first, int last) {
    std::string pattern;
    for (int x = first; x <= last;) {
        int span = 1;
        while (x != 0 && x % (span * 10) == 0 && x + span * 10 - 1 <= last) {
            span *= 10;
        }
        pattern += pattern.empty() ? "" : "|";
        if (span > 1) {
            pattern += std::to_string(x / span);
            for (int s = span; s > 1; s /= 10) {
                pattern += "[0-9]";
            }
            x += span;
            continue;
        }
        const int upto = std::min(last, x - x % 10 + 9);
        pattern += x >= 10 ? std::to_string(x / 10) : "";
        pattern += "[" + std::to_string(x % 10) + "-" + std::to_string(upto % 10) + "]";
        x = upto + 1;
    }
    return pattern;
}

bool is_gpu(ggml_backend_dev_t device) {
    const auto type = ggml_backend_dev_type(device);
    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

bool starts_with(const std::string &text, const char *prefix) { return text.rfind(prefix, 0) == 0; }

// What feeds the first layer only, but for token_embd and token_embd_norm, which are also the output matrix and the
// output norm of models that have none of their own.
constexpr std::array embedding_tables = {"token_embd", "token_embd_norm", "token_types", "position_embd",
                                         "per_layer_token_embd"};

std::vector<std::string> names(const std::vector<Extent> &extents) {
    std::vector<std::string> names;
    for (const Extent &extent : extents) {
        names.push_back(extent.tensor);
    }
    return names;
}

std::vector<std::string> names(const std::vector<VirtualTensor> &tensors) {
    std::vector<std::string> names;
    for (const VirtualTensor &tensor : tensors) {
        names.push_back(tensor.name);
    }
    return names;
}

} // namespace

// What this stage reads. The embedding tables feed the first layer; a tied output matrix is the token embedding.
bool StageModel::owns(const std::string &tensor) const {
    int block = 0;
    if (std::sscanf(tensor.c_str(), "blk.%d.", &block) == 1) {
        return block >= layers_.begin && (block < layers_.end || cut_->is_last());
    }
    if (starts_with(tensor, "output")) {
        return cut_->is_last();
    }
    for (const char *table : embedding_tables) {
        if (starts_with(tensor, (std::string(table) + ".").c_str())) {
            const bool at_the_end =
                (tied_output_ && table == embedding_tables[0]) || (tied_norm_ && table == embedding_tables[1]);
            return cut_->is_first() || (cut_->is_last() && at_the_end);
        }
    }
    return true; // shared by all layers, for example rope frequencies
}

// Throws std::invalid_argument for an option that cannot be honoured on this machine.
void StageModel::choose_gpus() {
    std::vector<ggml_backend_dev_t> found;
    if (options_.devices.empty()) {
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            if (is_gpu(ggml_backend_dev_get(i))) {
                found.push_back(ggml_backend_dev_get(i));
            }
        }
    } else if (options_.devices != std::vector<std::string>{"none"}) {
        for (const std::string &name : options_.devices) {
            ggml_backend_dev_t device = ggml_backend_dev_by_name(name.c_str());
            if (device == nullptr) {
                throw std::invalid_argument("device '" + name + "' does not exist here");
            }
            if (!is_gpu(device)) {
                throw std::invalid_argument("device '" + name +
                                            "' is no GPU: layers stay on the CPU without naming it");
            }
            found.push_back(device);
        }
    }
    const std::string none = "but llama.cpp was built without a GPU back end, or no GPU is to be used";
    if (found.empty() && options_.n_gpu_layers > 0) {
        throw std::invalid_argument("n_gpu_layers is " + std::to_string(options_.n_gpu_layers) + ", " + none);
    }
    if (options_.main_gpu != 0 && static_cast<size_t>(options_.main_gpu) >= found.size()) {
        throw std::invalid_argument("main_gpu is " + std::to_string(options_.main_gpu) + ", " +
                                    (found.empty() ? none : "wanted 0 to " + std::to_string(found.size() - 1)));
    }
    if (options_.split_mode == "none" && !found.empty()) {
        found = {found[static_cast<size_t>(options_.main_gpu)]};
    }
    if (!options_.tensor_split.empty()) {
        float sum = 0;
        for (const float share : options_.tensor_split) {
            sum += share >= 0 ? share : std::nanf("");
        }
        if (options_.tensor_split.size() != found.size() || !(sum > 0) || !std::isfinite(sum)) {
            throw std::invalid_argument("tensor_split: wanted " + std::to_string(found.size()) +
                                        " shares, one per GPU, not negative and not all zero");
        }
    }
    gpus_ = options_.n_gpu_layers == 0 ? std::vector<ggml_backend_dev_t>{} : found;
}

// llama.cpp places "layer" il (the head is layer n_blocks) by comparing its fraction of the device list's shares. The
// edges between devices stand half a layer off, so that no rounding moves a layer.
llama_model_params StageModel::place() {
    choose_gpus();
    const int units = (cut_->is_last() ? layers_.n_blocks + 1 : layers_.end) - layers_.begin;
    const int on_gpu = gpus_.empty() ? 0 : options_.n_gpu_layers < 0 ? units : std::min(options_.n_gpu_layers, units);
    const int on_cpu = units - on_gpu;
    has_gpu_layers_ = on_gpu > 0;

    // llama.cpp keeps the first layers on the CPU by itself; behind a cut the CPU must stand in the device list.
    const int skipped = cut_->is_first() ? on_cpu : 0;
    float edge = 0;
    const auto add = [&](ggml_backend_dev_t device, float upto) {
        devices_.push_back(device);
        shares_.push_back(upto - edge);
        edge = upto;
    };
    const auto add_own = [&](ggml_backend_dev_t device, float upto) {
        own_devices_.push_back(std::make_unique<OwnDevice>(
            device, [cut = cut_.get()](const ggml_tensor *node) { return cut->runs_here(node); }));
        device_names_.emplace_back(ggml_backend_dev_name(device));
        add(own_devices_.back()->handle(), upto);
    };
    if (cut_->is_first() && on_cpu > 0) {
        device_names_.emplace_back("CPU");
    }
    if (!cut_->is_first()) {
        add(cut_->before(), static_cast<float>(layers_.begin) - 0.5F);
        if (on_cpu > 0) {
            add_own(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU),
                    static_cast<float>(layers_.begin + on_cpu) - 0.5F);
        }
    }
    if (on_gpu > 0) {
        std::vector<float> weights = options_.tensor_split;
        if (weights.empty()) {
            for (ggml_backend_dev_t gpu : gpus_) {
                size_t free = 0, total = 0;
                ggml_backend_dev_memory(gpu, &free, &total);
                weights.push_back(static_cast<float>(std::max<size_t>(free, 1)));
            }
        }
        float sum = 0, seen = 0;
        for (const float weight : weights) {
            sum += weight;
        }
        const int first = layers_.begin + on_cpu - skipped;
        for (size_t i = 0; i < gpus_.size(); ++i) {
            seen += weights[i];
            const float upto = std::round(static_cast<float>(on_gpu) * seen / sum);
            add_own(gpus_[i], static_cast<float>(first) + upto - 0.5F);
        }
    }
    const auto end = static_cast<float>(layers_.n_blocks + 1 - skipped);
    if (!cut_->is_last()) {
        add(cut_->after(), end);
    } else if (!shares_.empty()) {
        shares_.back() += end - edge;
    }

    devices_.push_back(nullptr);
    shares_.resize(std::max(shares_.size(), llama_max_devices()), 0.0F);

    const auto override_placement = [&](std::string pattern, ggml_backend_buffer_type_t type) {
        patterns_.push_back(std::move(pattern));
        overrides_.push_back({nullptr, type});
    };
    if (!cut_->is_first()) {
        std::string tables;
        for (const char *table : embedding_tables) {
            if (!owns(std::string(table) + ".")) {
                tables += (tables.empty() ? "" : "|") + std::string(table);
            }
        }
        override_placement("^(" + tables + ")\\.", cut_->before_buffer_type());
        if (on_cpu > 0) { // as a mere device the CPU would not repack its weights as it does in an unsplit model
            const int last = std::min(layers_.begin + on_cpu, layers_.n_blocks) - 1;
            override_placement("^blk\\.(" + number_range(layers_.begin, last) + ")\\.", ggml_backend_cpu_buffer_type());
            if (cut_->is_last() && on_gpu == 0) {
                override_placement("^(output|token_embd)", ggml_backend_cpu_buffer_type());
            }
        }
    }
    for (size_t i = 0; i < overrides_.size(); ++i) {
        overrides_[i].pattern = patterns_[i].c_str();
    }
    overrides_.push_back({nullptr, nullptr});

    llama_model_params params = llama_model_default_params();
    params.devices = devices_.data();
    params.tensor_split = shares_.data();
    params.n_gpu_layers = layers_.n_blocks + 1 - skipped;
    params.split_mode = LLAMA_SPLIT_MODE_LAYER;
    params.tensor_buft_overrides = overrides_.size() > 1 ? overrides_.data() : nullptr;
    params.lazy_mode = LLAMA_LAZY_MODE_OFF;
    params.use_extra_bufts = options_.repack;
    params.no_host = options_.no_host_buffer;
    return params;
}

StageModel::StageModel(StageLayers layers, ModelOptions options, const std::vector<std::string> &tensors)
    : layers_(layers), options_(std::move(options)),
      cut_(std::make_unique<Cut>(layers.n_layers, layers.begin, layers.end)) {
    if (layers.begin < 0 || layers.begin >= layers.end || layers.end > layers.n_layers ||
        layers.n_layers > layers.n_blocks) {
        throw std::runtime_error("layers " + std::to_string(layers.begin) + ":" + std::to_string(layers.end) +
                                 " do not lie in a model of " + std::to_string(layers.n_layers));
    }
    for (const std::string &tensor : tensors) {
        tied_output_ = tied_output_ && tensor != "output.weight";
        tied_norm_ = tied_norm_ && !starts_with(tensor, "output_norm");
    }
}

StageModel::StageModel(StageLayers layers, std::vector<Extent> extents, const std::vector<std::string> &files,
                       ModelOptions options, const WeightFiles::Progress &progress, const WeightFiles::Check &check)
    : StageModel(layers, std::move(options), names(extents)) {
    for (Extent &extent : extents) {
        extent.own = owns(extent.tensor);
    }
    files_ = std::make_unique<WeightFiles>(std::move(extents), files);
    own_bytes_ = files_->own_bytes();
    bool checked = false;
    const auto may_read = [&] {
        checked = checked || !check || check();
        return checked;
    };
    // Asking for the bytes is the first half of the way, llama.cpp's taking them the second.
    const WeightFiles::Progress asked = [&](float done) { return !progress || progress(done / 2); };
    const WeightFiles::Progress taken = [&](float done) {
        return may_read() && (!progress || progress((done + 1) / 2));
    };
    if (!files_->prefetch(asked)) {
        throw std::runtime_error("loading was stopped");
    }
    install_callbacks();
    const NativeGuard guard;
    if (options_.check_tensors) { // llama.cpp would look at the whole file
        if (!may_read()) {
            throw std::runtime_error("loading was stopped");
        }
        files_->validate();
    }
    llama_model_params params = place();
    const bool whole = cut_->is_first() && cut_->is_last();
    if (options_.direct_io && !whole) { // llama.cpp would read every tensor of the file
        throw std::invalid_argument(
            "direct I/O would read other stages' weights too: it needs all layers in one stage");
    }
    params.load_mode = options_.direct_io ? LLAMA_LOAD_MODE_DIRECT_IO
                       : options_.mlock   ? LLAMA_LOAD_MODE_MMAP_MLOCK
                                          : LLAMA_LOAD_MODE_MMAP;
    params.progress_callback = [](float done, void *report) { // first called before a weight is read
        return (*static_cast<const WeightFiles::Progress *>(report))(done);
    };
    params.progress_callback_user_data = const_cast<WeightFiles::Progress *>(&taken);

    std::vector<const char *> paths;
    for (const std::string &path : files) {
        paths.push_back(path.c_str());
    }
    // Locking is for copies: of a mapping llama.cpp would lock all that lies before a tensor, other stages' too.
    const LoadingView view(!options_.mmap || options_.mlock);
    llama_model *model = paths.size() == 1 ? llama_model_load_from_file(paths[0], params)
                                           : llama_model_load_from_splits(paths.data(), paths.size(), params);
    accept(model, guard.failed_to_lock());
}

StageModel::StageModel(StageLayers layers, VirtualFile &file, ModelOptions options)
    : StageModel(layers, std::move(options), names(file.tensors())) {
    file.set_own([this](const std::string &tensor) { return owns(tensor); });
    own_bytes_ = file.own_bytes();
    install_callbacks();
    const NativeGuard guard;
    llama_model_params params = place();
    if (options_.direct_io) {
        throw std::invalid_argument("direct I/O is for files, but these weights are made while they load");
    }
    params.load_mode = options_.mlock ? LLAMA_LOAD_MODE_MLOCK : LLAMA_LOAD_MODE_NONE;
    llama_model *model = llama_model_load_from_file_ptr(file.stream(), params);
    if (model == nullptr) {
        file.rethrow();
    }
    accept(model, guard.failed_to_lock());
}

// Takes what llama.cpp opened, or throws.
void StageModel::accept(llama_model *model, bool failed_to_lock) {
    if (model == nullptr) {
        throw std::runtime_error(NativeGuard::error_text("llama.cpp could not load the model"));
    }
    model_ = model; // freed by the destructor, which runs even when the delegating constructor throws
    if (options_.mlock && failed_to_lock) {
        throw std::invalid_argument("the weights could not be locked in memory: raise `ulimit -l`");
    }
    cut_->start_remembering();
    if (!llama_model_has_decoder(model_) || llama_model_has_encoder(model_) || llama_model_is_diffusion(model_)) {
        throw std::runtime_error("this architecture does not generate text token by token");
    }
}

StageModel::~StageModel() { llama_model_free(model_); }

std::vector<int32_t> StageModel::tokenize(const std::string &text, bool add_special, bool parse_special) const {
    const NativeGuard guard;
    if (llama_vocab_type(vocab()) == LLAMA_VOCAB_TYPE_NONE) {
        throw std::runtime_error("the model has no tokenizer: give token ids");
    }
    std::vector<int32_t> tokens(text.size() + 8);
    const auto length = static_cast<int32_t>(text.size());
    int32_t n = llama_tokenize(vocab(), text.data(), length, tokens.data(), static_cast<int32_t>(tokens.size()),
                               add_special, parse_special);
    if (n < 0 && n != INT32_MIN) {
        tokens.resize(static_cast<size_t>(-n));
        n = llama_tokenize(vocab(), text.data(), length, tokens.data(), static_cast<int32_t>(tokens.size()),
                           add_special, parse_special);
    }
    if (n < 0) {
        throw std::runtime_error("the text has too many tokens");
    }
    tokens.resize(static_cast<size_t>(n));
    return tokens;
}

std::string StageModel::piece(int32_t token, bool special) const {
    const NativeGuard guard;
    if (token < 0 || token >= llama_vocab_n_tokens(vocab())) {
        throw std::out_of_range("token " + std::to_string(token) + " is outside of the vocabulary of " +
                                std::to_string(llama_vocab_n_tokens(vocab())));
    }
    if (llama_vocab_type(vocab()) == LLAMA_VOCAB_TYPE_NONE) {
        return {};
    }
    std::string bytes(usual_piece, '\0');
    int32_t n = llama_token_to_piece(vocab(), token, bytes.data(), static_cast<int32_t>(bytes.size()), 0, special);
    if (n < 0) {
        bytes.resize(static_cast<size_t>(-n));
        n = llama_token_to_piece(vocab(), token, bytes.data(), static_cast<int32_t>(bytes.size()), 0, special);
    }
    bytes.resize(static_cast<size_t>(std::max(n, 0)));
    return bytes;
}

} // namespace skippy
