#include "skipped_compute.h"

#include <map>
#include <mutex>

namespace skippy {
namespace {

using Init = ggml_backend_t (*)(ggml_backend_dev_t, const char *);

std::mutex devices; // guards what follows
std::map<ggml_backend_dev_t, Init> usual_init;
int noting = 0;

thread_local std::vector<ggml_backend_t> *made = nullptr;
thread_local std::vector<ggml_backend_t> made_here;

thread_local SkippedCompute::Visit visit_instead;
thread_local const SkippedCompute *watching = nullptr;

ggml_status compute_nothing(ggml_backend_t, ggml_cgraph *graph) {
    if (visit_instead) {
        visit_instead(graph);
    }
    return GGML_STATUS_SUCCESS;
}

} // namespace

ggml_backend_t SkippedCompute::init_and_note(ggml_backend_dev_t device, const char *params) {
    Init usual = nullptr;
    {
        const std::lock_guard lock(devices);
        usual = usual_init.at(device);
    }
    ggml_backend_t backend = usual(device, params);
    if (made != nullptr && backend != nullptr) {
        made->push_back(backend);
    }
    return backend;
}

SkippedCompute::SkippedCompute() {
    made_here.clear();
    made = &made_here;
    const std::lock_guard lock(devices);
    if (noting++ == 0) {
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            ggml_backend_dev_t device = ggml_backend_dev_get(i);
            usual_init[device] = device->iface.init_backend;
            device->iface.init_backend = init_and_note;
        }
    }
}

void SkippedCompute::stop_noting() {
    if (!noting_) {
        return;
    }
    noting_ = false;
    made = nullptr;
    for (ggml_backend_t backend : made_here) {
        backends_.emplace_back(backend, backend->iface.graph_compute);
    }
    made_here.clear();
    const std::lock_guard lock(devices);
    if (--noting == 0) {
        for (const auto &[device, init] : usual_init) {
            device->iface.init_backend = init;
        }
    }
}

ggml_status SkippedCompute::visit_and_compute(ggml_backend_t backend, ggml_cgraph *graph) {
    visit_instead(graph);
    for (const auto &[known, compute] : watching->backends_) {
        if (known == backend) {
            return compute(backend, graph);
        }
    }
    return GGML_STATUS_FAILED;
}

void SkippedCompute::replace(Visit visit, Compute compute) {
    stop_noting();
    visit_instead = std::move(visit);
    watching = this;
    replaced_ = true;
    for (const auto &[backend, usual] : backends_) {
        backend->iface.graph_compute = compute;
    }
}

void SkippedCompute::skip(Visit visit) { replace(std::move(visit), compute_nothing); }

void SkippedCompute::watch(Visit visit) { replace(std::move(visit), visit_and_compute); }

void SkippedCompute::restore() {
    stop_noting();
    if (!replaced_) { // the context may be gone
        return;
    }
    replaced_ = false;
    visit_instead = nullptr;
    watching = nullptr;
    for (const auto &[backend, compute] : backends_) {
        backend->iface.graph_compute = compute;
    }
}

SkippedCompute::~SkippedCompute() { restore(); }

} // namespace skippy
