// The levels with AVX512_VNNI.
#include "int8_vnni.h"

#include "int8_rows_avx512.h"
#include "results_avx512.h"

namespace tilefuse {
namespace {

// Laying codes out for all passes costs about as much as three rows.
constexpr int64_t kManyRows = 32;

bool offset_vnni(const TileLayout&, int64_t m) { return m >= kManyRows; }

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
