# The one llama.cpp that this version is built and tested against. src/ext/ggml_device_abi.h depends on it.
set(SKIPPY_PIN_PACKAGE "0.3.36")       # version of the PyPI package llama-cpp-python
set(SKIPPY_PIN_LLAMA "0.5.0-dev")      # what llama_version() of its library says
set(SKIPPY_PIN_COMMIT "0c1e570")       # LLAMA_BUILD_COMMIT of its CMake package
