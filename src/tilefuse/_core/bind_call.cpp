// One call from Python to the CPU kernels for arguments that need nothing but checks: about 1 us with the allocation of
// the result, where the same in Python takes 7 us or, with torch tensors, 14. Whatever else an argument may be (other
// strides, subclasses, wrong shapes), `call` declines it and the code in tilefuse.ops takes it or says what is wrong.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "cpu_layer.h"
#include "matmul.h"

namespace py = pybind11;

namespace tilefuse {
namespace {

// [rows][columns] of a float array whose last axis is contiguous.
struct View {
  Dtype dtype = Dtype::f32;
  uintptr_t address = 0;
  int64_t rows = 1;
  int64_t columns = 0;
  int64_t stride = 0;  // elements from row to row

  [[nodiscard]] bool overlaps(const View& other) const {
    const auto [begin, end] = extent();
    const auto [other_begin, other_end] = other.extent();
    return begin < other_end && other_begin < end;
  }

 private:
  [[nodiscard]] std::pair<int64_t, int64_t> extent() const {
    const auto first = static_cast<int64_t>(address);
    const int64_t last = first + (rows - 1) * stride * item_size(dtype);
    return {std::min(first, last), std::max(first, last) + columns * item_size(dtype)};
  }
};

// Axes of the arrays that `call` takes; more are left to NumPy.
constexpr int kMaxAxes = 6;

struct Shape {
  int axes = 0;
  std::array<int64_t, kMaxAxes> sizes;
  std::array<int64_t, kMaxAxes> strides;  // elements
};

// Rows and columns of an array; none where the rows don't follow each other evenly.
std::optional<View> rows_of(const Shape& shape, Dtype dtype, uintptr_t address) {
  if (shape.axes < 1) return std::nullopt;
  const auto last = static_cast<size_t>(shape.axes - 1);
  View view{.dtype = dtype, .address = address, .columns = shape.sizes[last]};
  if (view.columns > 1 && shape.strides[last] != 1) return std::nullopt;
  if (shape.axes == 1) return view;
  view.rows = shape.sizes[last - 1];
  view.stride = shape.strides[last - 1];
  for (size_t axis = last - 1; axis-- > 0;) {
    if (shape.sizes[axis] == 1) continue;
    if (view.rows == 1) view.stride = shape.strides[axis];
    if (shape.strides[axis] != view.rows * view.stride) return std::nullopt;
    view.rows *= shape.sizes[axis];
  }
  return view;
}

// The arrays' types.
class Libraries {
 public:
  Libraries() {
    const auto numpy = py::module_::import("numpy");
    numpy_array_ = numpy.attr("ndarray");
    const auto bfloat16 = py::module_::import("ml_dtypes").attr("bfloat16");
    dtypes_ = {py::dtype::from_args(numpy.attr("float32")), py::dtype::from_args(bfloat16),
               py::dtype::from_args(numpy.attr("float16"))};
  }

  std::optional<View> view(py::handle array, Shape& shape, bool writable) {
    if (is_numpy(array)) return view_numpy(array, shape, writable);
    if (is_torch(array)) return view_torch(array, shape);
    return std::nullopt;
  }

  // A new array like `x`, of its dtype, but with other columns.
  py::object empty_like(py::handle x, const Shape& shape, Dtype dtype, int64_t columns) {
    if (is_numpy(x)) {
      std::vector<py::ssize_t> sizes(shape.sizes.begin(), shape.sizes.begin() + shape.axes);
      sizes.back() = columns;
      return py::array(dtypes_[static_cast<size_t>(dtype)], std::move(sizes));
    }
    std::array<py::object, kMaxAxes> sizes;
    std::array<PyObject*, kMaxAxes + 1> arguments = {x.ptr()};
    for (size_t i = 0; i < static_cast<size_t>(shape.axes); ++i) {
      sizes[i] = py::int_(i + 1 < static_cast<size_t>(shape.axes) ? shape.sizes[i] : columns);
      arguments[i + 1] = sizes[i].ptr();
    }
    PyObject* result = PyObject_VectorcallMethod(names_.new_empty.ptr(), arguments.data(),
                                                 static_cast<size_t>(shape.axes) + 1, nullptr);
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  }

 private:
  struct Names {
    py::str dtype{"dtype"}, is_cpu{"is_cpu"}, layout{"layout"}, shape{"shape"}, stride{"stride"}, data_ptr{"data_ptr"},
        is_neg{"is_neg"}, new_empty{"new_empty"};
  };

  [[nodiscard]] bool is_numpy(py::handle object) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == numpy_array_.ptr();
  }

  std::optional<View> view_numpy(py::handle object, Shape& shape, bool writable) {
    const auto array = py::reinterpret_borrow<py::array>(object);
    constexpr int kAligned = 0x0100;  // NPY_ARRAY_ALIGNED
    if ((array.flags() & kAligned) == 0 || (writable && !array.writeable())) return std::nullopt;
    const PyObject* const dtype = array.dtype().ptr();
    const auto* found = std::ranges::find_if(dtypes_, [&](const py::dtype& known) { return known.ptr() == dtype; });
    if (found == dtypes_.end() || array.ndim() > kMaxAxes) return std::nullopt;
    const auto kind = static_cast<Dtype>(found - dtypes_.begin());
    shape.axes = static_cast<int>(array.ndim());
    for (int i = 0; i < shape.axes; ++i) {
      const int64_t size = array.shape(i);
      const int64_t stride = array.strides(i);
      // Of an axis of one element, or none, the stride means nothing.
      if (size > 1 && stride % item_size(kind) != 0) return std::nullopt;
      shape.sizes[static_cast<size_t>(i)] = size;
      shape.strides[static_cast<size_t>(i)] = stride / item_size(kind);
    }
    return rows_of(shape, kind, reinterpret_cast<uintptr_t>(array.data()));
  }

  // Whether it is a torch.Tensor itself. Who holds one has imported torch.
  bool is_torch(py::handle object) {
    if (!tensor_) {
      const auto torch = py::reinterpret_steal<py::object>(PyImport_GetModule(py::str("torch").ptr()));
      if (!torch) {
        PyErr_Clear();
        return false;
      }
      for (const char* name : {"strided", "float32", "bfloat16", "float16", "Tensor"}) {
        if (!py::hasattr(torch, name)) return false;  // still being imported
      }
      strided_ = torch.attr("strided");
      torch_dtypes_ = {torch.attr("float32"), torch.attr("bfloat16"), torch.attr("float16")};
      tensor_ = torch.attr("Tensor");
    }
    return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == tensor_.ptr();
  }

  std::optional<View> view_torch(py::handle tensor, Shape& shape) {
    const auto get = [&](const py::str& name) {
      PyObject* value = PyObject_GetAttr(tensor.ptr(), name.ptr());
      if (value == nullptr) throw py::error_already_set();
      return py::reinterpret_steal<py::object>(value);
    };
    const auto call = [&](const py::str& name) {
      PyObject* value = PyObject_CallMethodNoArgs(tensor.ptr(), name.ptr());
      if (value == nullptr) throw py::error_already_set();
      return py::reinterpret_steal<py::object>(value);
    };
    const py::object dtype = get(names_.dtype);
    const auto* found = std::ranges::find_if(torch_dtypes_, [&](const py::object& known) { return known.is(dtype); });
    if (found == torch_dtypes_.end()) return std::nullopt;
    if (!get(names_.is_cpu).is(py::bool_(true)) || !get(names_.layout).is(strided_)) return std::nullopt;
    if (!call(names_.is_neg).is(py::bool_(false))) return std::nullopt;
    const py::object sizes = get(names_.shape);
    const py::object strides = call(names_.stride);
    if (!PyTuple_Check(sizes.ptr()) || !PyTuple_Check(strides.ptr())) return std::nullopt;
    const auto axes = PyTuple_GET_SIZE(sizes.ptr());
    if (axes > kMaxAxes || PyTuple_GET_SIZE(strides.ptr()) != axes) return std::nullopt;
    shape.axes = static_cast<int>(axes);
    for (py::ssize_t i = 0; i < axes; ++i) {
      shape.sizes[static_cast<size_t>(i)] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), i));
      shape.strides[static_cast<size_t>(i)] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides.ptr(), i));
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    // Tensors within transformations of torch.func say what they are, but have no memory.
    const auto found_address =
        py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), names_.data_ptr.ptr()));
    const auto address = found_address ? PyLong_AsUnsignedLongLong(found_address.ptr()) : 0;
    if (PyErr_Occurred() != nullptr) PyErr_Clear();
    if (address == 0) return std::nullopt;
    return rows_of(shape, static_cast<Dtype>(found - torch_dtypes_.begin()), address);
  }

  Names names_;
  py::object numpy_array_;
  std::array<py::dtype, 3> dtypes_;  // by Dtype
  py::object tensor_;
  py::object strided_;
  std::array<py::object, 3> torch_dtypes_;
};

// Kept for the life of the process: threads may still call when its static objects go.
Libraries* g_libraries = nullptr;

// The product in `out`, or in a new array when that is None; None where the arguments are not for this function. `axes`
// that x must have, or 0 for any.
py::object call(const CpuLayer& layer, py::handle x, int axes, py::handle out) {
  Libraries& libraries = *g_libraries;
  Shape shape;
  const auto from = libraries.view(x, shape, false);
  if (!from || from->columns != layer.layout.k || (axes != 0 && shape.axes != axes)) return py::none();
  py::object result;
  Shape result_shape;
  if (out.is_none()) {
    result = libraries.empty_like(x, shape, from->dtype, layer.layout.n);
  } else {
    result = py::reinterpret_borrow<py::object>(out);
  }
  const auto to = libraries.view(result, result_shape, true);
  if (!to || to->columns != layer.layout.n || result_shape.axes != shape.axes) return py::none();
  if (!std::equal(shape.sizes.begin(), shape.sizes.begin() + shape.axes - 1, result_shape.sizes.begin()))
    return py::none();
  if (!out.is_none() && ((to->rows > 1 && std::abs(to->stride) < layer.layout.n) || to->overlaps(*from)))
    return py::none();
  const MatmulArgs args = {.layout = layer.layout,
                           .weights = layer.weights,
                           .x = reinterpret_cast<const void*>(from->address),
                           .x_dtype = from->dtype,
                           .x_stride = from->stride,
                           .m = from->rows,
                           .perm = layer.perm,
                           .bias = layer.bias,
                           .y = reinterpret_cast<void*>(to->address),
                           .y_dtype = to->dtype,
                           .y_stride = to->stride};
  {
    const py::gil_scoped_release release;
    matmul(args);
  }
  return result;
}

py::object environment(const char* name) {
  const char* value = std::getenv(name);
  // As os.environ decodes: any bytes.
  return value == nullptr ? py::none() : py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(value));
}

}  // namespace

void bind_call(py::module_& m) {
  g_libraries = new Libraries;
  py::class_<CpuLayer>(m, "CpuLayer")
      .def(py::init([](const TileLayout& layout, uintptr_t weights, uintptr_t perm, uintptr_t bias) {
        return CpuLayer{layout, reinterpret_cast<const std::byte*>(weights), reinterpret_cast<const int32_t*>(perm),
                        reinterpret_cast<const float*>(bias)};
      }))
      .def("__call__", &call);
  m.def("environment", &environment);
}

}  // namespace tilefuse
