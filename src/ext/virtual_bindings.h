#pragma once

#include <nanobind/nanobind.h>

namespace skippy {

void bind_virtual(nanobind::module_ &m);

} // namespace skippy
