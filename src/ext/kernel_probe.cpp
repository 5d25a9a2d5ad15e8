#include "kernel_probe.h"

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpp.h>
#include <ggml-cpu.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace skippy {
namespace {

constexpr unsigned patience = 10; // seconds, for what takes microseconds
constexpr int64_t n_columns = 256, n_rows = 64, n_inputs = 2;

ggml_backend_buffer_type_t amx_buffers() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    auto extra = cpu == nullptr
                     ? nullptr
                     : reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
                           ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
    for (ggml_backend_buffer_type_t *type = extra == nullptr ? nullptr : extra(cpu); type && *type; ++type) {
        if (std::strcmp(ggml_backend_buft_name(*type), "AMX") == 0) {
            return *type;
        }
    }
    return nullptr;
}

// One product of weights that are zero. One thread, so that no pool of threads is asked that a fork left behind.
bool multiply(ggml_backend_buffer_type_t buffers) {
    const auto new_context = [] {
        return ggml_context_ptr(ggml_init({4 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
    };
    const ggml_context_ptr weights = new_context(), others = new_context();
    ggml_tensor *weight = ggml_new_tensor_2d(weights.get(), GGML_TYPE_Q8_0, n_columns, n_rows);
    const ggml_backend_buffer_ptr weight_buffer(ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), buffers));
    ggml_backend_buffer_clear(weight_buffer.get(), 0);

    ggml_tensor *input = ggml_new_tensor_2d(others.get(), GGML_TYPE_F32, n_columns, n_inputs);
    ggml_tensor *product = ggml_mul_mat(others.get(), weight, input);
    ggml_cgraph *graph = ggml_new_graph(others.get());
    ggml_build_forward_expand(graph, product);
    const ggml_backend_ptr backend(ggml_backend_cpu_init());
    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(others.get(), backend.get()));
    ggml_backend_buffer_clear(buffer.get(), 0);
    ggml_backend_cpu_set_n_threads(backend.get(), 1);
    return ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS;
}

[[noreturn]] void try_in_child(ggml_backend_buffer_type_t buffers) {
    for (const int number : {SIGSEGV, SIGILL, SIGBUS, SIGFPE, SIGABRT, SIGALRM}) {
        std::signal(number, SIG_DFL); // faulthandler would tell of a crash of this program
    }
    // A callback of Python's would wait for a lock that a thread of the other process holds.
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    alarm(patience);
    _exit(multiply(buffers) ? 0 : 1);
}

std::string probe() {
    ggml_backend_buffer_type_t buffers = amx_buffers();
    if (buffers == nullptr) {
        return {};
    }
    const pid_t child = fork();
    if (child == 0) {
        try_in_child(buffers);
    }
    int status = 0;
    pid_t ended = -1;
    while (child > 0 && (ended = waitpid(child, &status, 0)) < 0 && errno == EINTR) {
    }
    if (ended < 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) { // nothing is known, or all is well
        return {};
    }
    const std::string how = WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "an error";
    return "this build of llama.cpp cannot use AMX, which this processor has: a product of two rows ends with " + how +
           " (as where GCC before 11.5, 12.4 or 13.3 compiled it, GCC bug 114098)";
}

} // namespace

bool has_amx() { return amx_buffers() != nullptr; }

const std::string &amx_fault() {
    static const std::string fault = probe();
    return fault;
}

} // namespace skippy
