#include "sampler.h"

#include "grammar.h"
#include "native_guard.h"
#include "stage_context.h"
#include "stage_model.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

namespace skippy {
namespace {

constexpr int64_t MAX_HISTORY = 256 * 1024; // tokens that penalties look back on
constexpr size_t MAX_LOGIT_BIAS = 4096;     // entries
// llama.cpp searches the whole vocabulary for each sequence breaker, and tokenizes what follows wherever one may begin.
constexpr size_t MAX_SEQUENCE_BREAKERS = 16;
constexpr size_t MAX_SEQUENCE_BREAKER_BYTES = 40; // of one; llama.cpp cuts longer ones
constexpr size_t MAX_SEQUENCE_BREAKERS_BYTES = 128;
constexpr double MAX_BIAS = 1e6; // far beyond any logit, far from overflow

std::string shown(double value) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", value);
    return text;
}

float within(const char *name, double value, double low, double high) {
    if (!(value >= low && value <= high)) { // NaN too
        throw std::invalid_argument(std::string(name) + " " + shown(value) + ": wanted " + shown(low) + " to " +
                                    shown(high));
    }
    return static_cast<float>(value);
}

int32_t whole_within(const char *name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) {
        throw std::invalid_argument(std::string(name) + " " + std::to_string(value) + ": wanted " +
                                    std::to_string(low) + " to " + std::to_string(high));
    }
    return static_cast<int32_t>(value);
}

int32_t history(const char *name, int64_t value, int n_ctx_train) {
    const int32_t n = whole_within(name, value, -1, INT32_MAX);
    const int64_t longest = std::min<int64_t>(std::max(n_ctx_train, 1), MAX_HISTORY);
    return static_cast<int32_t>(n == -1 ? longest : std::min<int64_t>(n, longest));
}

// Unlike llama.cpp's default, every seed means itself: there, this one asks for a random seed.
uint32_t fixed_seed(int64_t seed) {
    if (seed < 0 || seed > static_cast<int64_t>(UINT32_MAX)) {
        throw std::invalid_argument("seed " + std::to_string(seed) + ": wanted 0 to 4294967295");
    }
    return seed == static_cast<int64_t>(LLAMA_DEFAULT_SEED) ? LLAMA_DEFAULT_SEED - 1 : static_cast<uint32_t>(seed);
}

// Biases by token, each token once: llama.cpp tells tokens at their own place from others, so order does not matter.
std::vector<llama_logit_bias> biases(const llama_vocab *vocab, const SamplerOptions &options) {
    const int32_t n_vocab = llama_vocab_n_tokens(vocab);
    if (options.logit_bias.size() > MAX_LOGIT_BIAS) {
        throw std::invalid_argument("logit_bias has " + std::to_string(options.logit_bias.size()) +
                                    " entries: wanted at most " + std::to_string(MAX_LOGIT_BIAS));
    }
    std::vector<llama_logit_bias> merged;
    for (const auto &[token, bias] : options.logit_bias) {
        const int32_t id = whole_within("logit_bias token", token, 0, n_vocab - 1);
        const bool banned = bias == -INFINITY;
        merged.push_back({id, banned ? -INFINITY : within("logit_bias", bias, -MAX_BIAS, MAX_BIAS)});
    }
    if (options.ignore_eos) {
        for (int32_t id = 0; id < n_vocab; ++id) {
            if (llama_vocab_is_eog(vocab, id)) {
                merged.push_back({id, -INFINITY});
            }
        }
    }
    int32_t n_suppressed = 0;
    const llama_token *suppressed = llama_vocab_get_suppress_tokens(vocab, &n_suppressed);
    for (int32_t i = 0; i < n_suppressed; ++i) {
        if (suppressed[i] >= 0 && suppressed[i] < n_vocab) {
            merged.push_back({suppressed[i], -INFINITY});
        }
    }
    return merged;
}

llama_sampler *dry(const llama_vocab *vocab, int n_ctx_train, const SamplerOptions &options) {
    const float multiplier = within("dry_multiplier", options.dry_multiplier, 0, 1000);
    const float base = within("dry_base", options.dry_base, 1, 1000);
    const int32_t allowed = whole_within("dry_allowed_length", options.dry_allowed_length, 0, INT32_MAX);
    const int32_t last_n = history("dry_penalty_last_n", options.dry_penalty_last_n, n_ctx_train);
    if (options.dry_sequence_breakers.size() > MAX_SEQUENCE_BREAKERS) {
        throw std::invalid_argument("dry_sequence_breakers: wanted at most " + std::to_string(MAX_SEQUENCE_BREAKERS));
    }
    std::vector<const char *> breakers;
    size_t total = 0;
    for (const std::string &text : options.dry_sequence_breakers) {
        if (text.empty() || text.size() > MAX_SEQUENCE_BREAKER_BYTES || text.find('\0') != std::string::npos) {
            throw std::invalid_argument("dry_sequence_breakers: wanted 1 to " +
                                        std::to_string(MAX_SEQUENCE_BREAKER_BYTES) + " bytes without NUL in each");
        }
        breakers.push_back(text.c_str());
        total += text.size();
    }
    if (total > MAX_SEQUENCE_BREAKERS_BYTES) {
        throw std::invalid_argument("dry_sequence_breakers: " + std::to_string(total) + " bytes, wanted at most " +
                                    std::to_string(MAX_SEQUENCE_BREAKERS_BYTES) + " in all");
    }
    return llama_sampler_init_dry(vocab, multiplier, base, allowed, last_n, breakers.data(), breakers.size());
}

std::string special_piece(const llama_vocab *vocab, int32_t token) {
    std::string piece(64, '\0');
    int32_t n = llama_token_to_piece(vocab, token, piece.data(), static_cast<int32_t>(piece.size()), 0, true);
    if (n < 0) {
        piece.resize(static_cast<size_t>(-n));
        n = llama_token_to_piece(vocab, token, piece.data(), static_cast<int32_t>(piece.size()), 0, true);
    }
    piece.resize(static_cast<size_t>(std::max(n, 0)));
    return piece;
}

std::unique_ptr<GrammarMatcher> matcher(const llama_vocab *vocab, const std::string &text) {
    const int32_t n_vocab = llama_vocab_n_tokens(vocab);
    const TokenNames names{[vocab](const std::string &name) {
                               llama_token ids[2];
                               const auto size = static_cast<int32_t>(name.size());
                               return llama_tokenize(vocab, name.data(), size, ids, 2, false, true) == 1 ? ids[0] : -1;
                           },
                           n_vocab};
    Grammar grammar = Grammar::parse(text, names);
    TokenPieces pieces;
    pieces.offsets.push_back(0);
    for (int32_t id = 0; id < n_vocab; ++id) {
        pieces.bytes += special_piece(vocab, id);
        pieces.offsets.push_back(static_cast<uint32_t>(pieces.bytes.size()));
        pieces.ends.push_back(llama_vocab_is_eog(vocab, id));
    }
    return std::make_unique<GrammarMatcher>(std::move(grammar), std::move(pieces));
}

constexpr size_t greedy_block = 4096; // logits
constexpr const char *nothing_left = "no token is left to choose: every logit is -inf";

// NaN compares false with everything; this form lets the compiler look at many logits at once.
// `first`: the token of the first of the `n` logits.
void check_numbers(const float *logits, size_t n, size_t first = 0) {
    int32_t good = 1;
    for (size_t i = 0; i < n; ++i) {
        good &= static_cast<int32_t>(logits[i] < INFINITY);
    }
    if (good != 0) {
        return;
    }
    const float *wrong = std::find_if_not(logits, logits + n, [](float logit) { return logit < INFINITY; });
    throw std::runtime_error("the model computed " + shown(*wrong) + " as the logit of token " +
                             std::to_string(first + static_cast<size_t>(wrong - logits)));
}

float larger(float a, float b) { return a < b ? b : a; }

// Of numbers; -inf of none. Sixteen at a time, which std::max_element cannot: it has to know where each one was.
float highest(const float *logits, size_t n) {
    constexpr size_t width = 16;
    float best[width];
    std::fill_n(best, width, -INFINITY);
    size_t i = 0;
    for (; i + width <= n; i += width) {
        for (size_t j = 0; j < width; ++j) {
            best[j] = best[j] < logits[i + j] ? logits[i + j] : best[j];
        }
    }
    const float rest = std::accumulate(logits + i, logits + n, -INFINITY, larger);
    return std::accumulate(best, best + width, rest, larger);
}

void check_biased(int32_t token, float logit) {
    if (std::isnan(logit) || logit == INFINITY) {
        throw std::runtime_error("bias and penalties make the logit of token " + std::to_string(token) + " " +
                                 shown(logit));
    }
}

} // namespace

Sampler::Sampler(const llama_vocab *vocab, int n_ctx_train, const SamplerOptions &options)
    : vocab_(vocab), n_vocab_(llama_vocab_n_tokens(vocab)),
      adjust_(llama_sampler_chain_init(llama_sampler_chain_default_params())),
      select_(llama_sampler_chain_init(llama_sampler_chain_default_params())),
      candidates_(static_cast<size_t>(n_vocab_)) {
    const NativeGuard guard;
    const auto adjust = [this](llama_sampler *sampler) { llama_sampler_chain_add(adjust_.get(), sampler); };
    const auto select = [this](llama_sampler *sampler) { llama_sampler_chain_add(select_.get(), sampler); };

    const float temperature = within("temperature", options.temperature, 0, 1000);
    const int32_t top_k = whole_within("top_k", options.top_k, -1, INT32_MAX);
    const float top_p = within("top_p", options.top_p, 0, 1);
    const float min_p = within("min_p", options.min_p, 0, 1);
    const float typical_p = within("typical_p", options.typical_p, 0, 1);
    const float top_n_sigma = within("top_n_sigma", options.top_n_sigma, -1000, 1000);
    const float xtc_probability = within("xtc_probability", options.xtc_probability, 0, 1);
    const float xtc_threshold = within("xtc_threshold", options.xtc_threshold, 0, 1);
    const int32_t last_n = history("repeat_last_n", options.repeat_last_n, n_ctx_train);
    const float repeat = within("repeat_penalty", options.repeat_penalty, 0.01, 100);
    const float frequency = within("frequency_penalty", options.frequency_penalty, -100, 100);
    const float presence = within("presence_penalty", options.presence_penalty, -100, 100);
    const int32_t mirostat = whole_within("mirostat", options.mirostat, 0, 2);
    const float tau = within("mirostat_tau", options.mirostat_tau, 0, 1000);
    const float eta = within("mirostat_eta", options.mirostat_eta, 0, 1000);
    const uint32_t seed = fixed_seed(options.seed);

    const std::vector<llama_logit_bias> bias = biases(vocab, options);
    if (!bias.empty()) {
        adjust(llama_sampler_init_logit_bias(n_vocab_, static_cast<int32_t>(bias.size()), bias.data()));
    }
    Chain dry_sampler(dry(vocab, n_ctx_train, options));
    // As in llama.cpp, mirostat replaces everything but bias and temperature.
    if (mirostat == 0) {
        adjust(llama_sampler_init_penalties(n_vocab_, last_n, repeat, frequency, presence));
        adjust(dry_sampler.release());
    }
    if (temperature == 0.0F) {
        // What follows in llama.cpp either keeps the most likely token or (xtc) would remove it at random.
        select(llama_sampler_init_greedy());
    } else if (mirostat == 0) {
        select(llama_sampler_init_top_n_sigma(top_n_sigma));
        select(llama_sampler_init_top_k(top_k));
        select(llama_sampler_init_typical(typical_p, 0));
        select(llama_sampler_init_top_p(top_p, 0));
        select(llama_sampler_init_min_p(min_p, 0));
        select(llama_sampler_init_xtc(xtc_probability, xtc_threshold, 0, seed));
        select(llama_sampler_init_temp_ext(temperature, 0.0F, 1.0F));
        select(llama_sampler_init_dist(seed));
    } else {
        select(llama_sampler_init_temp(temperature));
        select(mirostat == 1 ? llama_sampler_init_mirostat(n_vocab_, seed, tau, eta, 100)
                             : llama_sampler_init_mirostat_v2(seed, tau, eta));
    }
    if (!options.grammar.empty()) {
        grammar_ = matcher(vocab, options.grammar);
    }
    const bool penalties = last_n != 0 && (repeat != 1.0F || frequency != 0.0F || presence != 0.0F);
    const bool history_matters = mirostat == 0 && (penalties || options.dry_multiplier != 0);
    greedy_ = temperature == 0.0F && !history_matters && !grammar_;
    bias_ = bias;
    std::stable_sort(bias_.begin(), bias_.end(), [](const auto &a, const auto &b) { return a.token < b.token; });
}

Sampler::~Sampler() = default;
Sampler::Sampler(Sampler &&) noexcept = default;
Sampler &Sampler::operator=(Sampler &&) noexcept = default;

void Sampler::accept(const int32_t *tokens, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        whole_within("token", tokens[i], 0, n_vocab_ - 1);
    }
    const NativeGuard guard;
    for (size_t i = 0; i < n; ++i) {
        llama_sampler_accept(adjust_.get(), tokens[i]);
        llama_sampler_accept(select_.get(), tokens[i]);
    }
}

int32_t Sampler::sample(const float *logits, size_t n) {
    if (n != candidates_.size()) {
        throw std::invalid_argument(std::to_string(n) + " logits: the vocabulary has " + std::to_string(n_vocab_) +
                                    " tokens");
    }
    if (greedy_) {
        return most_likely(logits);
    }
    check_numbers(logits, n);
    const NativeGuard guard;
    int32_t token;
    if (grammar_ && grammar_->complete()) {
        token = choose_end(logits); // whatever the bias says: nothing else can follow
    } else {
        load(logits);
        // llama.cpp's order of things: ask the grammar about the chosen token only, and choose again among all that
        // fit if it does not. The same seed gives the same tokens as there, and most tokens cost one question.
        token = choose();
        if (grammar_ && (token < 0 || !grammar_->allows(token))) {
            load(logits);
            for (llama_token_data &candidate : candidates_) {
                if (candidate.logit != -INFINITY && !grammar_->allows(candidate.id)) {
                    candidate.logit = -INFINITY;
                }
            }
            token = choose();
            if (token < 0) {
                throw GrammarError("no token that the model can choose continues it");
            }
        }
        if (token < 0) {
            throw std::runtime_error(nothing_left);
        }
    }
    if (grammar_) {
        grammar_->accept(token);
    }
    llama_sampler_accept(adjust_.get(), token);
    llama_sampler_accept(select_.get(), token);
    return token;
}

// The first token of the highest logit, as llama.cpp's greedy sampler chooses it. Block by block: what is looked at
// more than once is in the nearest cache then, and where a bias applies, no more than that is copied.
int32_t Sampler::most_likely(const float *logits) {
    const size_t n = candidates_.size();
    const auto size_at = [n](size_t first) { return std::min(greedy_block, n - first); };
    size_t best_first = 0;
    float best = -INFINITY;
    for (size_t first = 0; first < n; first += greedy_block) {
        check_numbers(logits + first, size_at(first), first);
        const float found = highest(with_bias(logits, first, size_at(first)), size_at(first));
        if (found > best) {
            best = found;
            best_first = first;
        }
    }
    if (best == -INFINITY) {
        throw std::runtime_error(nothing_left);
    }
    const float *block = with_bias(logits, best_first, size_at(best_first));
    return static_cast<int32_t>(std::find(block, block + size_at(best_first), best) - block + best_first);
}

// `size` of the logits from token `first` on, biases added: where they are, or in `biased_` until the next call.
const float *Sampler::with_bias(const float *logits, size_t first, size_t size) {
    const auto before = [](const llama_logit_bias &bias, size_t token) {
        return static_cast<size_t>(bias.token) < token;
    };
    auto bias = std::lower_bound(bias_.begin(), bias_.end(), first, before);
    if (bias == bias_.end() || static_cast<size_t>(bias->token) >= first + size) {
        return logits + first;
    }
    biased_.assign(logits + first, logits + first + size);
    for (; bias != bias_.end() && static_cast<size_t>(bias->token) < first + size; ++bias) {
        float &logit = biased_[static_cast<size_t>(bias->token) - first];
        logit += bias->bias;
        check_biased(bias->token, logit);
    }
    return biased_.data();
}

bool Sampler::fits(int32_t token) {
    whole_within("token", token, 0, n_vocab_ - 1);
    return !grammar_ || grammar_->allows(token);
}

void Sampler::load(const float *logits) {
    for (int32_t id = 0; id < n_vocab_; ++id) {
        candidates_[static_cast<size_t>(id)] = {id, logits[id], 0.0F};
    }
}

// Runs both chains over the candidates. -1: none is left; llama.cpp would compute NaN.
int32_t Sampler::choose() {
    llama_token_data_array array{candidates_.data(), candidates_.size(), -1, false};
    llama_sampler_apply(adjust_.get(), &array);
    float highest = -INFINITY;
    for (size_t i = 0; i < array.size; ++i) {
        const float logit = array.data[i].logit;
        check_biased(array.data[i].id, logit);
        highest = std::max(highest, logit);
    }
    if (highest == -INFINITY) {
        return -1;
    }
    llama_sampler_apply(select_.get(), &array);
    if (array.selected < 0 || static_cast<size_t>(array.selected) >= array.size) {
        throw std::runtime_error("llama.cpp's samplers selected no token");
    }
    return array.data[array.selected].id;
}

int32_t Sampler::choose_end(const float *logits) const {
    int32_t best = -1;
    for (int32_t id = 0; id < n_vocab_; ++id) {
        if (llama_vocab_is_eog(vocab_, id) && (best < 0 || logits[id] > logits[best])) {
            best = id;
        }
    }
    if (best < 0) {
        throw GrammarError("it is complete, but the model has no token that ends a text");
    }
    return best;
}

void bind_sampler(nanobind::module_ &m) {
    namespace nb = nanobind;
    using namespace nb::literals;
    using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    static const SamplerOptions defaults;

    nb::exception<GrammarError>(m, "GrammarError", PyExc_ValueError);
    nb::class_<Sampler>(m, "Sampler", "The state of one session's sampling.")
        .def(
            "__init__",
            [](Sampler *self, const StageModel &model, double temperature, int64_t top_k, double top_p, double min_p,
               double typical_p, double top_n_sigma, int64_t repeat_last_n, double repeat_penalty,
               double presence_penalty, double frequency_penalty, double dry_multiplier, double dry_base,
               int64_t dry_allowed_length, int64_t dry_penalty_last_n, std::vector<std::string> dry_sequence_breakers,
               double xtc_probability, double xtc_threshold, int64_t mirostat, double mirostat_tau, double mirostat_eta,
               std::vector<std::pair<int64_t, double>> logit_bias, std::string grammar, bool ignore_eos, int64_t seed) {
                const nb::gil_scoped_release no_gil;
                new (self) Sampler(model.vocab(), llama_model_n_ctx_train(model.model()),
                                   {temperature,
                                    top_k,
                                    top_p,
                                    min_p,
                                    typical_p,
                                    top_n_sigma,
                                    repeat_last_n,
                                    repeat_penalty,
                                    presence_penalty,
                                    frequency_penalty,
                                    dry_multiplier,
                                    dry_base,
                                    dry_allowed_length,
                                    dry_penalty_last_n,
                                    std::move(dry_sequence_breakers),
                                    xtc_probability,
                                    xtc_threshold,
                                    mirostat,
                                    mirostat_tau,
                                    mirostat_eta,
                                    std::move(logit_bias),
                                    std::move(grammar),
                                    ignore_eos,
                                    seed});
            },
            nb::keep_alive<1, 2>(), "model"_a, nb::kw_only(), "temperature"_a = defaults.temperature,
            "top_k"_a = defaults.top_k, "top_p"_a = defaults.top_p, "min_p"_a = defaults.min_p,
            "typical_p"_a = defaults.typical_p, "top_n_sigma"_a = defaults.top_n_sigma,
            "repeat_last_n"_a = defaults.repeat_last_n, "repeat_penalty"_a = defaults.repeat_penalty,
            "presence_penalty"_a = defaults.presence_penalty, "frequency_penalty"_a = defaults.frequency_penalty,
            "dry_multiplier"_a = defaults.dry_multiplier, "dry_base"_a = defaults.dry_base,
            "dry_allowed_length"_a = defaults.dry_allowed_length, "dry_penalty_last_n"_a = defaults.dry_penalty_last_n,
            "dry_sequence_breakers"_a = defaults.dry_sequence_breakers, "xtc_probability"_a = defaults.xtc_probability,
            "xtc_threshold"_a = defaults.xtc_threshold, "mirostat"_a = defaults.mirostat,
            "mirostat_tau"_a = defaults.mirostat_tau, "mirostat_eta"_a = defaults.mirostat_eta,
            "logit_bias"_a = defaults.logit_bias, "grammar"_a = defaults.grammar, "ignore_eos"_a = defaults.ignore_eos,
            "seed"_a, "Raise ValueError for an option out of range, GrammarError for a grammar that cannot be used.")
        .def(
            "accept",
            [](Sampler &self, const Tokens &tokens) {
                const nb::gil_scoped_release no_gil;
                self.accept(tokens.data(), tokens.size());
            },
            "tokens"_a.noconvert(), "Add int32 tokens of the prompt to the history that penalties look at.")
        .def(
            "sample",
            [](Sampler &self, const StageContext &context, int row) {
                const nb::gil_scoped_release no_gil;
                const auto n_vocab = static_cast<size_t>(llama_vocab_n_tokens(context.model().vocab()));
                return self.sample(context.logits(row), n_vocab);
            },
            "context"_a, "row"_a, "Choose a token by the logits of row `row` of the last run, accept and return it.")
        .def(
            "sample_logits",
            [](Sampler &self, const Logits &logits) {
                const nb::gil_scoped_release no_gil;
                return self.sample(logits.data(), logits.size());
            },
            "logits"_a.noconvert(), "Choose a token by float32 logits [n_vocab], accept and return it.")
        .def("fits", &Sampler::fits, "token"_a, "Whether the grammar lets `token` come next; True without a grammar.");
}

} // namespace skippy
