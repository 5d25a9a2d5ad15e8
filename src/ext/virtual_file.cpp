#include "virtual_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace skippy {
namespace {

constexpr int64_t slab_elements = int64_t{8} << 20; // made at a time: 32 MiB as f32
constexpr size_t buffer_bytes = size_t{1} << 20;    // the C library reads nothing past it

} // namespace

VirtualFile::VirtualFile(std::string header, std::vector<VirtualTensor> tensors, Produce produce,
                         WeightFiles::Progress progress)
    : header_(std::move(header)), tensors_(std::move(tensors)), produce_(std::move(produce)),
      progress_(std::move(progress)), size_(header_.size()), buffer_(buffer_bytes) {
    for (const VirtualTensor &tensor : tensors_) {
        if (tensor.offset < size_) {
            throw std::invalid_argument("tensor '" + tensor.name + "' begins at byte " + std::to_string(tensor.offset) +
                                        ", inside of what ends at " + std::to_string(size_));
        }
        size_ = tensor.offset + tensor.nbytes();
    }
    const cookie_io_functions_t functions = {
        [](void *self, char *out, size_t size) { return static_cast<VirtualFile *>(self)->read(out, size); },
        nullptr,
        [](void *self, off64_t *offset, int whence) { return static_cast<VirtualFile *>(self)->seek(offset, whence); },
        nullptr,
    };
    stream_ = fopencookie(this, "rb", functions);
    if (stream_ == nullptr) {
        throw std::runtime_error(std::string("cannot make a stream: ") + std::strerror(errno));
    }
    std::setvbuf(stream_, buffer_.data(), _IOFBF, buffer_.size());
}

VirtualFile::~VirtualFile() { std::fclose(stream_); }

void VirtualFile::set_own(const std::function<bool(const std::string &)> &owns) {
    for (VirtualTensor &tensor : tensors_) {
        tensor.own = owns(tensor.name);
    }
}

uint64_t VirtualFile::own_bytes() const {
    uint64_t bytes = 0;
    for (const VirtualTensor &tensor : tensors_) {
        bytes += tensor.own ? tensor.nbytes() : 0;
    }
    return bytes;
}

void VirtualFile::rethrow() const {
    if (error_) {
        std::rethrow_exception(error_);
    }
}

// The tensor whose bytes lie there, or null: header, padding, end.
const VirtualTensor *VirtualFile::at_position() const {
    const auto next = std::upper_bound(tensors_.begin(), tensors_.end(), position_,
                                       [](uint64_t at, const VirtualTensor &tensor) { return at < tensor.offset; });
    const VirtualTensor *tensor = next == tensors_.begin() ? nullptr : &*(next - 1);
    return tensor != nullptr && position_ < tensor->offset + tensor->nbytes() ? tensor : nullptr;
}

// Before each read llama.cpp asks where it stands, and reads no further than to the end of the file.
int VirtualFile::seek(off64_t *offset, int whence) {
    const bool asks = whence == SEEK_CUR && *offset == 0;
    const auto base = static_cast<off64_t>(whence == SEEK_SET ? 0 : whence == SEEK_CUR ? position_ : size_);
    if (base + *offset < 0) {
        errno = EINVAL;
        return -1;
    }
    *offset += base;
    position_ = static_cast<uint64_t>(*offset);
    sought_ = whence == SEEK_SET;
    if (const VirtualTensor *tensor = asks ? at_position() : nullptr; tensor != nullptr && !tensor->own) {
        *offset = static_cast<off64_t>(size_);
    }
    return 0;
}

// Never reads beyond a tensor, nor beyond the header: who fills a buffer wants no other tensor made.
ssize_t VirtualFile::read(char *out, size_t size) {
    const VirtualTensor *tensor = at_position();
    // To seek to a tensor, the C library seeks to a round number before it and reads up to it, to fill its buffer;
    // given nothing it seeks on. llama.cpp itself seeks to the beginnings of tensors only.
    if (std::exchange(sought_, false) && tensor != nullptr && position_ != tensor->offset) {
        return 0;
    }
    size_t step = 0;
    try {
        if (position_ < header_.size()) {
            step = std::min(size, header_.size() - position_);
            std::memcpy(out, header_.data() + position_, step);
        } else if (tensor != nullptr) {
            step = std::min<uint64_t>(size, tensor->offset + tensor->nbytes() - position_);
            step = tensor->own ? read_own(*tensor, out, step) : step;
        }
    } catch (...) {
        error_ = std::current_exception();
        slab_ = {};
        errno = EIO;
        return -1;
    }
    position_ += step;
    return static_cast<ssize_t>(step);
}

// Returns how much was read, at least one byte.
size_t VirtualFile::read_own(const VirtualTensor &tensor, char *out, size_t size) {
    if (slab_.data == nullptr || position_ < slab_start_ || position_ >= slab_start_ + slab_.nbytes) {
        make_slab(tensor, position_ - tensor.offset);
    }
    const size_t from = position_ - slab_start_;
    const size_t step = std::min(size, slab_.nbytes - from);
    std::memcpy(out, slab_.data.get() + from, step);
    if (from + step == slab_.nbytes) {
        slab_ = {};
    }
    return step;
}

void VirtualFile::make_slab(const VirtualTensor &tensor, uint64_t at) {
    slab_ = {}; // before the next one takes memory
    const int64_t most = std::max<int64_t>(1, slab_elements / tensor.shape[0]);
    const int64_t first = static_cast<int64_t>(at / tensor.row_bytes()) / most * most;
    const int64_t n_rows = std::min(most, tensor.rows() - first);
    const size_t wanted = static_cast<size_t>(n_rows) * tensor.row_bytes();
    const std::string name = "tensor '" + tensor.name + "'";
    Rows rows = produce_(static_cast<size_t>(&tensor - tensors_.data()), first, n_rows);
    if (rows.nbytes != wanted) {
        throw std::runtime_error(name + ": rows " + std::to_string(first) + " to " + std::to_string(first + n_rows) +
                                 ": wanted " + std::to_string(wanted) + " bytes, got " + std::to_string(rows.nbytes));
    }
    if (!ggml_validate_row_data(tensor.type, rows.data.get(), rows.nbytes)) {
        throw std::runtime_error(name + " holds values that are not finite numbers");
    }
    slab_ = std::move(rows);
    slab_start_ = tensor.offset + static_cast<uint64_t>(first) * tensor.row_bytes();
    made_ += wanted; // may pass the total: a matrix that serves at both ends can be read twice
    const uint64_t total = std::max<uint64_t>(own_bytes(), 1);
    if (progress_ && !progress_(static_cast<float>(std::min(made_, total)) / static_cast<float>(total))) {
        throw std::runtime_error("loading was stopped");
    }
}

} // namespace skippy
