// The part of ggml's internal backend interface that a device has to implement, declared here because the header that
// declares it (ggml-backend-impl.h) is not installed. The order and types of the members are the interface of
// GGML_BACKEND_API_VERSION 2 as shipped with the pinned llama.cpp (third_party/llama.cpp/pin.cmake); members that this
// project does not implement keep their place as an untyped pointer. self_test.cpp proves the layout when the extension
// is imported, before a model is opened.
#pragma once

#include "ggml-backend.h"

namespace skippy {
inline constexpr int backend_api_version = 2;
using unused_member = void (*)();
} // namespace skippy

struct skippy_buffer_type_interface {
    const char *(*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    size_t (*get_max_size)(ggml_backend_buffer_type_t);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const ggml_tensor *);
    bool (*is_host)(ggml_backend_buffer_type_t);
};

struct ggml_backend_buffer_type {
    skippy_buffer_type_interface iface;
    ggml_backend_dev_t device;
    void *context;
};

struct skippy_buffer_interface {
    void (*free_buffer)(ggml_backend_buffer_t);
    void *(*get_base)(ggml_backend_buffer_t);
    ggml_status (*init_tensor)(ggml_backend_buffer_t, ggml_tensor *);
    void (*memset_tensor)(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t);
    void (*set_tensor)(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t);
    void (*get_tensor)(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t);
    skippy::unused_member set_tensor_2d;
    skippy::unused_member get_tensor_2d;
    bool (*copy_tensor)(ggml_backend_buffer_t, const ggml_tensor *, ggml_tensor *);
    void (*clear)(ggml_backend_buffer_t, uint8_t);
    void (*reset)(ggml_backend_buffer_t);
};

struct ggml_backend_buffer {
    skippy_buffer_interface iface;
    ggml_backend_buffer_type_t type;
    void *context;
    size_t size;
    ggml_backend_buffer_usage usage;
};

struct skippy_backend_interface {
    const char *(*get_name)(ggml_backend_t);
    void (*free)(ggml_backend_t);
    skippy::unused_member set_tensor_async;
    skippy::unused_member get_tensor_async;
    skippy::unused_member set_tensor_2d_async;
    skippy::unused_member get_tensor_2d_async;
    skippy::unused_member copy_tensor_async;
    void (*synchronize)(ggml_backend_t);
    skippy::unused_member graph_plan_create;
    skippy::unused_member graph_plan_free;
    skippy::unused_member graph_plan_update;
    skippy::unused_member graph_plan_compute;
    ggml_status (*graph_compute)(ggml_backend_t, ggml_cgraph *);
    skippy::unused_member event_record;
    skippy::unused_member event_wait;
    void (*graph_optimize)(ggml_backend_t, ggml_cgraph *, void *);
};

struct ggml_backend {
    ggml_guid_t guid;
    skippy_backend_interface iface;
    ggml_backend_dev_t device;
    void *context;
};

struct skippy_device_interface {
    const char *(*get_name)(ggml_backend_dev_t);
    const char *(*get_description)(ggml_backend_dev_t);
    void (*get_memory)(ggml_backend_dev_t, size_t *, size_t *);
    enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t);
    void (*get_props)(ggml_backend_dev_t, ggml_backend_dev_props *);
    ggml_backend_t (*init_backend)(ggml_backend_dev_t, const char *);
    ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t);
    ggml_backend_buffer_type_t (*get_host_buffer_type)(ggml_backend_dev_t);
    skippy::unused_member buffer_from_host_pointer;
    bool (*supports_op)(ggml_backend_dev_t, const ggml_tensor *);
    bool (*supports_buffer_type)(ggml_backend_dev_t, ggml_backend_buffer_type_t);
    skippy::unused_member offload_op;
    skippy::unused_member event_new;
    skippy::unused_member event_free;
    skippy::unused_member event_synchronize;
};

struct ggml_backend_device {
    skippy_device_interface iface;
    ggml_backend_reg_t registry;
    void *context;
};

struct skippy_registry_interface {
    const char *(*get_name)(ggml_backend_reg_t);
    size_t (*get_device_count)(ggml_backend_reg_t);
    ggml_backend_dev_t (*get_device)(ggml_backend_reg_t, size_t);
    void *(*get_proc_address)(ggml_backend_reg_t, const char *);
};

struct ggml_backend_reg {
    int api_version;
    skippy_registry_interface iface;
    void *context;
};

extern "C" ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t type,
                                                          skippy_buffer_interface iface, void *context, size_t size);
