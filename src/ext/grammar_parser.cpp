#include "grammar.h"

#include <algorithm>
#include <map>

namespace skippy {
namespace {

constexpr uint32_t MAX_CODE_POINT = 0x10FFFF;
constexpr uint64_t UNBOUNDED = UINT64_MAX;

bool is_word(char c) { return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || ('0' <= c && c <= '9') || c == '-'; }
bool is_digit(char c) { return '0' <= c && c <= '9'; }

CodePointSet normalized(CodePointSet set, bool negated) {
    std::sort(set.begin(), set.end());
    CodePointSet merged;
    for (const auto &[low, high] : set) {
        if (!merged.empty() && low <= merged.back().second + 1) {
            merged.back().second = std::max(merged.back().second, high);
        } else {
            merged.emplace_back(low, high);
        }
    }
    if (!negated) {
        return merged;
    }
    CodePointSet rest;
    uint32_t low = 0;
    for (const auto &range : merged) {
        if (range.first > low) {
            rest.emplace_back(low, range.first - 1);
        }
        low = range.second + 1;
    }
    if (low <= MAX_CODE_POINT) {
        rest.emplace_back(low, MAX_CODE_POINT);
    }
    return rest;
}

class Parser {
  public:
    Parser(const std::string &text, const TokenNames &tokens) : text_(text), tokens_(tokens) {}

    Grammar parse() {
        skip_space(true);
        while (peek()) {
            rule();
        }
        if (rule_ids_.find("root") == rule_ids_.end()) {
            throw GrammarError("there is no rule named root");
        }
        for (const auto &[name, id] : rule_ids_) {
            if (!defined_[id]) {
                throw GrammarError("rule " + name + " is used but not defined");
            }
        }
        grammar_.root = rule_ids_.at("root");
        return std::move(grammar_);
    }

  private:
    using Sequence = std::vector<GrammarElement>;

    char peek(size_t ahead = 0) const { return pos_ + ahead < text_.size() ? text_[pos_ + ahead] : '\0'; }

    [[noreturn]] void fail(const std::string &what) const {
        const auto line = 1 + std::count(text_.begin(), text_.begin() + std::min(pos_, text_.size()), '\n');
        throw GrammarError("line " + std::to_string(line) + ": " + what);
    }

    void skip_space(bool newlines) {
        while (char c = peek()) {
            if (c == '#') {
                while (peek() && peek() != '\n' && peek() != '\r') {
                    pos_++;
                }
            } else if (c == ' ' || c == '\t' || (newlines && (c == '\n' || c == '\r'))) {
                pos_++;
            } else {
                return;
            }
        }
    }

    std::string name() {
        const size_t start = pos_;
        while (is_word(peek())) {
            pos_++;
        }
        if (pos_ == start) {
            fail("wanted a rule name");
        }
        return text_.substr(start, pos_ - start);
    }

    uint64_t number() {
        if (!is_digit(peek())) {
            fail("wanted a number");
        }
        uint64_t value = 0;
        while (is_digit(peek())) {
            value = std::min<uint64_t>(value * 10 + (text_[pos_++] - '0'), UINT32_MAX);
        }
        return value;
    }

    uint32_t hex(int digits) {
        uint32_t value = 0;
        for (int i = 0; i < digits; i++) {
            const char c = peek();
            const int digit = is_digit(c)            ? c - '0'
                              : 'a' <= c && c <= 'f' ? c - 'a' + 10
                              : 'A' <= c && c <= 'F' ? c - 'A' + 10
                                                     : -1;
            if (digit < 0) {
                fail("wanted " + std::to_string(digits) + " hex digits");
            }
            value = value * 16 + uint32_t(digit);
            pos_++;
        }
        if (value > MAX_CODE_POINT) {
            fail("there is no such character");
        }
        return value;
    }

    uint32_t character() {
        const auto lead = uint8_t(peek());
        if (!lead) {
            fail("the text ends inside a literal");
        }
        pos_++;
        if (lead == '\\') {
            const char escape = peek();
            if (escape) {
                pos_++;
            }
            switch (escape) {
            case 'x':
                return hex(2);
            case 'u':
                return hex(4);
            case 'U':
                return hex(8);
            case 't':
                return '\t';
            case 'r':
                return '\r';
            case 'n':
                return '\n';
            case '\\':
            case '"':
            case '[':
            case ']':
            case '-':
                return uint8_t(escape);
            default:
                fail("unknown escape");
            }
        }
        if (lead < 0x80) {
            return lead;
        }
        const int more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : lead >= 0xC0 ? 1 : 0;
        uint32_t value = lead & (0x3F >> more);
        for (int i = 0; i < more; i++) {
            if ((uint8_t(peek()) & 0xC0) != 0x80) {
                fail("the text is not UTF-8");
            }
            value = value << 6 | (uint8_t(text_[pos_++]) & 0x3F);
        }
        if (!more || value > MAX_CODE_POINT) {
            fail("the text is not UTF-8");
        }
        return value;
    }

    uint32_t rule_id(const std::string &rule_name) {
        const auto [it, is_new] = rule_ids_.emplace(rule_name, uint32_t(grammar_.rules.size()));
        if (is_new) {
            new_rule(false);
        }
        return it->second;
    }

    uint32_t new_rule(bool is_defined) {
        grammar_.rules.emplace_back();
        defined_.push_back(is_defined);
        return uint32_t(grammar_.rules.size() - 1);
    }

    void add_alternative(uint32_t rule, const Sequence &sequence) {
        count_elements(sequence.size() + 1);
        grammar_.rules[rule].push_back(uint32_t(grammar_.elements.size()));
        grammar_.elements.insert(grammar_.elements.end(), sequence.begin(), sequence.end());
        grammar_.elements.push_back({GrammarElement::End, 0});
    }

    void count_elements(uint64_t more) {
        n_elements_ += more;
        if (n_elements_ > MAX_GRAMMAR_ELEMENTS) {
            fail("more than " + std::to_string(MAX_GRAMMAR_ELEMENTS) + " elements once repetitions are written out");
        }
    }

    GrammarElement chars(CodePointSet set, bool negated) {
        set = normalized(std::move(set), negated);
        const auto [it, is_new] = set_ids_.emplace(set, uint32_t(grammar_.sets.size()));
        if (is_new) {
            grammar_.sets.push_back(std::move(set));
        }
        return {GrammarElement::Chars, it->second};
    }

    void rule() {
        const uint32_t id = rule_id(name());
        skip_space(false);
        if (text_.compare(pos_, 3, "::=") != 0) {
            fail("wanted ::= after the rule name");
        }
        pos_ += 3;
        skip_space(true);
        grammar_.rules[id].clear(); // a later definition replaces an earlier one, as in llama.cpp
        defined_[id] = true;
        alternatives(id, 0);
        if (peek() && peek() != '\n' && peek() != '\r') {
            fail("wanted a new line after the rule");
        }
        skip_space(true);
    }

    void alternatives(uint32_t rule, int depth) {
        if (depth > MAX_GRAMMAR_NESTING) {
            fail("parentheses more than " + std::to_string(MAX_GRAMMAR_NESTING) + " deep");
        }
        add_alternative(rule, sequence(depth));
        while (peek() == '|') {
            pos_++;
            skip_space(true);
            add_alternative(rule, sequence(depth));
        }
    }

    Sequence sequence(int depth) {
        Sequence out;
        size_t last = 0; // where the item begins that a repetition applies to
        while (char c = peek()) {
            if (c == '*' || c == '+' || c == '?' || c == '{') {
                repeat(out, last, depth > 0);
                continue;
            }
            if (c != '"' && c != '[' && c != '<' && c != '!' && c != '(' && c != '.' && !is_word(c)) {
                break;
            }
            last = out.size();
            if (c == '"') {
                pos_++;
                while (peek() != '"') {
                    const uint32_t code_point = character();
                    out.push_back(chars({{code_point, code_point}}, false));
                }
                pos_++;
            } else if (c == '[') {
                out.push_back(char_class());
            } else if (c == '<' || c == '!') {
                out.push_back(token());
            } else if (c == '(') {
                pos_++;
                skip_space(true);
                const uint32_t id = new_rule(true);
                alternatives(id, depth + 1);
                if (peek() != ')') {
                    fail("wanted )");
                }
                pos_++;
                out.push_back({GrammarElement::Rule, id});
            } else if (c == '.') {
                pos_++;
                out.push_back(chars({}, true));
            } else {
                out.push_back({GrammarElement::Rule, rule_id(name())});
            }
            skip_space(depth > 0);
        }
        return out;
    }

    GrammarElement char_class() {
        pos_++;
        const bool negated = peek() == '^';
        if (negated) {
            pos_++;
        }
        CodePointSet set;
        while (peek() != ']') {
            const uint32_t low = character();
            uint32_t high = low;
            if (peek() == '-' && peek(1) != ']') {
                pos_++;
                high = character();
            }
            if (high < low) {
                fail("a character range is the wrong way round");
            }
            set.emplace_back(low, high);
        }
        if (set.empty()) {
            fail("an empty character class");
        }
        pos_++;
        return chars(std::move(set), negated);
    }

    GrammarElement token() {
        const auto kind = peek() == '!' ? GrammarElement::NotToken : GrammarElement::Token;
        if (kind == GrammarElement::NotToken) {
            pos_++;
        }
        if (peek() != '<') {
            fail("wanted < after !");
        }
        if (peek(1) == '[') {
            pos_ += 2;
            const uint64_t id = number();
            if (peek() != ']' || peek(1) != '>') {
                fail("wanted ]> after the token id");
            }
            pos_ += 2;
            if (id >= uint64_t(tokens_.n_vocab)) {
                fail("token " + std::to_string(id) + ": the vocabulary has " + std::to_string(tokens_.n_vocab));
            }
            return {kind, uint32_t(id)};
        }
        const size_t end = text_.find('>', pos_);
        if (end == std::string::npos) {
            fail("wanted > after the token");
        }
        const int32_t id = tokens_.find(text_.substr(pos_, end + 1 - pos_));
        if (id < 0) {
            fail("<...> is not one token of the vocabulary");
        }
        pos_ = end + 1;
        return {kind, uint32_t(id)};
    }

    // Writes S{m,n} as m times S, then n - m rules of the form "S rest or nothing"; S{m,} ends in a rule that repeats.
    void repeat(Sequence &out, size_t last, bool newlines) {
        if (last == out.size()) {
            fail("a repetition of nothing");
        }
        uint64_t least = 0, most = UNBOUNDED;
        switch (text_[pos_++]) {
        case '+':
            least = 1;
            break;
        case '?':
            most = 1;
            break;
        case '{':
            skip_space(newlines);
            least = most = number();
            skip_space(newlines);
            if (peek() == ',') {
                pos_++;
                skip_space(newlines);
                most = is_digit(peek()) ? number() : UNBOUNDED;
                skip_space(newlines);
            }
            if (peek() != '}') {
                fail("wanted } after a repetition");
            }
            pos_++;
            break;
        default:
            break;
        }
        skip_space(newlines);
        if (most < least) {
            fail("a repetition with more at least than at most");
        }

        GrammarElement item = out[last];
        if (out.size() - last > 1) {
            const uint32_t id = new_rule(true);
            add_alternative(id, {out.begin() + std::ptrdiff_t(last), out.end()});
            item = {GrammarElement::Rule, id};
        }
        out.resize(last);
        const uint64_t optional = most == UNBOUNDED ? 1 : most - least;
        count_elements(least + 3 * optional); // before anything is made
        out.insert(out.end(), least, item);
        uint32_t rest = 0;
        for (uint64_t i = 0; i < optional; i++) {
            const uint32_t id = new_rule(true);
            Sequence again{item};
            if (most == UNBOUNDED) {
                again.push_back({GrammarElement::Rule, id});
            }
            if (i > 0) {
                again.push_back({GrammarElement::Rule, rest});
            }
            add_alternative(id, again);
            add_alternative(id, {});
            rest = id;
        }
        if (optional) {
            out.push_back({GrammarElement::Rule, rest});
        }
    }

    const std::string &text_;
    const TokenNames &tokens_;
    size_t pos_ = 0;
    uint64_t n_elements_ = 0;
    Grammar grammar_;
    std::map<std::string, uint32_t> rule_ids_;
    std::map<CodePointSet, uint32_t> set_ids_;
    std::vector<bool> defined_;
};

} // namespace

Grammar Grammar::parse(const std::string &text, const TokenNames &tokens) {
    if (text.size() > MAX_GRAMMAR_BYTES) {
        throw GrammarError(std::to_string(text.size()) + " bytes; at most " + std::to_string(MAX_GRAMMAR_BYTES));
    }
    if (text.find('\0') != std::string::npos) {
        throw GrammarError("the text holds a NUL character");
    }
    Grammar grammar = Parser(text, tokens).parse();
    refuse_left_recursion(grammar);
    return grammar;
}

} // namespace skippy
