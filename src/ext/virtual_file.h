// A GGUF file that does not exist: its header is at hand, its tensors are made when llama.cpp reads them.
#pragma once

#include "weight_files.h"

#include "ggml.h"

#include <array>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace skippy {

struct VirtualTensor {
    std::string name;
    ggml_type type;
    std::array<int64_t, GGML_MAX_DIMS> shape; // innermost first
    uint64_t offset;                          // bytes from the file's beginning
    bool own = false;                         // belongs to this stage

    int64_t rows() const { return shape[1] * shape[2] * shape[3]; }
    size_t row_bytes() const { return ggml_row_size(type, shape[0]); }
    uint64_t nbytes() const { return row_bytes() * static_cast<uint64_t>(rows()); }
};

class VirtualFile {
  public:
    struct Rows {
        std::shared_ptr<const uint8_t> data;
        size_t nbytes = 0;
    };
    // Makes `n_rows` rows of tensor number `index` from row `first` on. Throws what load() is to throw.
    using Produce = std::function<Rows(size_t index, int64_t first, int64_t n_rows)>;

    // `tensors` in the order of their offsets. Throws std::invalid_argument where one lies inside the header or
    // another.
    VirtualFile(std::string header, std::vector<VirtualTensor> tensors, Produce produce,
                WeightFiles::Progress progress);
    ~VirtualFile();
    VirtualFile(const VirtualFile &) = delete;
    VirtualFile &operator=(const VirtualFile &) = delete;

    // What is not this stage's own is never made: llama.cpp is told that the file ends there, and reads nothing.
    void set_own(const std::function<bool(const std::string &)> &owns);
    const std::vector<VirtualTensor> &tensors() const { return tensors_; }
    uint64_t own_bytes() const;

    std::FILE *stream() const { return stream_; }
    // A read cannot throw through the C library: throws here what stopped one, if anything did.
    void rethrow() const;

  private:
    ssize_t read(char *out, size_t size);
    int seek(off64_t *offset, int whence);
    const VirtualTensor *at_position() const;
    size_t read_own(const VirtualTensor &tensor, char *out, size_t size);
    void make_slab(const VirtualTensor &tensor, uint64_t at);

    std::string header_;
    std::vector<VirtualTensor> tensors_;
    Produce produce_;
    WeightFiles::Progress progress_;
    uint64_t size_ = 0, position_ = 0, made_ = 0;
    bool sought_ = false; // to an absolute position, and nothing read since
    std::vector<char> buffer_;
    std::FILE *stream_ = nullptr;
    std::exception_ptr error_;
    Rows slab_;
    uint64_t slab_start_ = 0; // position in the file; meaningless while the slab is empty
};

} // namespace skippy
