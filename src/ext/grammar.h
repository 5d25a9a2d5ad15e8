// Grammars in llama.cpp's GBNF, parsed and matched with hard limits on time and memory.
//
// Why not llama_sampler_init_grammar: a request's grammar is hostile input, and llama.cpp's engine does not return from
// "a"{5,3}, follows every parse on its own (in an expression grammar whose alternatives are not factored out, each open
// parenthesis multiplies them), recurses as deep as the text nests, and aborts or throws where a token does not fit.
// The language is the same; where both take a grammar, the same tokens are allowed, except that no text can come out
// that is not UTF-8 or ends inside a character.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace skippy {

// The grammar text is wrong, too large or too ambiguous, or nothing can continue it. The request fails, nothing else.
class GrammarError : public std::invalid_argument {
  public:
    explicit GrammarError(const std::string &what) : std::invalid_argument("grammar: " + what) {}
};

constexpr size_t MAX_GRAMMAR_BYTES = 64 * 1024;
constexpr size_t MAX_GRAMMAR_ELEMENTS = 128 * 1024; // repetitions written out
constexpr int MAX_GRAMMAR_NESTING = 128;            // parentheses
constexpr size_t MAX_GRAMMAR_STACKS = 4096;         // different tops and depths of parses, at one character
constexpr size_t MAX_GRAMMAR_STEPS = 2'000'000;     // work for one token; about 0.2 s

// What the parser needs to know of a vocabulary: `<name>` to a token id (-1: not one token), and how many there are.
struct TokenNames {
    std::function<int32_t(const std::string &)> find;
    int32_t n_vocab = 0;
};

// The pieces of a whole vocabulary, one after the other. Piece i is bytes[offsets[i] .. offsets[i + 1]).
struct TokenPieces {
    std::string bytes;
    std::vector<uint32_t> offsets;
    std::vector<bool> ends; // end-of-generation tokens
};

struct GrammarElement {
    enum Kind : uint8_t { End, Chars, Rule, Token, NotToken };
    Kind kind;
    uint32_t value; // Chars: index of a set; Rule: index of a rule; Token, NotToken: token id
};

using CodePointRange = std::pair<uint32_t, uint32_t>; // both included
using CodePointSet = std::vector<CodePointRange>;     // sorted, disjoint

// A parsed grammar. Rules are lists of alternatives; an alternative is where its elements start in `elements`, and an
// End element closes it.
struct Grammar {
    std::vector<GrammarElement> elements;
    std::vector<std::vector<uint32_t>> rules;
    std::vector<CodePointSet> sets;
    uint32_t root = 0;

    // Throws GrammarError for anything that cannot be matched in bounded steps, left recursion included.
    static Grammar parse(const std::string &text, const TokenNames &tokens);
};

// Throws GrammarError for rules that come back to themselves before any character, with something left to do
// afterwards: such a parse grows without end. (Coming back with nothing left, as in (a*)*, is the same parse again and
// harmless.)
void refuse_left_recursion(const Grammar &grammar);

// Follows one text through a grammar. A parse in progress is a stack of elements still to come. All stacks of a moment
// form a set, and sets are stored as tries that share their parts: a set lists its top elements and, for each, the set
// of stacks below. So the many stacks of an ambiguous grammar, which mostly differ far below, stay few entries. Sets
// are numbered, and steps between them are remembered: matching a vocabulary walks an automaton that is built as
// needed.
class GrammarMatcher {
  public:
    GrammarMatcher(Grammar grammar, TokenPieces pieces);

    // May `token` come next? No, where following its text would exceed MAX_GRAMMAR_STACKS.
    // Throws GrammarError when the calls since the last accept took more than MAX_GRAMMAR_STEPS.
    bool allows(int32_t token);
    // Nothing but the end may come next.
    bool complete() const;
    // Moves on by `token`. Throws GrammarError when it is not allowed.
    void accept(int32_t token);

  private:
    using Set = uint32_t;
    struct Entry {
        uint32_t element; // DONE: nothing is to come
        Set below;        // of a lower number than the set it stands in
    };
    using Entries = std::vector<Entry>; // sorted by element, each once
    struct SetData {
        Entries entries;
        std::vector<Set> next; // by class of code point; UNKNOWN until first needed; empty until one is
    };
    struct PartialChar { // an incomplete UTF-8 sequence: its value so far, bytes still to come
        uint32_t value = 0;
        int missing = 0;
        int length = 0;
    };
    struct TooManyStacks {};
    static constexpr uint32_t DONE = UINT32_MAX;
    static constexpr Set DEAD = 0;   // no stack at all
    static constexpr Set BOTTOM = 1; // the stack on which nothing is left
    static constexpr Set UNKNOWN = UINT32_MAX, TOO_MANY = UINT32_MAX - 1;

    Set intern(Entries entries);
    Set unite(Set a, Set b, int depth);
    Set after(const Entry &entry);
    Set expand(const std::vector<Set> &sets);
    Set step(Set from, uint32_t code_point);
    Set step_token(Set from, int32_t token);
    Set walk(Set from, int32_t token, PartialChar &partial);
    bool partial_fits(Set set, const PartialChar &partial) const;
    bool token_fits(Set set, int32_t token) const;
    bool is_text(int32_t token) const;
    bool may_end(Set set) const;
    bool has_code_point(uint32_t code_points, uint32_t code_point_class) const;
    uint32_t class_of(uint32_t code_point) const;
    void spend(size_t steps);
    void restart();
    void forget();

    Grammar grammar_;
    TokenPieces pieces_;
    std::vector<uint32_t> class_starts_;                              // first code point of every class
    std::vector<std::vector<std::pair<uint32_t, uint32_t>>> classes_; // per set of code points: ranges of classes
    std::vector<SetData> sets_;
    std::unordered_map<std::string, Set> set_ids_; // by the bytes of the entries
    std::unordered_map<uint64_t, Set> unions_;
    size_t remembered_ = 0; // entries and steps in all of these
    size_t steps_ = 0;
    Set current_ = DEAD;
    PartialChar partial_;
};

} // namespace skippy
