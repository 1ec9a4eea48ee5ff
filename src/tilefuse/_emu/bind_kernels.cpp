// Kernels by name. Arguments are checked in Python (tilefuse/emulator/kernels.py) and arrive as addresses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <aie_api/aie.hpp>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "packed_tile.h"
#include "registry.h"

namespace py = pybind11;
namespace count = aie::detail::count;

namespace tilefuse::emu {
namespace {

const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::u8:
      return "uint8";
    case Dtype::bf16:
      return "bfloat16";
    case Dtype::f32:
      return "float32";
    case Dtype::i32:
      return "int32";
  }
  return "";
}

// A fault becomes text instead of the end of the process; the text is empty when all went well. Counts are of this call
// alone: they have room for the regions of one kernel, not for those of all.
template <typename F>
std::string catching_faults(F&& f) {
  const py::gil_scoped_release release;
  count::reset();
  count::core.catch_faults = true;
  count::core.fault = {};
  f();
  count::core.catch_faults = false;
  return count::core.fault.data();
}

std::string call(const EntryPoint& entry, const py::args& values) {
  if (values.size() != entry.num_arguments) throw py::type_error("wrong number of arguments");
  std::array<uintptr_t, kMaxArguments> words{};
  size_t i = 0;
  for (const py::handle value : values) {
    words[i] = entry.arguments[i].by_value ? static_cast<uintptr_t>(value.cast<int32_t>()) : value.cast<uintptr_t>();
    ++i;
  }
  return catching_faults([&] { entry.call(words.data()); });
}

// (name, shape, dtype, whether it is written, (array that it is an index of, elements a step, number of values))
using ArgumentTuple =
    std::tuple<std::string, std::vector<int64_t>, std::string, bool, std::tuple<std::string, int64_t, int64_t>>;

std::vector<ArgumentTuple> arguments(const Kernel& kernel, const EntryPoint& entry) {
  std::vector<ArgumentTuple> result;
  for (size_t i = 0; i < entry.num_arguments; ++i) {
    const Argument& argument = entry.arguments[i];
    const Said& said = argument.said;
    std::vector<int64_t> shape;
    for (const int64_t extent : said.shape) {
      if (extent == 0) break;
      shape.push_back(extent == kScratch ? kernel.scratch_bytes() : extent == kAny ? -1 : extent);
    }
    result.emplace_back(said.name, std::move(shape), dtype_name(argument.dtype), argument.written,
                        std::tuple{said.indexes, said.step, said.extent});
  }
  return result;
}

std::vector<std::pair<const EntryPoint*, std::vector<ArgumentTuple>>> entry_points(const Kernel& kernel) {
  std::vector<std::pair<const EntryPoint*, std::vector<ArgumentTuple>>> result;
  for (const EntryPoint& entry : kernel.entry_points)
    if (entry.call != nullptr) result.emplace_back(&entry, arguments(kernel, entry));
  return result;
}

// Regions of this thread's last call: (name, entries, {load, ldb, st, mv, vec}); the unnamed one has all else.
using Counts =
    std::vector<std::tuple<std::string, unsigned long,
                           std::tuple<unsigned long, unsigned long, unsigned long, unsigned long, unsigned long>>>;

Counts counts() {
  Counts result;
  for (unsigned i = 0; i < count::core.used; ++i) {
    const count::region& region = count::core.regions[i];
    const count::slots& s = region.spent;
    result.emplace_back(region.name == nullptr ? "" : region.name, region.entries,
                        std::tuple{s.load, s.ldb, s.st, s.mv, s.vec});
  }
  return result;
}

template <unsigned Bits, unsigned Group, bool Minima>
py::dict tile_numbers() {
  using tile = PackedTile<Bits, Group, Minima>;
  py::dict numbers;
  numbers["groups_per_tile"] = tile::groups;
  numbers["code_bytes"] = tile::code_bytes;
  numbers["scale_offset"] = tile::scale_offset;
  numbers["zero_offset"] = tile::zero_offset;
  numbers["zero_bytes"] = tile::zero_bytes;
  numbers["tile_bytes"] = tile::tile_bytes;
  return numbers;
}

// packed_tile.h's view of the format, for the comparison with layout.py: {(bits, group, minima): {name: value}}.
py::dict packed_tiles() {
  py::dict tiles;
  const auto add = [&]<unsigned Bits, unsigned Group>() {
    tiles[py::make_tuple(Bits, Group, false)] = tile_numbers<Bits, Group, false>();
    tiles[py::make_tuple(Bits, Group, true)] = tile_numbers<Bits, Group, true>();
  };
  add.operator()<4, 32>();
  add.operator()<4, 64>();
  add.operator()<4, 128>();
  add.operator()<8, 32>();
  add.operator()<8, 64>();
  add.operator()<8, 128>();
  return tiles;
}

}  // namespace

std::vector<const Kernel*>& kernels() {
  static std::vector<const Kernel*> all;
  return all;
}

void bind_kernels(py::module_& m) {
  py::class_<EntryPoint>(m, "EntryPoint")
      .def_readonly("stem", &EntryPoint::stem)
      .def("call", &call, "Runs it on addresses and integers; returns the first fault, or an empty text.");
  py::class_<Kernel>(m, "Kernel")
      .def_readonly("name", &Kernel::name)
      .def_readonly("op", &Kernel::op)
      .def_readonly("activation", &Kernel::activation)
      .def_readonly("bits", &Kernel::bits)
      .def_readonly("group", &Kernel::group)
      .def_readonly("minima", &Kernel::minima)
      .def_readonly("path", &Kernel::path)
      .def_readonly("m", &Kernel::m)
      .def_readonly("tiles", &Kernel::tiles)
      .def_readonly("d", &Kernel::d)
      .def_property_readonly(
          "scratch_bytes",
          [](const Kernel& kernel) { return kernel.scratch_bytes == nullptr ? 0 : kernel.scratch_bytes(); })
      .def_property_readonly("entry_points", &entry_points, py::return_value_policy::reference);
  m.def("kernels", &kernels, py::return_value_policy::reference);
  m.def("packed_tiles", &packed_tiles);

  m.def("counts", &counts);
  m.def("set_rounding", [](unsigned mode) { aie::set_rounding(static_cast<aie::rounding_mode>(mode)); });
  m.def("hold_rounding", [](bool hold) { return std::exchange(count::core.hold_rounding, hold); });
  m.def("get_rounding", [] { return static_cast<unsigned>(aie::get_rounding()); });
}

}  // namespace tilefuse::emu
