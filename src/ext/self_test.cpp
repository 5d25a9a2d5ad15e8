#include "self_test.h"

#include "cut_device.h"
#include "native_guard.h"
#include "skippy_pin.h"

#include "ggml-cpu.h"
#include "llama.h"

#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace skippy {
namespace {

constexpr int width = 8;
using Row = std::array<float, width>;

struct FreeContext {
    void operator()(ggml_context *c) const { ggml_free(c); }
};
struct FreeScheduler {
    void operator()(ggml_backend_sched_t s) const { ggml_backend_sched_free(s); }
};
struct FreeBackend {
    void operator()(ggml_backend_t b) const { ggml_backend_free(b); }
};
struct FreeBuffer {
    void operator()(ggml_backend_buffer_t b) const { ggml_backend_buffer_free(b); }
};
using Context = std::unique_ptr<ggml_context, FreeContext>;
using Backend = std::unique_ptr<ggml_backend, FreeBackend>;

// Layer 0: a = x * w0. Layer 1: b = a * w1, result = b + a. Cut between them, a crosses and b does not.
struct TinyStage {
    TinyStage(int begin, int end) : cut(2, begin, end) {
        const ggml_backend_buffer_type_t here = ggml_backend_cpu_buffer_type();
        if (begin > 0) {
            backends.emplace_back(ggml_backend_dev_init(cut.before(), nullptr));
        }
        if (end < 2) {
            backends.emplace_back(ggml_backend_dev_init(cut.after(), nullptr));
        }
        backends.emplace_back(ggml_backend_cpu_init());
        ggml_backend_cpu_set_n_threads(backends.back().get(), 1); // a pool of threads would not outlive a fork
        std::vector<ggml_backend_t> handles;
        for (const Backend &backend : backends) {
            handles.push_back(backend.get());
        }
        const auto new_context = [](size_t n) {
            return Context(ggml_init({ggml_tensor_overhead() * n + ggml_graph_overhead(), nullptr, true}));
        };
        const auto weight = [&](const char *name, float value, ggml_backend_buffer_type_t type) {
            weights.push_back(new_context(1));
            ggml_tensor *tensor = ggml_new_tensor_1d(weights.back().get(), GGML_TYPE_F32, width);
            ggml_set_name(tensor, name);
            buffers.emplace_back(ggml_backend_alloc_ctx_tensors_from_buft(weights.back().get(), type));
            ggml_backend_buffer_set_usage(buffers.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            Row values;
            values.fill(value);
            ggml_backend_tensor_set(tensor, values.data(), 0, sizeof(values));
            return tensor;
        };
        ggml_tensor *w0 = weight("blk.0.weight", 2.0F, begin > 0 ? cut.before_buffer_type() : here);
        ggml_tensor *w1 = weight("blk.1.weight", 3.0F, end < 2 ? ggml_backend_dev_buffer_type(cut.after()) : here);
        context = new_context(16);
        x = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, width);
        ggml_set_input(ggml_set_name(x, "x"));
        ggml_tensor *a = ggml_set_name(ggml_mul(context.get(), x, w0), "a-0");
        ggml_tensor *b = ggml_set_name(ggml_mul(context.get(), a, w1), "b-1");
        result = ggml_set_name(ggml_add(context.get(), b, a), "result-1");
        ggml_set_output(result);
        graph = ggml_new_graph(context.get());
        ggml_build_forward_expand(graph, result);
        scheduler.reset(
            ggml_backend_sched_new(handles.data(), nullptr, static_cast<int>(handles.size()), 64, false, false));
        if (!ggml_backend_sched_alloc_graph(scheduler.get(), graph)) {
            throw std::runtime_error("the scheduler could not place a graph on the cut device");
        }
    }
    void compute(const Row &input) {
        ggml_backend_tensor_set(x, input.data(), 0, sizeof(input));
        if (ggml_backend_sched_graph_compute(scheduler.get(), graph) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("a graph on the cut device could not be computed");
        }
    }

    Cut cut;
    std::vector<Backend> backends;
    std::vector<Context> weights;
    std::vector<std::unique_ptr<ggml_backend_buffer, FreeBuffer>> buffers;
    Context context;
    std::unique_ptr<ggml_backend_sched, FreeScheduler> scheduler;
    ggml_cgraph *graph = nullptr;
    ggml_tensor *x = nullptr, *result = nullptr;
};

} // namespace

void self_test() {
    if (std::strcmp(llama_version(), pinned_llama_version) != 0) {
        throw std::runtime_error(std::string("this build of skippy-zmq is tied to llama.cpp ") + pinned_llama_version +
                                 ", but the library found at run time is " + llama_version());
    }
    const NativeGuard guard;
    Row input{}, output{};
    for (size_t i = 0; i < input.size(); ++i) {
        input[i] = 1.5F + static_cast<float>(i);
    }
    const std::vector<CrossingKey> wanted = {{"a-0", 0}};
    TinyStage first(0, 1), last(1, 2);
    first.cut.crossing().begin({}, &wanted);
    first.compute(input);
    std::vector<LeavingTensor> leaving = first.cut.crossing().take_leaving();
    if (leaving.size() != 1 || leaving[0].info.nbytes != sizeof(Row)) {
        throw std::runtime_error("the cut device did not see the tensor that crosses a boundary");
    }
    last.cut.crossing().begin({{leaving[0].info, leaving[0].data.get()}}, nullptr);
    last.compute(input);
    ggml_backend_tensor_get(last.result, output.data(), 0, sizeof(output));
    for (size_t i = 0; i < output.size(); ++i) {
        if (output[i] != input[i] * 2 * 3 + input[i] * 2 || !last.cut.crossing().fault().empty()) {
            throw std::runtime_error("a graph that was cut in two gave another result than the whole");
        }
    }
}

} // namespace skippy
