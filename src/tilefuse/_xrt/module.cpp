// XRT's C++ API under the names of pyxrt, for the part of it that the runtime uses (tilefuse/runtime/xrt.py).
//
// XRT ships pyxrt for one version of Python, and its waits keep the interpreter's lock. This module is built for the
// Python that tilefuse is installed in, where XRT's headers are found, and releases the lock wherever the driver may
// block. Exceptions of XRT become RuntimeError, as pyxrt has them.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <xrt/experimental/xrt_kernel.h>  // runlist
#include <xrt/experimental/xrt_xclbin.h>
#include <xrt/xrt_bo.h>
#include <xrt/xrt_device.h>
#include <xrt/xrt_hw_context.h>
#include <xrt/xrt_kernel.h>
#include <xrt/xrt_uuid.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <string>

namespace py = pybind11;

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

// As long a run as the caller likes, or at most `milliseconds` where they are not 0; the state says which.
ert_cmd_state wait(xrt::run& run, uint32_t milliseconds) { return run.wait(std::chrono::milliseconds(milliseconds)); }

void write(xrt::bo& bo, const py::buffer& data, size_t seek) {
  const py::buffer_info info = data.request();
  if (!PyBuffer_IsContiguous(info.view(), 'C')) throw py::value_error("bo.write takes a contiguous buffer");
  const auto nbytes = static_cast<size_t>(info.size * info.itemsize);
  const py::gil_scoped_release release;
  bo.write(info.ptr, nbytes, seek);
}

py::bytes read(xrt::bo& bo, size_t size, size_t skip) {
  std::string data(size, '\0');
  {
    const py::gil_scoped_release release;
    bo.read(data.data(), size, skip);
  }
  return data;
}

void bind_states(py::module_& m) {
  py::enum_<xclBOSyncDirection>(m, "xclBOSyncDirection")
      .value("XCL_BO_SYNC_BO_TO_DEVICE", XCL_BO_SYNC_BO_TO_DEVICE)
      .value("XCL_BO_SYNC_BO_FROM_DEVICE", XCL_BO_SYNC_BO_FROM_DEVICE);
  py::enum_<ert_cmd_state>(m, "ert_cmd_state")
      .value("ERT_CMD_STATE_NEW", ERT_CMD_STATE_NEW)
      .value("ERT_CMD_STATE_QUEUED", ERT_CMD_STATE_QUEUED)
      .value("ERT_CMD_STATE_COMPLETED", ERT_CMD_STATE_COMPLETED)
      .value("ERT_CMD_STATE_ERROR", ERT_CMD_STATE_ERROR)
      .value("ERT_CMD_STATE_ABORT", ERT_CMD_STATE_ABORT)
      .value("ERT_CMD_STATE_SUBMITTED", ERT_CMD_STATE_SUBMITTED)
      .value("ERT_CMD_STATE_TIMEOUT", ERT_CMD_STATE_TIMEOUT)
      .value("ERT_CMD_STATE_NORESPONSE", ERT_CMD_STATE_NORESPONSE)
      .value("ERT_CMD_STATE_SKERROR", ERT_CMD_STATE_SKERROR)
      .value("ERT_CMD_STATE_SKCRASHED", ERT_CMD_STATE_SKCRASHED);
}

void bind_device(py::module_& m) {
  py::class_<xrt::uuid>(m, "uuid").def("to_string", &xrt::uuid::to_string);

  py::class_<xrt::xclbin> xclbin(m, "xclbin");
  py::class_<xrt::xclbin::kernel>(xclbin, "xclbinkernel")
      .def("get_name", &xrt::xclbin::kernel::get_name)
      .def("get_num_args", &xrt::xclbin::kernel::get_num_args);
  xclbin.def(py::init<const std::string&>(), Unlocked(), py::arg("filename"))
      .def("get_kernels", &xrt::xclbin::get_kernels)
      .def("get_xsa_name", &xrt::xclbin::get_xsa_name)
      .def("get_uuid", &xrt::xclbin::get_uuid);

  py::enum_<xrt::info::device>(m, "xrt_info_device")
      .value("bdf", xrt::info::device::bdf)
      .value("name", xrt::info::device::name)
      .value("platform", xrt::info::device::platform)
      .value("host", xrt::info::device::host);
  py::class_<xrt::device>(m, "device")
      .def(py::init<unsigned int>(), Unlocked(), py::arg("index"))
      .def("register_xclbin", &xrt::device::register_xclbin, Unlocked(), py::arg("xclbin"))
      .def("get_info", [](const xrt::device& device, xrt::info::device key) -> std::string {
        switch (key) {
          case xrt::info::device::bdf:
            return device.get_info<xrt::info::device::bdf>();
          case xrt::info::device::name:
            return device.get_info<xrt::info::device::name>();
          case xrt::info::device::platform:
            return device.get_info<xrt::info::device::platform>();
          case xrt::info::device::host:
            return device.get_info<xrt::info::device::host>();
          default:
            return "NA";
        }
      });

  py::class_<xrt::hw_context>(m, "hw_context")
      .def(py::init<const xrt::device&, const xrt::uuid&>(), Unlocked(), py::arg("device"), py::arg("uuid"));
}

void bind_buffers(py::module_& m) {
  py::class_<xrt::bo> bo(m, "bo");
  py::enum_<xrt::bo::flags>(bo, "flags")
      .value("normal", xrt::bo::flags::normal)
      .value("cacheable", xrt::bo::flags::cacheable)
      .value("device_only", xrt::bo::flags::device_only)
      .value("host_only", xrt::bo::flags::host_only)
      .value("p2p", xrt::bo::flags::p2p)
      .value("svm", xrt::bo::flags::svm)
      .export_values();
  bo.def(py::init<const xrt::device&, size_t, xrt::bo::flags, xrt::memory_group>(), Unlocked(), py::arg("device"),
         py::arg("size"), py::arg("flags"), py::arg("group"))
      .def("write", &write, py::arg("data"), py::arg("seek"))
      .def("read", &read, py::arg("size"), py::arg("skip"))
      .def(
          "sync",
          [](xrt::bo& self, xclBOSyncDirection direction, size_t size, size_t offset) {
            self.sync(direction, size, offset);
          },
          Unlocked(), py::arg("direction"), py::arg("size"), py::arg("offset"))
      .def(
          "sync", [](xrt::bo& self, xclBOSyncDirection direction) { self.sync(direction); }, Unlocked(),
          py::arg("direction"))
      // The view does not keep the buffer alive, as in pyxrt: its owner has to.
      .def("map",
           [](xrt::bo& self) { return py::memoryview::from_memory(self.map(), static_cast<py::ssize_t>(self.size())); })
      .def("size", &xrt::bo::size)
      .def("address", &xrt::bo::address);
}

void bind_runs(py::module_& m) {
  py::class_<xrt::kernel>(m, "kernel")
      .def(py::init<const xrt::hw_context&, const std::string&>(), Unlocked(), py::arg("hw_context"), py::arg("name"))
      .def("group_id", &xrt::kernel::group_id, py::arg("index"));
  py::class_<xrt::run>(m, "run")
      .def(py::init<const xrt::kernel&>(), Unlocked(), py::arg("kernel"))
      .def(
          "set_arg", [](xrt::run& self, int index, const xrt::bo& bo) { self.set_arg(index, bo); }, py::arg("index"),
          py::arg("value"))
      .def(
          "set_arg", [](xrt::run& self, int index, int value) { self.set_arg(index, value); }, py::arg("index"),
          py::arg("value"))
      .def(
          "start", [](xrt::run& self) { self.start(); }, Unlocked())
      .def("wait", &wait, Unlocked(), py::arg("timeout_ms") = 0)
      .def("state", &xrt::run::state);
  py::class_<xrt::runlist>(m, "runlist")
      .def(py::init<const xrt::hw_context&>(), Unlocked(), py::arg("hwctx"))
      .def(
          "add", [](xrt::runlist& self, const xrt::run& run) { self.add(run); }, py::arg("run"))
      .def("execute", &xrt::runlist::execute, Unlocked())
      .def(
          "wait", [](xrt::runlist& self) { self.wait(); }, Unlocked())
      // True when all runs have completed. pyxrt's own form of this returns a type that Python does not know.
      .def(
          "wait",
          [](xrt::runlist& self, std::chrono::milliseconds timeout) {
            const py::gil_scoped_release release;
            return self.wait(timeout) == std::cv_status::no_timeout;
          },
          py::arg("timeout"));
}

}  // namespace

PYBIND11_MODULE(_xrt, m) {
  m.doc() = "XRT, under the names of pyxrt: the part that tilefuse uses.";
  bind_states(m);
  bind_device(m);
  bind_buffers(m);
  bind_runs(m);
}
