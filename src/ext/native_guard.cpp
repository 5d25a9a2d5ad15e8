#include "native_guard.h"

#include "llama.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace skippy {
namespace {

constexpr size_t longest_text = 2000;

thread_local int guards = 0;
thread_local std::string errors;
thread_local bool lock_failed = false;
std::atomic<int> log_level{0};

// "load_tensors: error loading model: missing tensor" keeps its last, telling part.
void remember(const char *text) {
    std::string line(text);
    while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) {
        line.pop_back();
    }
    for (const char *noise : {"failed to load model", "cancelled model load"}) {
        if (line.size() >= std::strlen(noise) &&
            line.compare(line.size() - std::strlen(noise), std::string::npos, noise) == 0) {
            return;
        }
    }
    if (!line.empty() && errors.size() + line.size() < longest_text) {
        errors += (errors.empty() ? "" : "; ") + line;
    }
}

void on_log(ggml_log_level level, const char *text, void *) {
    if (guards > 0 && level == GGML_LOG_LEVEL_ERROR) {
        remember(text);
    }
    if (guards > 0 && level == GGML_LOG_LEVEL_WARN && std::strstr(text, "failed to mlock") != nullptr) {
        lock_failed = true;
    }
    const int shown = log_level.load(std::memory_order_relaxed);
    if (shown > 0 && static_cast<int>(level) >= shown) {
        std::fputs(text, stderr);
    }
}

void on_abort(const char *message) {
    if (guards > 0) {
        throw std::runtime_error(message); // unwinds to the NativeGuard's owner; ggml would abort on return
    }
    std::fprintf(stderr, "llama.cpp aborted: %s\n", message);
}

} // namespace

void install_callbacks() {
    llama_log_set(on_log, nullptr);
    ggml_set_abort_callback(on_abort);
}

void set_log_level(int level) { log_level.store(level, std::memory_order_relaxed); }

NativeGuard::NativeGuard() {
    if (guards++ == 0) {
        errors.clear();
        lock_failed = false;
    }
}

NativeGuard::~NativeGuard() { --guards; }

bool NativeGuard::failed_to_lock() const { return lock_failed; }

std::string NativeGuard::error_text(const std::string &otherwise) { return errors.empty() ? otherwise : errors; }

} // namespace skippy
