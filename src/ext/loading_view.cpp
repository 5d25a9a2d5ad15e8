#include "loading_view.h"

#include "ggml_device_abi.h"

#include <cstring>
#include <mutex>

namespace skippy {
namespace {

std::mutex loading; // held for the life of a view
void *(*usual_proc_address)(ggml_backend_reg_t, const char *) = nullptr;
void (*usual_props)(ggml_backend_dev_t, ggml_backend_dev_props *) = nullptr;

bool always_numa() { return true; }

void *proc_address(ggml_backend_reg_t registry, const char *name) {
    if (std::strcmp(name, "ggml_backend_cpu_is_numa") == 0) {
        return reinterpret_cast<void *>(&always_numa);
    }
    return usual_proc_address(registry, name);
}

void props_without_mapping(ggml_backend_dev_t device, ggml_backend_dev_props *props) {
    usual_props(device, props);
    props->caps.buffer_from_host_ptr = false;
}

ggml_backend_dev_t cpu() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

} // namespace

LoadingView::LoadingView(bool copy_weights) {
    loading.lock();
    usual_proc_address = cpu()->registry->iface.get_proc_address;
    usual_props = cpu()->iface.get_props;
    cpu()->registry->iface.get_proc_address = proc_address;
    if (copy_weights) {
        cpu()->iface.get_props = props_without_mapping;
    }
}

LoadingView::~LoadingView() {
    cpu()->registry->iface.get_proc_address = usual_proc_address;
    cpu()->iface.get_props = usual_props;
    loading.unlock();
}

} // namespace skippy
