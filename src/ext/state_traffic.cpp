#include "state_traffic.h"

namespace skippy {
namespace {

thread_local StateTraffic *current = nullptr;

} // namespace

StateTraffic::StateTraffic(const std::vector<ggml_backend_buffer_t> &buffers) {
    for (ggml_backend_buffer_t buffer : buffers) {
        usual_.push_back({buffer, buffer->iface.set_tensor, buffer->iface.get_tensor});
    }
    current = this;
    for (const Usual &usual : usual_) {
        usual.buffer->iface.set_tensor = [](ggml_backend_buffer_t, ggml_tensor *tensor, const void *data, size_t offset,
                                            size_t size) { note(tensor, data, offset, size); };
        usual.buffer->iface.get_tensor = [](ggml_backend_buffer_t, const ggml_tensor *tensor, void *data, size_t offset,
                                            size_t size) { note(tensor, data, offset, size); };
    }
}

StateTraffic::~StateTraffic() {
    for (const Usual &usual : usual_) {
        usual.buffer->iface.set_tensor = usual.set_tensor;
        usual.buffer->iface.get_tensor = usual.get_tensor;
    }
    current = nullptr;
}

bool StateTraffic::note(const ggml_tensor *tensor, const void *at, size_t offset, size_t size) {
    if (current == nullptr) {
        return false;
    }
    current->moves_.push_back({tensor, offset, size, static_cast<const uint8_t *>(at)});
    return true;
}

} // namespace skippy
