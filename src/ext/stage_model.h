// A model opened by llama.cpp of which only one stage's layers are real, and its tokenizer.
#pragma once

#include "cut_device.h"
#include "own_device.h"
#include "virtual_file.h"
#include "weight_files.h"

#include "llama.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace skippy {

struct StageLayers {
    int begin, end; // half-open
    int n_layers;   // layers that a pipeline runs
    int n_blocks;   // blocks that the file stores: n_layers and, in some models, next-token-prediction blocks
};

// llama.cpp's own meanings (llama_model_params), applied to this stage's layers.
struct ModelOptions {
    std::vector<std::string> devices; // empty: every GPU
    int n_gpu_layers = -1;            // of this stage's layers, counted from its end; -1: all, where there is a GPU
    int main_gpu = 0;
    std::string split_mode = "layer"; // "none" | "layer"
    std::vector<float> tensor_split;  // share of each GPU; empty: by free memory
    bool mmap = true;
    bool mlock = false;
    bool direct_io = false;
    bool repack = true;
    bool check_tensors = false;
    bool no_host_buffer = false;
};

class StageModel {
  public:
    // `files`: the GGUF, or all its shards in order. `extents`: where each tensor lies in them; `own` is set here.
    // `check`: called before the first weight is read, after the headers were. Each of the callbacks may be null.
    // Throws std::runtime_error (one line) where llama.cpp refuses the model, or a callback stops the load.
    StageModel(StageLayers layers, std::vector<Extent> extents, const std::vector<std::string> &files,
               ModelOptions options, const WeightFiles::Progress &progress, const WeightFiles::Check &check);
    // From a file that does not exist. Throws what making its tensors threw, too.
    StageModel(StageLayers layers, VirtualFile &file, ModelOptions options);
    ~StageModel();
    StageModel(const StageModel &) = delete;
    StageModel &operator=(const StageModel &) = delete;

    llama_model *model() const { return model_; }
    const llama_vocab *vocab() const { return llama_model_get_vocab(model_); }
    Cut &cut() const { return *cut_; }
    const StageLayers &layers() const { return layers_; }
    const ModelOptions &options() const { return options_; }
    const std::vector<std::string> &device_names() const { return device_names_; }
    bool has_gpu_layers() const { return has_gpu_layers_; }
    uint64_t own_bytes() const { return own_bytes_; }

    std::vector<int32_t> tokenize(const std::string &text, bool add_special, bool parse_special) const;
    std::string piece(int32_t token, bool special) const;

  private:
    StageModel(StageLayers layers, ModelOptions options, const std::vector<std::string> &tensors);
    bool owns(const std::string &tensor) const;
    llama_model_params place();
    void accept(llama_model *model, bool failed_to_lock);
    void choose_gpus();

    StageLayers layers_;
    ModelOptions options_;
    bool tied_output_ = true, tied_norm_ = true;
    std::unique_ptr<Cut> cut_; // outlives the model
    // llama.cpp keeps pointers into these for as long as the model lives.
    std::vector<std::unique_ptr<OwnDevice>> own_devices_;
    std::vector<ggml_backend_dev_t> gpus_, devices_;
    std::vector<float> shares_;
    std::vector<std::string> patterns_;
    std::vector<llama_model_tensor_buft_override> overrides_;
    std::vector<std::string> device_names_;
    bool has_gpu_layers_ = false;
    std::unique_ptr<WeightFiles> files_; // null: of a virtual file
    uint64_t own_bytes_ = 0;
    llama_model *model_ = nullptr;
};

} // namespace skippy
