#include <pybind11/pybind11.h>

#include "bindings.h"

namespace tilefuse {

void bind_matmul(pybind11::module_&) {}

}  // namespace tilefuse
