#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "probe.h"

namespace py = pybind11;

namespace tilefuse {

void bind_probe(py::module_& m) {
  py::class_<ReadProbe>(m, "ReadProbe", "A buffer in huge pages; `run` reads it with all threads.")
      .def(py::init<size_t>(), py::arg("nbytes"), py::call_guard<py::gil_scoped_release>())
      .def("run", &ReadProbe::run, py::call_guard<py::gil_scoped_release>(), "Bytes a second of one pass.")
      .def_property_readonly("nbytes", &ReadProbe::size);
  m.def("arithmetic_probes", &arithmetic_probes, "Kinds of multiply-add that this CPU has, the fastest last.");
  m.def("integer_probes", &integer_probes, "Kinds of integer multiply-add that this CPU has, the fastest last.");
  m.def("run_arithmetic_probe", &run_arithmetic_probe, py::arg("kind"), py::arg("seconds"),
        py::call_guard<py::gil_scoped_release>(), "Operations a second of all threads together.");
}

}  // namespace tilefuse
