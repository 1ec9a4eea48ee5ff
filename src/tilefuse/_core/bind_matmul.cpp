// Bindings of the CPU kernels. Arguments are checked in Python (tilefuse/runtime/cpu.py); addresses arrive as integers
// because NumPy has no bfloat16 of its own and torch tensors need no copy that way.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "cpu_features.h"
#include "matmul.h"
#include "thread_pool.h"

namespace py = pybind11;

namespace tilefuse {
namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <void (*kMatmul)(const MatmulArgs&)>
void run_matmul(const TileLayout& layout, uintptr_t weights, uintptr_t x, int x_dtype, int64_t x_stride, int64_t m,
                uintptr_t perm, uintptr_t bias, uintptr_t y, int y_dtype, int64_t y_stride) {
  const MatmulArgs args = {.layout = layout,
                           .weights = pointer<const std::byte>(weights),
                           .x = pointer<const void>(x),
                           .x_dtype = static_cast<Dtype>(x_dtype),
                           .x_stride = x_stride,
                           .m = m,
                           .perm = pointer<const int32_t>(perm),
                           .bias = pointer<const float>(bias),
                           .y = pointer<void>(y),
                           .y_dtype = static_cast<Dtype>(y_dtype),
                           .y_stride = y_stride};
  const py::gil_scoped_release release;
  kMatmul(args);
}

std::vector<std::string> level_names() {
  std::vector<std::string> names;
  for (const CpuLevel level : available_levels()) names.emplace_back(name_of(level));
  return names;
}

void set_level_by_name(const std::string& name) {
  for (const CpuLevel level : available_levels()) {
    if (name_of(level) == name) return set_level(level);
  }
  throw py::value_error("CPU level '" + name + "' is not available");
}

}  // namespace

void bind_matmul(py::module_& m) {
  m.def("matmul", &run_matmul<matmul>);
  m.def("matmul_int8", &run_matmul<matmul_int8>);
  m.def("cpu_levels", &level_names);
  m.def("cpu_level", [] { return std::string(name_of(current_level())); });
  m.def("set_cpu_level", &set_level_by_name);
  m.def("num_threads", [] { return ThreadPool::instance().num_threads(); });
  m.def("set_num_threads", [](int n) { ThreadPool::instance().set_num_threads(n); });
}

}  // namespace tilefuse
