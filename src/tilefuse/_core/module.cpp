// The Python module: one binding file a subject, registered here.
#include <pybind11/pybind11.h>

#include "bindings.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "C++ core of tilefuse: packing and the CPU kernels. Private; use the functions of `tilefuse`.";
  tilefuse::bind_layout(m);
  tilefuse::bind_attention(m);
  tilefuse::bind_block(m);
  tilefuse::bind_call(m);
  tilefuse::bind_matmul(m);
  tilefuse::bind_probe(m);
  tilefuse::bind_staging(m);
}
