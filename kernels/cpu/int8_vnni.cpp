// The levels with AVX512_VNNI.
#include "int8_vnni.h"

#include "int8_rows_avx512.h"
#include "results_avx512.h"

namespace tilefuse {
namespace {

// Rows from which laying codes out for all passes pays. Unpacking in each pass runs beside the products, on other
// pipes: 32 rows of 8-bit codes take two thirds of the time like that.
constexpr int64_t kManyRowsW4 = 48;
constexpr int64_t kManyRowsW8 = 256;

bool offset_vnni(const TileLayout& layout, int64_t m) { return m >= (layout.bits == 4 ? kManyRowsW4 : kManyRowsW8); }

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
