#pragma once
#include <pybind11/pybind11.h>

namespace tilefuse::emu {

void bind_kernels(pybind11::module_& m);     // kernels by name, counting
void bind_operations(pybind11::module_& m);  // the host aie_api, operation by operation

}  // namespace tilefuse::emu
