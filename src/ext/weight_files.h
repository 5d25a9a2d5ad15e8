// The files that hold a model's weights, as this stage reads them besides llama.cpp's own mapping of them.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace skippy {

struct Extent {
    std::string tensor;
    ggml_type type;
    uint64_t nbytes;
    uint32_t file;   // index into the list of files
    uint64_t offset; // bytes from the file's beginning
    bool own;        // belongs to this stage
};

class WeightFiles {
  public:
    using Progress = std::function<bool(float)>; // 0..1; returns false to stop
    using Check = std::function<bool()>;         // returns false where the files must not be used

    // Opens the files. Throws std::runtime_error naming the file.
    WeightFiles(std::vector<Extent> extents, std::vector<std::string> paths);
    ~WeightFiles();
    WeightFiles(const WeightFiles &) = delete;
    WeightFiles &operator=(const WeightFiles &) = delete;

    uint64_t own_bytes() const;

    // Asks the kernel for this stage's own bytes, nothing else. Returns false where progress said stop.
    bool prefetch(const Progress &progress) const;
    // Throws std::runtime_error naming the first own tensor with values that are no numbers.
    void validate() const;

  private:
    int descriptor(const Extent &extent) const { return descriptors_[extent.file]; }

    std::vector<Extent> extents_;
    std::vector<std::string> paths_;
    std::vector<int> descriptors_;
};

} // namespace skippy
