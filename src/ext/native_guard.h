// llama.cpp reports by logging and, on some bad inputs, by aborting the process. Both become exceptions here.
#pragma once

#include <string>

namespace skippy {

// Installs the log and abort callbacks; called when the extension is imported and, since the log callback is one per
// process and others (llama-cpp-python) set it too, again before a model or context is opened.
void install_callbacks();

// Messages below this ggml log level are dropped, the others go to stderr: 0 none, 1 debug, 2 info, 3 warn, 4 error.
void set_log_level(int level);

// While one lives, an abort on this thread throws std::runtime_error instead, and errors logged by this thread are
// kept.
class NativeGuard {
  public:
    NativeGuard();
    ~NativeGuard();
    NativeGuard(const NativeGuard &) = delete;
    NativeGuard &operator=(const NativeGuard &) = delete;

    // Whether llama.cpp warned that memory could not be locked.
    bool failed_to_lock() const;

    // What llama.cpp logged as the error, in one line, or `otherwise`.
    static std::string error_text(const std::string &otherwise);
};

} // namespace skippy
