#include "grammar.h"

#include <algorithm>

namespace skippy {
namespace {

// Which rules can produce the empty text.
std::vector<bool> nullable_rules(const Grammar &grammar) {
    struct Alternative {
        uint32_t rule;
        size_t open; // rules in it not known to be nullable
    };
    std::vector<bool> nullable(grammar.rules.size());
    std::vector<Alternative> alternatives;
    std::vector<std::vector<size_t>> users(grammar.rules.size());
    std::vector<uint32_t> found;
    const auto mark = [&](uint32_t rule) {
        if (!nullable[rule]) {
            nullable[rule] = true;
            found.push_back(rule);
        }
    };
    for (uint32_t rule = 0; rule < grammar.rules.size(); rule++) {
        for (uint32_t start : grammar.rules[rule]) {
            uint32_t end = start;
            while (grammar.elements[end].kind == GrammarElement::Rule) {
                end++;
            }
            if (grammar.elements[end].kind != GrammarElement::End) {
                continue;
            }
            for (uint32_t i = start; i < end; i++) {
                users[grammar.elements[i].value].push_back(alternatives.size());
            }
            alternatives.push_back({rule, end - start});
            if (start == end) {
                mark(rule);
            }
        }
    }
    while (!found.empty()) {
        const uint32_t rule = found.back();
        found.pop_back();
        for (size_t user : users[rule]) {
            if (--alternatives[user].open == 0) {
                mark(alternatives[user].rule);
            }
        }
    }
    return nullable;
}

} // namespace

void refuse_left_recursion(const Grammar &grammar) {
    const std::vector<bool> nullable = nullable_rules(grammar);
    const auto n_rules = uint32_t(grammar.rules.size());
    struct Edge {
        uint32_t to;
        bool grows;
    };
    std::vector<std::vector<Edge>> edges(n_rules);
    for (uint32_t rule = 0; rule < n_rules; rule++) {
        for (uint32_t at : grammar.rules[rule]) {
            for (; grammar.elements[at].kind == GrammarElement::Rule; at++) {
                const uint32_t to = grammar.elements[at].value;
                edges[rule].push_back({to, grammar.elements[at + 1].kind != GrammarElement::End});
                if (!nullable[to]) {
                    break;
                }
            }
        }
    }
    // Tarjan's strongly connected components, with a stack of our own: chains of rules can be long.
    constexpr uint32_t UNSEEN = UINT32_MAX;
    std::vector<uint32_t> order(n_rules, UNSEEN), low(n_rules), component(n_rules, UNSEEN), open;
    std::vector<std::pair<uint32_t, size_t>> path;
    uint32_t n_seen = 0, n_components = 0;
    const auto enter = [&](uint32_t rule) {
        order[rule] = low[rule] = n_seen++;
        open.push_back(rule);
        path.emplace_back(rule, 0);
    };
    for (uint32_t first = 0; first < n_rules; first++) {
        if (order[first] != UNSEEN) {
            continue;
        }
        enter(first);
        while (!path.empty()) {
            const uint32_t rule = path.back().first;
            if (path.back().second < edges[rule].size()) {
                const uint32_t to = edges[rule][path.back().second++].to;
                if (order[to] == UNSEEN) {
                    enter(to);
                } else if (component[to] == UNSEEN) {
                    low[rule] = std::min(low[rule], order[to]);
                }
                continue;
            }
            path.pop_back();
            if (!path.empty()) {
                low[path.back().first] = std::min(low[path.back().first], low[rule]);
            }
            if (low[rule] != order[rule]) {
                continue;
            }
            uint32_t member;
            do {
                member = open.back();
                open.pop_back();
                component[member] = n_components;
            } while (member != rule);
            n_components++;
        }
    }
    for (uint32_t rule = 0; rule < n_rules; rule++) {
        for (const Edge &edge : edges[rule]) {
            if (edge.grows && component[rule] == component[edge.to]) {
                throw GrammarError("left recursion: a rule begins with itself; put the repetition behind (a*, a+)");
            }
        }
    }
}

} // namespace skippy
