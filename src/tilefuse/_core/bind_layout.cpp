// Packing, unpacking and the tile layout. The callers in tilefuse.packed have checked every shape and dtype; addresses
// and strides arrive as integers, so that bfloat16 arrays, which NumPy can't export as buffers, need no copy.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "bindings.h"
#include "pack.h"

namespace py = pybind11;

namespace tilefuse {
namespace {

template <typename T = void>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// (address, kind, group stride, channel stride), strides in elements.
using FloatGridArgs = std::tuple<uintptr_t, int, int64_t, int64_t>;
using ByteGridArgs = std::tuple<uintptr_t, int64_t, int64_t>;

FloatGrid float_grid(const FloatGridArgs& args) {
  const auto [address, kind, group_stride, channel_stride] = args;
  return {pointer<const void>(address), static_cast<FloatKind>(kind), group_stride, channel_stride};
}

ByteGrid byte_grid(const ByteGridArgs& args) {
  const auto [address, group_stride, channel_stride] = args;
  return {pointer<const uint8_t>(address), group_stride, channel_stride};
}

// Returns (kind, row, channel) of the first value that can't be packed; kind is a PackIssue::Kind.
std::tuple<int, int64_t, int64_t> pack_layer(const TileLayout& layout, uintptr_t codes, int order, uintptr_t perm,
                                             int64_t group, const FloatGridArgs& scales,
                                             const std::optional<ByteGridArgs>& zeros,
                                             const std::optional<FloatGridArgs>& mins, uintptr_t out) {
  PackSource source{.codes = pointer<const uint8_t>(codes),
                    .order = static_cast<CodeOrder>(order),
                    .perm = pointer<const int32_t>(perm),
                    .group = group,
                    .scales = float_grid(scales),
                    .zeros = zeros ? byte_grid(*zeros) : ByteGrid{},
                    .mins = mins ? float_grid(*mins) : FloatGrid{}};
  PackIssue issue;
  {
    const py::gil_scoped_release release;
    issue = pack(layout, source, pointer<uint8_t>(out));
  }
  return {static_cast<int>(issue.kind), issue.row, issue.channel};
}

void unpack_layer(const TileLayout& layout, uintptr_t packed, int64_t group, uintptr_t perm, uintptr_t codes,
                  uintptr_t scales, uintptr_t zeros, uintptr_t mins) {
  const py::gil_scoped_release release;
  unpack(layout, pointer<const uint8_t>(packed), group, pointer<const int32_t>(perm),
         {pointer<uint8_t>(codes), pointer<uint16_t>(scales), pointer<uint8_t>(zeros), pointer<uint16_t>(mins)});
}

void dequantize_layer(const TileLayout& layout, uintptr_t packed, uintptr_t perm, uintptr_t out) {
  const py::gil_scoped_release release;
  dequantize(layout, pointer<const uint8_t>(packed), pointer<const int32_t>(perm), pointer<uint16_t>(out));
}

}  // namespace

void bind_layout(py::module_& m) {
  py::class_<TileLayout>(m, "TileLayout")
      .def(py::init([](int64_t k, int64_t n, int bits, int tile_group, int zero, int columns, int64_t k_tiles,
                       int64_t tiles_per_column, int64_t tile_bytes, int64_t scale_offset, int64_t zero_offset) {
             return TileLayout{k,
                               n,
                               bits,
                               tile_group,
                               static_cast<ZeroKind>(zero),
                               columns,
                               k_tiles,
                               tiles_per_column,
                               tile_bytes,
                               scale_offset,
                               zero_offset};
           }),
           py::kw_only(), py::arg("k"), py::arg("n"), py::arg("bits"), py::arg("tile_group"), py::arg("zero"),
           py::arg("columns"), py::arg("k_tiles"), py::arg("tiles_per_column"), py::arg("tile_bytes"),
           py::arg("scale_offset"), py::arg("zero_offset"))
      .def_property_readonly("nbytes", &TileLayout::nbytes)
      .def_property_readonly("k_tiles_used", &TileLayout::k_tiles_used)
      .def_property_readonly("n_tiles_used", &TileLayout::n_tiles_used)
      .def_property_readonly("groups_per_tile", &TileLayout::groups_per_tile)
      .def("tile_offset", &TileLayout::tile_offset, py::arg("n_tile"), py::arg("k_tile"));

  py::dict constants;
  constants["KT"] = kKt;
  constants["NT"] = kNt;
  constants["BLOCK"] = kBlock;
  constants["ROWS"] = kRows;
  constants["ALIGNMENT"] = kAlignment;
  m.attr("LAYOUT_CONSTANTS") = constants;

  m.def("pack", &pack_layer, py::arg("layout"), py::kw_only(), py::arg("codes"), py::arg("order"), py::arg("perm"),
        py::arg("group"), py::arg("scales"), py::arg("zeros"), py::arg("mins"), py::arg("out"));
  m.def("unpack", &unpack_layer, py::arg("layout"), py::kw_only(), py::arg("packed"), py::arg("group"), py::arg("perm"),
        py::arg("codes"), py::arg("scales"), py::arg("zeros"), py::arg("mins"));
  m.def("dequantize", &dequantize_layer, py::arg("layout"), py::kw_only(), py::arg("packed"), py::arg("perm"),
        py::arg("out"));
}

}  // namespace tilefuse
