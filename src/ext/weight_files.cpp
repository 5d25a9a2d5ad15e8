#include "weight_files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <stdexcept>
#include <sys/mman.h>
#include <unistd.h>

namespace skippy {
namespace {

constexpr uint64_t prefetch_chunk = uint64_t{8} << 20;

} // namespace

WeightFiles::WeightFiles(std::vector<Extent> extents, std::vector<std::string> paths)
    : extents_(std::move(extents)), paths_(std::move(paths)) {
    for (const Extent &extent : extents_) {
        if (extent.file >= paths_.size()) {
            throw std::runtime_error("tensor '" + extent.tensor + "' names no file");
        }
    }
    for (const std::string &path : paths_) {
        const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) {
            const std::string why = std::strerror(errno);
            std::for_each(descriptors_.begin(), descriptors_.end(), ::close);
            throw std::runtime_error("cannot open " + path + ": " + why);
        }
        descriptors_.push_back(fd);
    }
}

WeightFiles::~WeightFiles() { std::for_each(descriptors_.begin(), descriptors_.end(), ::close); }

uint64_t WeightFiles::own_bytes() const {
    uint64_t bytes = 0;
    for (const Extent &extent : extents_) {
        bytes += extent.own ? extent.nbytes : 0;
    }
    return bytes;
}

bool WeightFiles::prefetch(const Progress &progress) const {
    const uint64_t total = std::max<uint64_t>(own_bytes(), 1);
    uint64_t done = 0;
    for (const Extent &extent : extents_) {
        for (uint64_t at = 0; extent.own && at < extent.nbytes; at += prefetch_chunk) {
            const uint64_t size = std::min(prefetch_chunk, extent.nbytes - at);
            posix_fadvise(descriptor(extent), static_cast<off_t>(extent.offset + at), static_cast<off_t>(size),
                          POSIX_FADV_WILLNEED); // a hint: where it fails, pages come when they are touched
            done += size;
            if (progress && !progress(static_cast<float>(done) / static_cast<float>(total))) {
                return false;
            }
        }
    }
    return true;
}

void WeightFiles::validate() const {
    const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    for (const Extent &extent : extents_) {
        if (!extent.own || extent.nbytes == 0) {
            continue;
        }
        const uint64_t start = extent.offset / page * page;
        const uint64_t size = extent.offset - start + extent.nbytes;
        void *base = mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor(extent), static_cast<off_t>(start));
        if (base == MAP_FAILED) {
            throw std::runtime_error("cannot map " + paths_[extent.file] + ": " + std::strerror(errno));
        }
        const bool valid =
            ggml_validate_row_data(extent.type, static_cast<char *>(base) + (extent.offset - start), extent.nbytes);
        munmap(base, size);
        if (!valid) {
            throw std::runtime_error("tensor '" + extent.tensor + "' holds values that are not finite numbers");
        }
    }
}

} // namespace skippy
