// The levels with AVX512_VNNI.
#include "int8_vnni.h"

#include "int8_rows_avx512.h"
#include "results_avx512.h"

namespace tilefuse {
namespace {

// The start of sums for a k tile costs about as much as a row; a product with -z per row costs 3 % of it.
constexpr int64_t kOffsetRows = 32;

bool offset_vnni(const TileLayout& layout, int64_t m) { return layout.bits == 4 && m >= kOffsetRows; }

}  // namespace

const Int8Kernels& int8_kernels_vnni() {
  static constexpr Int8Kernels kernels = {
      .max_rows = kVnniRows,
      .offset = offset_vnni,
      .quantise = quantise_int8_avx512,
      .prepare = prepare_vnni,
      .pass = pass_vnni,
      .store_row = store_row_avx512,
  };
  return kernels;
}

}  // namespace tilefuse
