// The Python module of the kernels' host build. Apart from _core, so that either can be changed without building the
// other.
#include <pybind11/pybind11.h>

#include "bindings.h"

PYBIND11_MODULE(_emu, m) {
  m.doc() = "The AIE2P kernels, built for this machine. Private; use `tilefuse.emulator`.";
  tilefuse::emu::bind_kernels(m);
  tilefuse::emu::bind_operations(m);
}
