#include "grammar.h"

#include <algorithm>
#include <string_view>
#include <unordered_set>

namespace skippy {
namespace {

// Remembered sets and steps are dropped, all but the current one, when they outgrow this.
constexpr size_t MAX_REMEMBERED = 2'000'000;
// Work for one step from one set, so that a single hopeless token does not eat the whole allowance.
constexpr size_t MAX_STEP_WORK = 16 * MAX_GRAMMAR_STACKS;
constexpr int MAX_UNION_DEPTH = 2000; // of the recursion; where parses differ that far below, it gives up

struct Lead {
    int length; // bytes of the character, 0: cannot begin one
    uint32_t bits;
};

Lead lead_byte(uint8_t byte) {
    if (byte < 0x80) {
        return {1, byte};
    }
    if (byte >= 0xC2 && byte < 0xE0) {
        return {2, byte & 0x1Fu};
    }
    if (byte >= 0xE0 && byte < 0xF0) {
        return {3, byte & 0x0Fu};
    }
    if (byte >= 0xF0 && byte < 0xF5) {
        return {4, byte & 0x07u};
    }
    return {0, 0};
}

constexpr uint32_t SMALLEST[] = {0, 0, 0x80, 0x800, 0x10000}; // by length: anything lower is not valid UTF-8

bool stands_for(const GrammarElement &element, int32_t token) {
    const bool same = element.value == static_cast<uint32_t>(token);
    return (element.kind == GrammarElement::Token && same) || (element.kind == GrammarElement::NotToken && !same);
}

bool valid_code_point(uint32_t value, int length) {
    const bool surrogate = value >= 0xD800 && value < 0xE000;
    return !surrogate && value >= SMALLEST[length] && value <= 0x10FFFF;
}

} // namespace

GrammarMatcher::GrammarMatcher(Grammar grammar, TokenPieces pieces)
    : grammar_(std::move(grammar)), pieces_(std::move(pieces)) {
    // Code points that no set of the grammar tells apart form one class.
    class_starts_.push_back(0);
    for (const CodePointSet &set : grammar_.sets) {
        for (const auto &[low, high] : set) {
            class_starts_.push_back(low);
            class_starts_.push_back(high + 1);
        }
    }
    std::sort(class_starts_.begin(), class_starts_.end());
    class_starts_.erase(std::unique(class_starts_.begin(), class_starts_.end()), class_starts_.end());
    for (const CodePointSet &set : grammar_.sets) {
        auto &ranges = classes_.emplace_back();
        for (const auto &[low, high] : set) {
            ranges.emplace_back(class_of(low), class_of(high));
        }
    }
    restart();
    std::vector<Set> start;
    for (uint32_t alternative : grammar_.rules[grammar_.root]) {
        const bool empty = grammar_.elements[alternative].kind == GrammarElement::End;
        start.push_back(empty ? BOTTOM : intern({{alternative, BOTTOM}}));
    }
    current_ = expand(start);
    if (current_ == TOO_MANY) {
        throw GrammarError("too ambiguous: more ways to begin than can be followed");
    }
    if (current_ == DEAD) {
        throw GrammarError("it matches no text at all");
    }
    steps_ = 0;
}

void GrammarMatcher::restart() {
    sets_.clear();
    set_ids_.clear();
    unions_.clear();
    remembered_ = 0;
    intern({});             // DEAD
    intern({{DONE, DEAD}}); // BOTTOM
}

void GrammarMatcher::spend(size_t steps) {
    steps_ += steps;
    if (steps_ > MAX_GRAMMAR_STEPS) {
        throw GrammarError("too ambiguous: one token takes too long to match");
    }
}

uint32_t GrammarMatcher::class_of(uint32_t code_point) const {
    const auto next = std::upper_bound(class_starts_.begin(), class_starts_.end(), code_point);
    return static_cast<uint32_t>(next - class_starts_.begin()) - 1;
}

bool GrammarMatcher::has_code_point(uint32_t code_points, uint32_t code_point_class) const {
    const auto &ranges = classes_[code_points];
    const auto next = std::upper_bound(ranges.begin(), ranges.end(), std::make_pair(code_point_class, UINT32_MAX));
    return next != ranges.begin() && code_point_class <= std::prev(next)->second;
}

GrammarMatcher::Set GrammarMatcher::intern(Entries entries) {
    static_assert(sizeof(Entry) == 8, "no padding in the key");
    std::string key(reinterpret_cast<const char *>(entries.data()), entries.size() * sizeof(Entry));
    const auto known = set_ids_.find(key);
    if (known != set_ids_.end()) {
        return known->second;
    }
    spend(1 + entries.size());
    const auto id = static_cast<Set>(sets_.size());
    remembered_ += 8 + 4 * entries.size();
    sets_.push_back({std::move(entries), {}});
    set_ids_.emplace(std::move(key), id);
    return id;
}

// All stacks of both sets.
GrammarMatcher::Set GrammarMatcher::unite(Set a, Set b, int depth) {
    if (a == b || b == DEAD) {
        return a;
    }
    if (a == DEAD) {
        return b;
    }
    if (depth > MAX_UNION_DEPTH) {
        throw TooManyStacks();
    }
    const uint64_t key = static_cast<uint64_t>(std::min(a, b)) << 32 | std::max(a, b);
    const auto known = unions_.find(key);
    if (known != unions_.end()) {
        return known->second;
    }
    const Entries left = sets_[a].entries, right = sets_[b].entries; // copies: interning moves the table
    spend(left.size() + right.size());
    Entries both;
    auto l = left.begin(), r = right.begin();
    while (l != left.end() || r != right.end()) {
        if (r == right.end() || (l != left.end() && l->element < r->element)) {
            both.push_back(*l++);
        } else if (l == left.end() || r->element < l->element) {
            both.push_back(*r++);
        } else {
            both.push_back({l->element, unite(l->below, r->below, depth + 1)});
            ++l;
            ++r;
        }
    }
    const Set united = intern(std::move(both));
    unions_.emplace(key, united);
    remembered_ += 8;
    return united;
}

// What is to come once the top element of a stack is done.
GrammarMatcher::Set GrammarMatcher::after(const Entry &entry) {
    const bool last = grammar_.elements[entry.element + 1].kind == GrammarElement::End;
    return last ? entry.below : intern({{entry.element + 1, entry.below}});
}

// Replaces rules on top by their alternatives until every stack has something to match on top, or is done.
GrammarMatcher::Set GrammarMatcher::expand(const std::vector<Set> &sets) {
    std::vector<Entry> todo, ready;
    std::unordered_set<uint64_t> seen;
    const auto visit = [&](const Entry &entry) {
        spend(1);
        if (seen.insert(static_cast<uint64_t>(entry.element) << 32 | entry.below).second) {
            todo.push_back(entry);
        }
    };
    const auto visit_all = [&](Set set) {
        for (const Entry &entry : sets_[set].entries) {
            visit(entry);
        }
    };
    for (Set set : sets) {
        visit_all(set);
    }
    while (!todo.empty()) {
        const Entry entry = todo.back();
        todo.pop_back();
        if (seen.size() > MAX_STEP_WORK) {
            return TOO_MANY;
        }
        if (entry.element == DONE || grammar_.elements[entry.element].kind != GrammarElement::Rule) {
            ready.push_back(entry);
            if (ready.size() > MAX_GRAMMAR_STACKS) {
                return TOO_MANY;
            }
            continue;
        }
        const Set then = after(entry);
        for (uint32_t alternative : grammar_.rules[grammar_.elements[entry.element].value]) {
            if (grammar_.elements[alternative].kind == GrammarElement::End) {
                visit_all(then);
            } else {
                visit({alternative, then});
            }
        }
    }
    std::sort(ready.begin(), ready.end(), [](const Entry &a, const Entry &b) {
        return a.element != b.element ? a.element < b.element : a.below < b.below;
    });
    Entries merged;
    try {
        for (const Entry &entry : ready) {
            if (!merged.empty() && merged.back().element == entry.element) {
                merged.back().below = unite(merged.back().below, entry.below, 0);
            } else {
                merged.push_back(entry);
            }
        }
    } catch (const TooManyStacks &) {
        return TOO_MANY;
    }
    return intern(std::move(merged));
}

GrammarMatcher::Set GrammarMatcher::step(Set from, uint32_t code_point) {
    const uint32_t code_point_class = class_of(code_point);
    if (sets_[from].next.empty()) {
        spend(class_starts_.size() / 4);
        sets_[from].next.assign(class_starts_.size(), UNKNOWN);
        remembered_ += class_starts_.size();
    }
    if (sets_[from].next[code_point_class] != UNKNOWN) {
        return sets_[from].next[code_point_class];
    }
    const Entries entries = sets_[from].entries; // a copy: interning moves the table
    spend(entries.size());
    std::vector<Set> moved;
    for (const Entry &entry : entries) {
        if (entry.element == DONE) {
            continue;
        }
        const GrammarElement top = grammar_.elements[entry.element];
        if (top.kind == GrammarElement::Chars && has_code_point(top.value, code_point_class)) {
            moved.push_back(after(entry));
        }
    }
    const Set to = moved.empty() ? DEAD : expand(moved);
    sets_[from].next[code_point_class] = to;
    return to;
}

// The set after an element that stands for the whole token.
GrammarMatcher::Set GrammarMatcher::step_token(Set from, int32_t token) {
    const Entries entries = sets_[from].entries;
    std::vector<Set> moved;
    for (const Entry &entry : entries) {
        if (entry.element != DONE && stands_for(grammar_.elements[entry.element], token)) {
            moved.push_back(after(entry));
        }
    }
    return moved.empty() ? DEAD : expand(moved);
}

// The set after the characters of `token`; `partial` is the incomplete character before it and becomes the one after.
GrammarMatcher::Set GrammarMatcher::walk(Set set, int32_t token, PartialChar &partial) {
    const uint32_t end = pieces_.offsets[static_cast<size_t>(token) + 1];
    for (uint32_t i = pieces_.offsets[static_cast<size_t>(token)]; i < end; ++i) {
        const auto byte = static_cast<uint8_t>(pieces_.bytes[i]);
        if (partial.missing == 0) {
            const Lead lead = lead_byte(byte);
            if (lead.length == 0) {
                return DEAD;
            }
            partial = {lead.bits, lead.length - 1, lead.length};
        } else if ((byte & 0xC0) == 0x80) {
            partial.value = partial.value << 6 | (byte & 0x3F);
            partial.missing--;
        } else {
            return DEAD;
        }
        if (partial.missing == 0) {
            set = valid_code_point(partial.value, partial.length) ? step(set, partial.value) : DEAD;
            if (set == DEAD || set == TOO_MANY) {
                return set;
            }
        }
    }
    return partial.missing == 0 || partial_fits(set, partial) ? set : DEAD;
}

// Can some completion of the character come next?
bool GrammarMatcher::partial_fits(Set set, const PartialChar &partial) const {
    const uint32_t span = 1u << (6 * partial.missing);
    const uint32_t low = std::max(partial.value * span, SMALLEST[partial.length]);
    const uint32_t high = std::min(partial.value * span + span - 1, 0x10FFFFu);
    if (low > high || (low >= 0xD800 && high < 0xE000)) {
        return false;
    }
    const uint32_t first = class_of(low), last = class_of(high);
    for (const Entry &entry : sets_[set].entries) {
        if (entry.element == DONE || grammar_.elements[entry.element].kind != GrammarElement::Chars) {
            continue;
        }
        for (const auto &[from, to] : classes_[grammar_.elements[entry.element].value]) {
            if (from <= last && first <= to) {
                return true;
            }
        }
    }
    return false;
}

bool GrammarMatcher::token_fits(Set set, int32_t token) const {
    for (const Entry &entry : sets_[set].entries) {
        if (entry.element != DONE && stands_for(grammar_.elements[entry.element], token)) {
            return is_text(token);
        }
    }
    return false;
}

// Is the token's piece whole characters?
bool GrammarMatcher::is_text(int32_t token) const {
    const uint32_t end = pieces_.offsets[static_cast<size_t>(token) + 1];
    for (uint32_t i = pieces_.offsets[static_cast<size_t>(token)]; i < end;) {
        const Lead lead = lead_byte(static_cast<uint8_t>(pieces_.bytes[i]));
        if (lead.length == 0 || i + static_cast<uint32_t>(lead.length) > end) {
            return false;
        }
        uint32_t value = lead.bits;
        for (int k = 1; k < lead.length; ++k) {
            const auto byte = static_cast<uint8_t>(pieces_.bytes[i + static_cast<uint32_t>(k)]);
            if ((byte & 0xC0) != 0x80) {
                return false;
            }
            value = value << 6 | (byte & 0x3F);
        }
        if (!valid_code_point(value, lead.length)) {
            return false;
        }
        i += static_cast<uint32_t>(lead.length);
    }
    return true;
}

bool GrammarMatcher::may_end(Set set) const {
    return !sets_[set].entries.empty() && sets_[set].entries.back().element == DONE; // DONE sorts last
}

bool GrammarMatcher::complete() const { return partial_.missing == 0 && current_ == BOTTOM; }

bool GrammarMatcher::allows(int32_t token) {
    if (pieces_.ends[static_cast<size_t>(token)]) {
        return partial_.missing == 0 && may_end(current_);
    }
    const uint32_t start = pieces_.offsets[static_cast<size_t>(token)];
    const uint32_t end = pieces_.offsets[static_cast<size_t>(token) + 1];
    const std::string_view piece(pieces_.bytes.data() + start, end - start);
    if (piece.empty() || piece.find('\0') != std::string_view::npos) {
        return false;
    }
    if (partial_.missing == 0 && token_fits(current_, token)) {
        return true;
    }
    PartialChar partial = partial_;
    const Set after = walk(current_, token, partial);
    return after != DEAD && after != TOO_MANY;
}

void GrammarMatcher::accept(int32_t token) {
    steps_ = 0;
    if (!allows(token)) {
        throw GrammarError("token " + std::to_string(token) + " does not fit");
    }
    if (pieces_.ends[static_cast<size_t>(token)]) {
        return;
    }
    PartialChar partial = partial_;
    Set next = walk(current_, token, partial);
    if (partial_.missing == 0 && token_fits(current_, token)) {
        // Taken as a whole, and by its characters where those fit too.
        const Set whole = step_token(current_, token);
        partial = {};
        next = next == DEAD || next == TOO_MANY || whole == TOO_MANY ? whole : expand({whole, next});
    }
    if (next == TOO_MANY) {
        throw GrammarError("too ambiguous: more parses than can be followed");
    }
    current_ = next;
    partial_ = partial;
    steps_ = 0;
    if (remembered_ > MAX_REMEMBERED) {
        forget();
        steps_ = 0;
    }
}

// Starts the tables anew with the current set only.
void GrammarMatcher::forget() {
    const std::vector<SetData> sets = std::move(sets_);
    std::vector<bool> used(sets.size());
    used[current_] = true;
    for (Set set = static_cast<Set>(sets.size()) - 1; set > BOTTOM; --set) { // what lies below has a lower number
        if (used[set]) {
            for (const Entry &entry : sets[set].entries) {
                used[entry.below] = true;
            }
        }
    }
    restart();
    std::vector<Set> renamed(sets.size(), DEAD);
    renamed[BOTTOM] = BOTTOM;
    for (Set set = BOTTOM + 1; set < sets.size(); ++set) {
        if (used[set]) {
            steps_ = 0; // no work of the request's
            Entries entries = sets[set].entries;
            for (Entry &entry : entries) {
                entry.below = renamed[entry.below];
            }
            renamed[set] = intern(std::move(entries));
        }
    }
    current_ = renamed[current_];
}

} // namespace skippy
