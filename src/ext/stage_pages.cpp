// Pages of a stage's lanes (stage_context.h): what is asked for is checked here, the bytes are kv_page's.
#include "stage_context.h"

#include "native_guard.h"

#include <algorithm>
#include <stdexcept>

namespace skippy {

void StageContext::learn_pages() {
    const llama_model *model = model_.model();
    if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) {
        char name[128] = "";
        llama_model_meta_val_str(model, "general.architecture", name, sizeof(name));
        pages_.refuse(std::string("architecture '") + name + "' keeps recurrent state, which cannot be cut by tokens");
        return;
    }
    const Skipping skipping(*this, [this](ggml_cgraph *graph) { pages_.note(graph); }, true);
    const auto hold_one_more = [&](int position) {
        Crossing &crossing = model_.cut().crossing();
        crossing.begin_recording();
        const int status = decode({{0, position, 1}}, {0, 1, 0, 1}, {0}, {});
        const std::string fault = crossing.fault();
        crossing.end();
        if (status != 0 || !fault.empty()) {
            throw std::runtime_error(NativeGuard::error_text(fault.empty() ? "the trial run failed" : fault));
        }
    };
    llama_memory_t memory = llama_get_memory(context_);
    hold_one_more(0);
    pages_.learn(context_, model_, options_.lanes, n_ctx_);
    if (pages_.refusal().empty() && n_ctx_ > 1) { // what happens to lanes: they grow, are trimmed, and grow again
        hold_one_more(1);
        llama_memory_seq_rm(memory, 0, 1, -1);
        hold_one_more(1);
        const int n_swa = llama_model_n_swa(model);
        if (n_swa != 1) { // cells behind the window are not saved
            pages_.prove_order(context_, 0, 2);
        }
    }
    llama_memory_seq_rm(memory, 0, -1, -1);
}

void StageContext::check_lane(int lane) const {
    if (lane < 0 || static_cast<size_t>(lane) >= positions_.size()) {
        throw std::invalid_argument("lane " + std::to_string(lane) + ": wanted 0 to " +
                                    std::to_string(positions_.size() - 1));
    }
}

std::unique_ptr<uint8_t[]> StageContext::export_kv(int lane, int first, int end) const {
    const InUse in_use(busy_);
    check_lane(lane);
    if (!pages_.refusal().empty()) {
        throw std::invalid_argument(pages_.refusal());
    }
    const int held = position(lane);
    if (first < 0 || first > end || end > held) {
        throw std::invalid_argument("tokens " + std::to_string(first) + " to " + std::to_string(end) + " of lane " +
                                    std::to_string(lane) + ": wanted a range within the " + std::to_string(held) +
                                    " that it holds");
    }
    const NativeGuard guard;
    llama_memory_t memory = llama_get_memory(context_);
    if (held > 0 &&
        (llama_memory_seq_pos_min(memory, lane) != 0 || llama_memory_seq_pos_max(memory, lane) != held - 1)) {
        throw std::runtime_error("lane " + std::to_string(lane) + " does not hold its tokens from position 0 on");
    }
    return pages_.read(lane, first, end);
}

void StageContext::import_kv(int lane, const std::vector<KvPayload> &payloads) {
    const InUse in_use(busy_);
    check_lane(lane);
    const NativeGuard guard;
    llama_memory_t memory = llama_get_memory(context_);
    llama_memory_seq_rm(memory, lane, -1, -1);
    positions_[static_cast<size_t>(lane)] = 0;
    if (!pages_.refusal().empty()) {
        throw std::invalid_argument(pages_.refusal());
    }
    int n_tokens = 0;
    for (const KvPayload &payload : payloads) {
        if (payload.n_tokens < 1 || payload.n_tokens > n_ctx_ - n_tokens) {
            throw std::invalid_argument("a page of " + std::to_string(payload.n_tokens) + " tokens behind " +
                                        std::to_string(n_tokens) + " others: wanted 1 to " +
                                        std::to_string(n_ctx_ - n_tokens) + " in a context of " +
                                        std::to_string(n_ctx_));
        }
        const uint64_t wanted = pages_.token_bytes() * static_cast<uint64_t>(payload.n_tokens);
        if (payload.size != wanted) {
            throw std::invalid_argument("a page of " + std::to_string(payload.n_tokens) + " tokens and " +
                                        std::to_string(payload.size) + " bytes: wanted " + std::to_string(wanted));
        }
        n_tokens += payload.n_tokens;
    }
    if (n_tokens == 0) {
        return;
    }
    try {
        if (!pages_.claim(context_, lane, n_tokens)) {
            throw std::runtime_error(NativeGuard::error_text("llama.cpp did not take " + std::to_string(n_tokens) +
                                                             " tokens in the order of their positions"));
        }
        int first = 0;
        for (const KvPayload &payload : payloads) {
            pages_.write(lane, first, payload);
            first += payload.n_tokens;
        }
    } catch (...) {
        llama_memory_seq_rm(memory, lane, -1, -1);
        throw;
    }
    positions_[static_cast<size_t>(lane)] = n_tokens;
}

} // namespace skippy
