// How a session's tokens are chosen: a chain of llama.cpp's samplers, and a grammar.
#pragma once

#include "llama.h"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace skippy {

class GrammarMatcher;

// Names, meanings and ranges are llama.cpp's (common_params_sampling). A history of -1 tokens is the model's training
// context.
struct SamplerOptions {
    double temperature = 0.0; // 0: the most likely token, by logits after bias, penalties, dry and grammar
    int64_t top_k = 40;
    double top_p = 0.95;
    double min_p = 0.05;
    double typical_p = 1.0;
    double top_n_sigma = -1.0;
    int64_t repeat_last_n = 64;
    double repeat_penalty = 1.0;
    double presence_penalty = 0.0;
    double frequency_penalty = 0.0;
    double dry_multiplier = 0.0;
    double dry_base = 1.75;
    int64_t dry_allowed_length = 2;
    int64_t dry_penalty_last_n = 64;
    std::vector<std::string> dry_sequence_breakers{"\n", ":", "\"", "*"};
    double xtc_probability = 0.0;
    double xtc_threshold = 0.1;
    int64_t mirostat = 0;
    double mirostat_tau = 5.0;
    double mirostat_eta = 0.1;
    std::vector<std::pair<int64_t, double>> logit_bias;
    std::string grammar;
    bool ignore_eos = false;
    int64_t seed = 0; // 0 .. 2^32 - 1
};

// The state of one session's sampling. Not for two threads at once.
class Sampler {
  public:
    // Throws std::invalid_argument (one line, names the option), GrammarError for the grammar. `vocab` must outlive
    // this.
    Sampler(const llama_vocab *vocab, int n_ctx_train, const SamplerOptions &options);
    ~Sampler();
    Sampler(Sampler &&) noexcept;
    Sampler &operator=(Sampler &&) noexcept;

    // Tokens of the prompt: history for the penalties, nothing to the grammar.
    void accept(const int32_t *tokens, size_t n);

    // Chooses a token by `n` logits (one per token of the vocabulary) and accepts it. Throws std::invalid_argument for
    // a wrong count, std::runtime_error for logits that are NaN or +inf or where no token is left to choose,
    // GrammarError where nothing fits the grammar.
    int32_t sample(const float *logits, size_t n);

    // Would the grammar let `token` come next? True without a grammar.
    bool fits(int32_t token);

  private:
    struct Free {
        void operator()(llama_sampler *sampler) const { llama_sampler_free(sampler); }
    };
    using Chain = std::unique_ptr<llama_sampler, Free>;

    void load(const float *logits);
    int32_t choose();
    int32_t most_likely(const float *logits);
    const float *with_bias(const float *logits, size_t first, size_t size);
    int32_t choose_end(const float *logits) const;

    const llama_vocab *vocab_;
    int32_t n_vocab_;
    Chain adjust_; // bias, penalties, dry: history matters, nothing is removed
    Chain select_; // the rest, down to one token
    std::unique_ptr<GrammarMatcher> grammar_;
    std::vector<llama_token_data> candidates_;
    // Greedy with nothing but a bias: the chains would only look for the highest logit, in ten times the time.
    bool greedy_ = false;
    std::vector<llama_logit_bias> bias_; // by token
    std::vector<float> biased_;
};

// Defines Sampler and GrammarError in the extension module.
void bind_sampler(nanobind::module_ &m);

} // namespace skippy
