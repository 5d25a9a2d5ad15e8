#include "cut_device.h"

#include "state_traffic.h"

#include <sys/mman.h>

namespace skippy {
namespace {

constexpr size_t tensor_alignment = 64;
constexpr size_t reported_memory = size_t{1} << 46; // never the reason to place a tensor elsewhere

ggml_guid device_guid = {0x73, 0x6b, 0x69, 0x70, 0x70, 0x79, 0x2d, 0x7a, 0x6d, 0x71, 0, 0, 0, 0, 0, 1};

} // namespace

class CutDevice {
  public:
    CutDevice(Cut &cut, bool before);

    static CutDevice &of(ggml_backend_buffer_type_t type) { return *static_cast<CutDevice *>(type->context); }
    static CutDevice &of(ggml_backend_buffer_t buffer) { return of(buffer->type); }
    static CutDevice &of(ggml_backend_dev_t device) { return *static_cast<CutDevice *>(device->context); }
    static CutDevice &of(ggml_backend_t backend) { return *static_cast<CutDevice *>(backend->context); }

    Cut &cut;
    const bool before;
    const char *name;
    ggml_backend_buffer_type buffer_type{};
    ggml_backend_device device{};
    ggml_backend_reg registry{};

  private:
    static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size);
    static void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *data, size_t offset,
                           size_t size);
    static void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor *tensor, void *data, size_t offset,
                           size_t size);
    static bool supports_op(ggml_backend_dev_t device, const ggml_tensor *node);
    static ggml_backend_t init_backend(ggml_backend_dev_t device, const char *params);
    static void fill_props(ggml_backend_dev_t device, ggml_backend_dev_props *props);
};

CutDevice::CutDevice(Cut &owner, bool is_before) : cut(owner), before(is_before), name(is_before ? "UP" : "DOWN") {
    buffer_type.context = device.context = registry.context = this;
    buffer_type.device = &device;
    buffer_type.iface.get_name = [](ggml_backend_buffer_type_t type) { return of(type).name; };
    buffer_type.iface.alloc_buffer = alloc_buffer;
    buffer_type.iface.get_alignment = [](ggml_backend_buffer_type_t) { return tensor_alignment; };

    device.registry = &registry;
    device.iface.get_name = [](ggml_backend_dev_t dev) { return of(dev).name; };
    device.iface.get_description = [](ggml_backend_dev_t dev) -> const char * {
        return of(dev).before ? "layers of the stages before" : "layers of the stages behind";
    };
    device.iface.get_memory = [](ggml_backend_dev_t, size_t *free, size_t *total) { *free = *total = reported_memory; };
    device.iface.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
    device.iface.get_props = fill_props;
    device.iface.init_backend = init_backend;
    device.iface.get_buffer_type = [](ggml_backend_dev_t dev) { return &of(dev).buffer_type; };
    device.iface.supports_op = supports_op;
    device.iface.supports_buffer_type = [](ggml_backend_dev_t dev, ggml_backend_buffer_type_t type) {
        return type == &of(dev).buffer_type;
    };

    registry.api_version = backend_api_version;
    registry.iface.get_name = [](ggml_backend_reg_t) { return "SKIPPY"; };
    registry.iface.get_device_count = [](ggml_backend_reg_t) -> size_t { return 1; };
    registry.iface.get_device = [](ggml_backend_reg_t reg, size_t) {
        return &static_cast<CutDevice *>(reg->context)->device;
    };
}

ggml_backend_buffer_t CutDevice::alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    const size_t reserved = size != 0 ? size : 1;
    void *base = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return nullptr;
    }
    skippy_buffer_interface iface{};
    iface.free_buffer = [](ggml_backend_buffer_t buffer) {
        munmap(buffer->context, buffer->size != 0 ? buffer->size : 1);
    };
    iface.get_base = [](ggml_backend_buffer_t buffer) { return buffer->context; };
    iface.memset_tensor = [](ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {};
    iface.set_tensor = set_tensor;
    iface.get_tensor = get_tensor;
    iface.clear = [](ggml_backend_buffer_t, uint8_t) {};
    return ggml_backend_buffer_init(type, iface, base, size);
}

void CutDevice::set_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *data, size_t offset,
                           size_t size) {
    CutDevice &self = of(buffer);
    if (StateTraffic::note(tensor, data, offset, size)) {
        return;
    }
    if (buffer->usage != GGML_BACKEND_BUFFER_USAGE_WEIGHTS && !self.before) {
        self.cut.crossing_.store(tensor, data, offset, size);
    }
}

void CutDevice::get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor *tensor, void *data, size_t offset,
                           size_t size) {
    Crossing &crossing = of(buffer).cut.crossing_;
    if (StateTraffic::note(tensor, data, offset, size)) {
        return;
    }
    if (buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
        crossing.fetch_weight(tensor);
    } else {
        crossing.fetch(tensor, data, offset, size);
    }
}

bool CutDevice::supports_op(ggml_backend_dev_t device, const ggml_tensor *node) {
    CutDevice &self = of(device);
    const ggml_tensor *root = node;
    while (root->view_src != nullptr) {
        root = root->view_src;
    }
    if (root->buffer != nullptr) { // a write into a stored tensor happens where that lives
        return root->buffer->type == &self.buffer_type;
    }
    return self.before ? self.cut.runs_before(node) : self.cut.runs_after(node);
}

// The scheduler calls graph_optimize at the end of a split, synchronize before a reservation and graph_compute between
// graphs: after each of them the arena's nodes may stand for others.
ggml_backend_t CutDevice::init_backend(ggml_backend_dev_t device, const char *) {
    auto *backend = new ggml_backend{};
    backend->guid = &device_guid;
    backend->device = device;
    backend->context = device->context;
    backend->iface.get_name = [](ggml_backend_t b) { return of(b).name; };
    backend->iface.free = [](ggml_backend_t b) { delete b; };
    backend->iface.synchronize = [](ggml_backend_t b) { of(b).cut.layers_.forget(); };
    backend->iface.graph_compute = [](ggml_backend_t b, ggml_cgraph *) {
        of(b).cut.layers_.forget();
        return GGML_STATUS_SUCCESS;
    };
    backend->iface.graph_optimize = [](ggml_backend_t b, ggml_cgraph *, void *) { of(b).cut.layers_.forget(); };
    return backend;
}

void CutDevice::fill_props(ggml_backend_dev_t device, ggml_backend_dev_props *props) {
    *props = {};
    props->name = of(device).name;
    props->description = device->iface.get_description(device);
    props->type = GGML_BACKEND_DEVICE_TYPE_GPU;
    props->memory_free = props->memory_total = reported_memory;
    props->caps.mmap_support = true; // a device without it would stop llama.cpp from mapping anything
}

Cut::Cut(int n_layers, int begin, int end)
    : n_layers_(n_layers), begin_(begin), end_(end), layers_(n_layers), before_(new CutDevice(*this, true)),
      after_(new CutDevice(*this, false)) {}

Cut::~Cut() {
    delete before_;
    delete after_;
}

ggml_backend_dev_t Cut::before() { return &before_->device; }
ggml_backend_dev_t Cut::after() { return &after_->device; }
ggml_backend_buffer_type_t Cut::before_buffer_type() { return &before_->buffer_type; }
bool Cut::is_away(ggml_backend_buffer_type_t type) const {
    return type == &before_->buffer_type || type == &after_->buffer_type;
}

} // namespace skippy
