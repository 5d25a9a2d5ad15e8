#include "crossing.h"

#include "trial_cache.h"

#include <algorithm>
#include <cstring>

namespace skippy {

void Crossing::begin_recording() {
    begin({}, nullptr);
    mode_ = Mode::recording;
}

void Crossing::begin(std::vector<ArrivedTensor> arrived, const std::vector<CrossingKey> *wanted_downstream) {
    end();
    fault_.clear();
    weight_in_transit_.clear();
    leaving_.clear();
    asked_.clear();
    arrived_ = std::move(arrived);
    wanted_downstream_ = wanted_downstream;
    mode_ = Mode::running;
}

void Crossing::begin_made_up(std::map<CrossingKey, uint64_t> row_bytes, uint64_t first_row,
                             const std::vector<CrossingKey> *wanted_downstream) {
    begin({}, wanted_downstream);
    made_up_row_bytes_ = std::move(row_bytes);
    made_up_first_row_ = first_row;
    mode_ = Mode::made_up;
}

void Crossing::end() {
    mode_ = Mode::idle;
    arrived_.clear();
    made_up_row_bytes_.clear();
    wanted_downstream_ = nullptr;
    asked_index_.clear();
    leaving_index_.clear();
    asked_count_.clear();
    leaving_count_.clear();
}

// The scheduler names the copy of a tensor "DEVICE#name#number".
std::string Crossing::original_name(const char *name) {
    const char *first = std::strchr(name, '#');
    if (first == nullptr) {
        return name;
    }
    const char *last = std::strrchr(name, '#');
    return last > first ? std::string(first + 1, last) : std::string(first + 1);
}

CrossingTensor Crossing::describe(const ggml_tensor *tensor, CrossingKey key) {
    CrossingTensor info{std::move(key), tensor->type, {}, ggml_nbytes(tensor)};
    std::copy(std::begin(tensor->ne), std::end(tensor->ne), info.shape.begin());
    return info;
}

void Crossing::fail(std::string what) {
    if (fault_.empty()) {
        fault_ = std::move(what);
    }
}

void Crossing::expect_no_weight() {
    if (!weight_in_transit_.empty()) {
        fail("weight '" + weight_in_transit_ + "' of another stage is needed here: this model cannot be cut here");
        weight_in_transit_.clear();
    }
}

const std::string &Crossing::fault() {
    expect_no_weight();
    return fault_;
}

void Crossing::fetch_weight(const ggml_tensor *tensor) {
    if (mode_ != Mode::idle) {
        expect_no_weight();
        weight_in_transit_ = tensor->name;
    }
}

void Crossing::fetch(const ggml_tensor *tensor, void *data, size_t offset, size_t size) {
    if (mode_ == Mode::idle) {
        return; // KV rows of other stages during a state export: left untouched
    }
    expect_no_weight();
    const auto [seen, is_new] = asked_index_.try_emplace(tensor, asked_.size());
    if (is_new) {
        std::string name = original_name(tensor->name);
        const int occurrence = asked_count_[name]++;
        asked_.push_back(describe(tensor, {std::move(name), occurrence}));
    }
    const CrossingTensor &asked = asked_[seen->second];
    if (mode_ == Mode::recording) {
        std::memset(data, 0, size);
        return;
    }
    if (mode_ == Mode::made_up) {
        make_up(asked, data, offset, size);
        return;
    }
    const auto found =
        std::find_if(arrived_.begin(), arrived_.end(), [&](const ArrivedTensor &a) { return a.info.key == asked.key; });
    if (found == arrived_.end()) {
        std::memset(data, 0, size);
        fail("tensor '" + asked.key.first + "' is needed from upstream and did not arrive");
        return;
    }
    if (found->info.type != asked.type || found->info.shape != asked.shape || found->info.nbytes != asked.nbytes ||
        offset + size > asked.nbytes) {
        std::memset(data, 0, size);
        fail("tensor '" + asked.key.first + "' arrived with another type or shape than this stage needs");
        return;
    }
    std::memcpy(data, found->data + offset, size);
}

void Crossing::make_up(const CrossingTensor &asked, void *data, size_t offset, size_t size) {
    const auto row_bytes = made_up_row_bytes_.find(asked.key);
    const bool in_rows =
        row_bytes != made_up_row_bytes_.end() && row_bytes->second != 0 && asked.nbytes % row_bytes->second == 0;
    const size_t length = in_rows ? row_bytes->second : asked.nbytes;
    const size_t n_values = length / ggml_type_size(asked.type) * static_cast<size_t>(ggml_blck_size(asked.type));
    std::vector<uint8_t> values(asked.nbytes);
    for (size_t row = 0; row * length < asked.nbytes; ++row) {
        write_made_up(asked.type, values.data() + row * length, n_values, in_rows ? made_up_first_row_ + row : 0);
    }
    std::memcpy(data, values.data() + offset, std::min(size, asked.nbytes - std::min(offset, asked.nbytes)));
}

void Crossing::store(const ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
    if (mode_ == Mode::idle) {
        return;
    }
    if (!weight_in_transit_.empty() && weight_in_transit_ == original_name(tensor->name)) {
        weight_in_transit_.clear();
        return;
    }
    expect_no_weight();
    constexpr long not_wanted = -1;
    auto seen = leaving_index_.find(tensor);
    if (seen == leaving_index_.end()) {
        std::string name = original_name(tensor->name);
        const int occurrence = leaving_count_[name]++;
        CrossingKey key{std::move(name), occurrence};
        const bool keep = mode_ == Mode::recording || (wanted_downstream_ != nullptr &&
                                                       std::find(wanted_downstream_->begin(), wanted_downstream_->end(),
                                                                 key) != wanted_downstream_->end());
        seen = leaving_index_.emplace(tensor, keep ? static_cast<long>(leaving_.size()) : not_wanted).first;
        if (keep) {
            LeavingTensor leaving{describe(tensor, std::move(key)), nullptr};
            if (mode_ != Mode::recording) {
                leaving.data.reset(new uint8_t[leaving.info.nbytes]);
            }
            leaving_.push_back(std::move(leaving));
        }
    } else if (offset == 0) { // llama.cpp split the micro-batch after all: the first one's bytes would be lost
        fail("tensor '" + original_name(tensor->name) + "' left twice in one micro-batch");
    }
    if (seen->second != not_wanted && mode_ != Mode::recording) {
        std::memcpy(leaving_[static_cast<size_t>(seen->second)].data.get() + offset, data, size);
    }
}

} // namespace skippy
