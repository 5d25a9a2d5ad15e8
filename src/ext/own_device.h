// A real device (CPU or GPU) as one stage sees it: the same in everything, but it computes only nodes of the stage's
// own layers. Without this, ggml's scheduler would give a real device any node between two of its own, because it can.
#pragma once

#include "ggml_device_abi.h"

#include <functional>
#include <memory>

namespace skippy {

class OwnDevice {
  public:
    using Owns = std::function<bool(const ggml_tensor *)>;

    OwnDevice(ggml_backend_dev_t inner, Owns owns);
    OwnDevice(const OwnDevice &) = delete;
    OwnDevice &operator=(const OwnDevice &) = delete;

    ggml_backend_dev_t handle() { return &device_; }

  private:
    static OwnDevice &of(ggml_backend_dev_t device) { return *static_cast<OwnDevice *>(device->context); }

    ggml_backend_dev_t inner_;
    Owns owns_;
    ggml_backend_device device_{};
};

} // namespace skippy
