#include <pybind11/pybind11.h>

#include "bindings.h"

namespace tilefuse {

void bind_layout(pybind11::module_&) {}

}  // namespace tilefuse
