#include "kv_state.h"

#include <cstdio>
#include <cstring>

namespace skippy {
namespace {

constexpr int32_t no_token = -1;

ggml_tensor *root_of(const ggml_tensor *tensor) {
    while (tensor->view_src != nullptr) {
        tensor = tensor->view_src;
    }
    return const_cast<ggml_tensor *>(tensor);
}

// "cache_k_l12": 'k' and 12; some models have caches of other names, "cache_..._k_l12".
bool read_name(const ggml_tensor *tensor, char &part, int &layer) {
    const char *suffix = std::strstr(tensor->name, "_l");
    if (std::strncmp(tensor->name, "cache_", 6) != 0 || suffix == nullptr) {
        return false;
    }
    part = suffix[-1];
    return std::sscanf(suffix, "_l%d", &layer) == 1;
}

} // namespace

// Reads the saved state in order; the rows that were noted stand where they would have been written.
class KvState::Reader {
  public:
    Reader(const uint8_t *saved, size_t size, const std::vector<StateTraffic::Move> &moves)
        : base_(saved), at_(saved), end_(saved + size), moves_(moves) {}

    template <typename T> T take() {
        T value{};
        if (static_cast<size_t>(end_ - at_) < sizeof(T)) {
            failed_ = true;
            return value;
        }
        std::memcpy(&value, at_, sizeof(T));
        at_ += sizeof(T);
        return value;
    }
    template <typename T> bool expect(T value) { return take<T>() == value && !failed_; }
    // The next rows, if they stand `ahead` bytes from here.
    const StateTraffic::Move *rows(size_t ahead) const {
        return next_ < moves_.size() && moves_[next_].at == at_ + ahead ? &moves_[next_] : nullptr;
    }
    bool skip_rows(size_t size) {
        const StateTraffic::Move *move = rows(0);
        if (move == nullptr || move->size != size || size > static_cast<size_t>(end_ - at_)) {
            return false;
        }
        at_ += size;
        ++next_;
        return true;
    }
    bool failed() const { return failed_; }
    bool at_end() const { return at_ == end_; }
    bool all_rows_read() const { return next_ == moves_.size(); }
    void start_again() {
        at_ = base_;
        next_ = 0;
        failed_ = false;
    }

  private:
    const uint8_t *base_, *at_, *end_;
    const std::vector<StateTraffic::Move> &moves_;
    size_t next_ = 0;
    bool failed_ = false;
};

class KvState::Sink {
  public:
    virtual ~Sink() = default;
    virtual void bytes(const void *data, size_t size) = 0;
    virtual void rows(size_t size) = 0;
    template <typename T> void put(T value) { bytes(&value, sizeof(value)); }
};

struct KvState::Measure : KvState::Sink {
    size_t size = 0;
    void bytes(const void *, size_t n) override { size += n; }
    void rows(size_t n) override { size += n; }
};

struct KvState::Writer : KvState::Sink {
    explicit Writer(uint8_t *start) : to(start) {}
    uint8_t *to;
    void bytes(const void *data, size_t n) override {
        std::memcpy(to, data, n);
        to += n;
    }
    void rows(size_t n) override { to += n; }
};

struct KvState::Comparison : KvState::Sink {
    explicit Comparison(const uint8_t *start) : with(start) {}
    const uint8_t *with;
    bool same = true;
    void bytes(const void *data, size_t n) override {
        same = same && std::memcmp(with, data, n) == 0;
        with += n;
    }
    void rows(size_t n) override { with += n; }
};

std::optional<KvState> KvState::learn(const uint8_t *saved, size_t size, const std::vector<StateTraffic::Move> &moves,
                                      int lanes) {
    Reader reader(saved, size, moves);
    for (const bool has_extra : {false, true}) {
        KvState state;
        state.lanes_ = lanes;
        state.has_extra_ = has_extra;
        reader.start_again();
        if (state.read(reader, lanes) && state.matches(saved, size, 0, 1, 0) && state.in_first_cells(moves, 0, 1)) {
            return state;
        }
    }
    return std::nullopt;
}

bool KvState::read(Reader &reader, int lanes) {
    magic_ = reader.take<uint32_t>();
    if (!reader.expect<int32_t>(0)) {
        return false;
    }
    while (!reader.at_end()) {
        if (!read_cache(reader, lanes)) {
            return false;
        }
        const Cache &cache = caches_.back();
        blocks_.insert(blocks_.end(), cache.keys.begin(), cache.keys.end());
        blocks_.insert(blocks_.end(), cache.values.begin(), cache.values.end());
    }
    return reader.all_rows_read() && !caches_.empty();
}

bool KvState::read_cache(Reader &reader, int lanes) {
    const bool cell_follows = reader.expect(static_cast<uint32_t>(lanes)) && reader.expect<uint32_t>(1) &&
                              reader.expect<int32_t>(0) && reader.expect<uint32_t>(1);
    if (!cell_follows ||
        (has_extra_ && !(reader.expect<int32_t>(0) && reader.expect<int32_t>(0) && reader.expect<int32_t>(0)))) {
        return false;
    }
    if (!reader.expect<int32_t>(0)) {
        return false;
    }
    const auto transposed = reader.take<uint32_t>();
    const auto n_layers = reader.take<uint32_t>();
    if (reader.failed() || transposed > 1) {
        return false;
    }
    Cache cache{transposed == 1, {}, {}};
    constexpr size_t header = 3 * sizeof(uint32_t); // the type and what follows it: as long in all forms
    const auto read_block = [&](char part, int layer_wanted) {
        const StateTraffic::Move *move = reader.rows(header);
        char part_found = 0;
        int layer = 0;
        if (move == nullptr || !read_name(root_of(move->tensor), part_found, layer) || part_found != part ||
            (layer_wanted >= 0 && layer != layer_wanted)) {
            return false;
        }
        KvBlock block{layer, part == 'v', root_of(move->tensor), 0, 0, 0};
        if (!reader.expect(static_cast<int32_t>(block.tensor->type))) {
            return false;
        }
        if (part == 'v' && cache.v_transposed) {
            block.element_bytes = reader.take<uint32_t>();
            block.n_elements = reader.take<uint32_t>();
            block.row_bytes = uint64_t{block.element_bytes} * block.n_elements;
            for (uint32_t i = 0; i < block.n_elements; ++i) {
                if (!reader.skip_rows(block.element_bytes)) {
                    return false;
                }
            }
        } else {
            block.row_bytes = reader.take<uint64_t>();
            if (!reader.skip_rows(block.row_bytes)) {
                return false;
            }
        }
        (part == 'v' ? cache.values : cache.keys).push_back(block);
        return true;
    };
    for (uint32_t i = 0; i < n_layers; ++i) {
        if (!read_block('k', -1)) {
            return false;
        }
    }
    for (const KvBlock &key : std::vector<KvBlock>(cache.keys)) { // a layer need not have V of its own
        read_block('v', key.layer);
    }
    for (int lane = 1; lane < lanes; ++lane) {
        if (!reader.expect<uint32_t>(0)) {
            return false;
        }
    }
    caches_.push_back(std::move(cache));
    return true;
}

void KvState::put(Sink &sink, int lane, int n_tokens, int32_t token) const {
    sink.put(magic_);
    sink.put(static_cast<int32_t>(lane));
    const auto n = static_cast<size_t>(n_tokens);
    for (const Cache &cache : caches_) {
        sink.put(static_cast<uint32_t>(lanes_));
        for (int stream = 0; stream < lanes_; ++stream) {
            sink.put(static_cast<uint32_t>(stream == lane ? n_tokens : 0));
            if (stream != lane || n_tokens == 0) {
                continue;
            }
            for (int32_t position = 0; position < n_tokens; ++position) {
                sink.put(position);
                sink.put(uint32_t{1});
                if (has_extra_) { // of text all coordinates are the position
                    sink.put(position);
                    sink.put(position);
                    sink.put(token);
                }
                sink.put(static_cast<int32_t>(lane));
            }
            sink.put(static_cast<uint32_t>(cache.v_transposed));
            sink.put(static_cast<uint32_t>(cache.keys.size()));
            for (const std::vector<KvBlock> *list : {&cache.keys, &cache.values}) {
                for (const KvBlock &block : *list) {
                    sink.put(static_cast<int32_t>(block.tensor->type));
                    if (block.element_bytes != 0) {
                        sink.put(block.element_bytes);
                        sink.put(block.n_elements);
                    } else {
                        sink.put(block.row_bytes);
                    }
                    sink.rows(n * block.row_bytes);
                }
            }
        }
    }
}

size_t KvState::size(int n_tokens) const {
    Measure measure;
    put(measure, 0, n_tokens, no_token);
    return measure.size;
}

void KvState::write(uint8_t *to, int lane, int n_tokens) const {
    Writer writer(to);
    put(writer, lane, n_tokens, no_token);
}

bool KvState::matches(const uint8_t *saved, size_t size, int lane, int n_tokens, int32_t token) const {
    Measure measure;
    put(measure, lane, n_tokens, token);
    if (measure.size != size) {
        return false;
    }
    Comparison comparison(saved);
    put(comparison, lane, n_tokens, token);
    return comparison.same;
}

bool KvState::in_first_cells(const std::vector<StateTraffic::Move> &moves, int lane, int n_tokens) const {
    const auto n = static_cast<size_t>(n_tokens);
    size_t next = 0;
    const auto is_next = [&](const KvBlock &block, size_t offset, size_t size) {
        if (next == moves.size()) {
            return false;
        }
        const StateTraffic::Move &move = moves[next++];
        return root_of(move.tensor) == block.tensor && move.tensor->view_offs == block.lane_offset(lane) &&
               move.offset == offset && move.size == size;
    };
    for (const KvBlock &block : blocks_) {
        if (block.element_bytes == 0) {
            if (!is_next(block, 0, n * block.row_bytes)) {
                return false;
            }
            continue;
        }
        for (size_t element = 0; element < block.n_elements; ++element) {
            if (!is_next(block, element * block.cells() * block.element_bytes, n * block.element_bytes)) {
                return false;
            }
        }
    }
    return next == moves.size();
}

} // namespace skippy
