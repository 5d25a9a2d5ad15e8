#include "own_device.h"

namespace skippy {

OwnDevice::OwnDevice(ggml_backend_dev_t inner, Owns owns) : inner_(inner), owns_(std::move(owns)) {
    device_.context = this;
    device_.registry = inner->registry; // the back end's extra functions (threads, buffer types) are found there
    skippy_device_interface &iface = device_.iface;
    iface.get_name = [](ggml_backend_dev_t d) { return ggml_backend_dev_name(of(d).inner_); };
    iface.get_description = [](ggml_backend_dev_t d) { return ggml_backend_dev_description(of(d).inner_); };
    iface.get_memory = [](ggml_backend_dev_t d, size_t *free, size_t *total) {
        ggml_backend_dev_memory(of(d).inner_, free, total);
    };
    iface.get_type = [](ggml_backend_dev_t d) { return ggml_backend_dev_type(of(d).inner_); };
    iface.get_props = [](ggml_backend_dev_t d, ggml_backend_dev_props *props) {
        ggml_backend_dev_get_props(of(d).inner_, props);
    };
    iface.init_backend = [](ggml_backend_dev_t d, const char *params) {
        ggml_backend_t backend = ggml_backend_dev_init(of(d).inner_, params);
        if (backend != nullptr) {
            backend->device = d; // the scheduler asks a backend's device what it can compute
        }
        return backend;
    };
    iface.get_buffer_type = [](ggml_backend_dev_t d) { return ggml_backend_dev_buffer_type(of(d).inner_); };
    iface.get_host_buffer_type = [](ggml_backend_dev_t d) { return ggml_backend_dev_host_buffer_type(of(d).inner_); };
    iface.supports_op = [](ggml_backend_dev_t d, const ggml_tensor *node) {
        return of(d).owns_(node) && ggml_backend_dev_supports_op(of(d).inner_, node);
    };
    iface.supports_buffer_type = [](ggml_backend_dev_t d, ggml_backend_buffer_type_t type) {
        return ggml_backend_dev_supports_buft(of(d).inner_, type);
    };
    // Offloading of single operations, pinned uploads and events belong to the inner device, which its buffers and
    // backends still name; the scheduler asks this one only for what it may compute.
}

} // namespace skippy
