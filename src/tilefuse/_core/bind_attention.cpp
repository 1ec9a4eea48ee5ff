// Bindings of attention. Arguments are checked in Python (tilefuse/tilemix/call.py); addresses arrive as integers, as
// in bind_matmul.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>

#include "attention/attention.h"
#include "attention/key_cache.h"
#include "bindings.h"

namespace py = pybind11;

namespace tilefuse {
namespace {

// Address, dtype, row stride, head stride.
using Rows = std::array<int64_t, 4>;

template <typename T>
HeadRows<T> rows_of(const Rows& a) {
  return {
      .data = reinterpret_cast<T*>(a[0]), .dtype = static_cast<Dtype>(a[1]), .row_stride = a[2], .head_stride = a[3]};
}

AttentionProblem problem_of(const Rows& q, const Rows& k, const Rows& v, const Rows& out,
                            const std::array<int64_t, 3>& lse, uintptr_t sequences, int64_t batch, int64_t heads,
                            int64_t kv_heads, int64_t d, int64_t dv, float scale, bool causal, int64_t window,
                            const std::array<int64_t, 4>& words, bool scale_per_row, int smoothing,
                            const BlockLayout* sealed, const BlockLayout* open) {
  const auto channels = [](int64_t n) { return n >= 8 && n <= 512 && n % 8 == 0; };
  if (!channels(d) || !channels(dv)) throw std::invalid_argument("d and dv are multiples of 8 from 8 to 512");
  if (kv_heads < 1 || heads % kv_heads != 0) throw std::invalid_argument("kv_heads divides heads");
  AttentionProblem p;
  p.q = rows_of<const void>(q);
  p.k = rows_of<const void>(k);
  p.v = rows_of<const void>(v);
  p.out = rows_of<void>(out);
  p.lse = reinterpret_cast<float*>(lse[0]);
  p.lse_row_stride = lse[1];
  p.lse_head_stride = lse[2];
  p.sequences = reinterpret_cast<const AttentionSequence*>(sequences);
  p.batch = batch;
  p.heads = heads;
  p.kv_heads = kv_heads;
  p.d = d;
  p.dv = dv;
  p.scale = scale;
  p.causal = causal;
  p.window = window;
  p.words = reinterpret_cast<const uint64_t*>(words[0]);
  p.map_heads = words[1];
  p.map_row_tiles = words[2];
  p.row_words = words[3];
  p.scale_per_row = scale_per_row;
  p.smoothing = static_cast<Smoothing>(smoothing);
  if (sealed != nullptr) p.sealed = *sealed;
  if (open != nullptr) p.open = *open;
  return p;
}

void probe(const Rows& q, const Rows& k, int64_t query_len, int64_t key_len, int64_t head, int64_t heads,
           int64_t kv_heads, int64_t d, bool scale_per_row, int smoothing, const std::array<uintptr_t, 7>& to) {
  AttentionSequence sequence;
  sequence.query_len = query_len;
  sequence.key_len = key_len;
  sequence.position = key_len - query_len;
  const AttentionProblem p = problem_of(q, k, k, {}, {}, reinterpret_cast<uintptr_t>(&sequence), 1, heads, kv_heads, d,
                                        d, 1.0F, false, 0, {}, scale_per_row, smoothing, nullptr, nullptr);
  const py::gil_scoped_release release;
  probe_int8(p, head,
             {.q_codes = reinterpret_cast<int8_t*>(to[0]),
              .q_scales = reinterpret_cast<float*>(to[1]),
              .k_codes = reinterpret_cast<int8_t*>(to[2]),
              .k_scales = reinterpret_cast<float*>(to[3]),
              .means = reinterpret_cast<float*>(to[4]),
              .scores = reinterpret_cast<int32_t*>(to[5]),
              .bias = reinterpret_cast<float*>(to[6])});
}

KeyCache cache_of(const BlockLayout& sealed, const BlockLayout& open, int64_t heads, int smoothing) {
  return {.sealed = sealed, .open = open, .heads = heads, .smoothing = static_cast<Smoothing>(smoothing)};
}

}  // namespace

void bind_attention(py::module_& m) {
  py::class_<BlockLayout>(m, "BlockLayout")
      .def(py::init(&BlockLayout::of), py::kw_only(), py::arg("d"), py::arg("dv"), py::arg("k16"), py::arg("k8"),
           py::arg("v16"), py::arg("v8"))
      .def_readonly("bytes", &BlockLayout::bytes);

  // int64 fields of a sequence, in the order of AttentionSequence.
  static_assert(sizeof(AttentionSequence) == 15 * sizeof(int64_t));
  m.attr("SEQUENCE_FIELDS") =
      py::make_tuple("query_len", "key_len", "position", "q_at", "k_at", "v_at", "out_at", "lse_at", "row_tile",
                     "group", "sealed", "open", "sealed_stride", "open_stride", "sink");

  m.def(
      "attend",
      [](const Rows& q, const Rows& k, const Rows& v, const Rows& out, const std::array<int64_t, 3>& lse,
         uintptr_t sequences, int64_t batch, int64_t heads, int64_t kv_heads, int64_t d, int64_t dv, float scale,
         bool causal, int64_t window, const std::array<int64_t, 4>& words, bool scale_per_row, int smoothing,
         const BlockLayout* sealed, const BlockLayout* open) {
        const AttentionProblem p = problem_of(q, k, v, out, lse, sequences, batch, heads, kv_heads, d, dv, scale,
                                              causal, window, words, scale_per_row, smoothing, sealed, open);
        const py::gil_scoped_release release;
        attend(p);
      },
      py::kw_only(), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("lse"), py::arg("sequences"),
      py::arg("batch"), py::arg("heads"), py::arg("kv_heads"), py::arg("d"), py::arg("dv"), py::arg("scale"),
      py::arg("causal"), py::arg("window"), py::arg("words"), py::arg("scale_per_row"), py::arg("smoothing"),
      py::arg("sealed") = nullptr, py::arg("open") = nullptr);

  // int64 fields of a sequence, in the order of CachedSequence.
  static_assert(sizeof(CachedSequence) == 9 * sizeof(int64_t));
  m.attr("CACHED_FIELDS") =
      py::make_tuple("sealed", "open", "sink", "sealed_stride", "open_stride", "length", "count", "k_at", "v_at");
  m.def("cache_open_bytes", &open_bytes);
  m.def(
      "cache_append",
      [](const BlockLayout& sealed, const BlockLayout& open, int64_t heads, int smoothing, const Rows& k, const Rows& v,
         uintptr_t sequences, int64_t batch) {
        const KeyCache cache = cache_of(sealed, open, heads, smoothing);
        const py::gil_scoped_release release;
        append(cache, rows_of<const void>(k), rows_of<const void>(v),
               reinterpret_cast<const CachedSequence*>(sequences), batch);
      },
      py::kw_only(), py::arg("sealed"), py::arg("open"), py::arg("heads"), py::arg("smoothing"), py::arg("k"),
      py::arg("v"), py::arg("sequences"), py::arg("batch"));
  m.def(
      "cache_reopen",
      [](const BlockLayout& sealed, const BlockLayout& open, int64_t heads, int smoothing, uintptr_t sequences,
         int64_t batch) {
        reopen(cache_of(sealed, open, heads, smoothing), reinterpret_cast<const CachedSequence*>(sequences), batch);
      },
      py::kw_only(), py::arg("sealed"), py::arg("open"), py::arg("heads"), py::arg("smoothing"), py::arg("sequences"),
      py::arg("batch"));

  m.def("attention_probe", &probe, py::kw_only(), py::arg("q"), py::arg("k"), py::arg("query_len"), py::arg("key_len"),
        py::arg("head"), py::arg("heads"), py::arg("kv_heads"), py::arg("d"), py::arg("scale_per_row"),
        py::arg("smoothing"), py::arg("to"));
}

}  // namespace tilefuse
