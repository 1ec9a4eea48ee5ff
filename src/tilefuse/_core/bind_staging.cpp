// Bindings of staging.h. Arguments are checked in Python (tilefuse/staging.py) and arrive as addresses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "bindings.h"
#include "staging.h"

namespace py = pybind11;

namespace tilefuse {
namespace {

std::optional<std::pair<int64_t, int64_t>> run_stage_bfp16(uintptr_t x, int x_dtype, int64_t x_stride, int64_t m,
                                                           int64_t k, uintptr_t perm, uintptr_t out, int64_t k_tiles,
                                                           int64_t bands, int64_t joined, int64_t row_blocks) {
  const StagingArgs args = {.x = reinterpret_cast<const void*>(x),
                            .x_dtype = static_cast<Dtype>(x_dtype),
                            .x_stride = x_stride,
                            .m = m,
                            .k = k,
                            .perm = reinterpret_cast<const int32_t*>(perm),
                            .out = reinterpret_cast<std::byte*>(out),
                            .k_tiles = k_tiles,
                            .bands = bands,
                            .joined = joined,
                            .row_blocks = row_blocks};
  std::optional<Place> bad;
  {
    const py::gil_scoped_release release;
    bad = stage_bfp16(args);
  }
  if (!bad) return std::nullopt;
  return std::pair{bad->row, bad->column};
}

}  // namespace

void bind_staging(py::module_& m) { m.def("stage_bfp16", &run_stage_bfp16); }

}  // namespace tilefuse
