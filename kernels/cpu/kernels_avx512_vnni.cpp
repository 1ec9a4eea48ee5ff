// AVX-512 with VNNI: all rows in exact integers; panels in float for what digits can't hold.
#include <climits>

#include "fused_digits.h"
#include "simd_avx512.h"

namespace tilefuse {

const MatmulKernels& matmul_kernels_avx512_vnni() {
  // Measured on Zen 4, digits are the faster way at any number of rows: 1.1 (groups of 32) to 1.6 times.
  static constexpr FewRowsKernels few = few_rows_vnni([](const TileLayout&) { return INT_MAX; });
  static constexpr MatmulKernels kernels = {
      .fused_w4_f32 = nullptr,
      .fused_rows_w4 = 0,
      .few = &few,
      .dequantise = dequantise_f32<Simd16>,
      .panel_rows = panel_rows_f32<Simd16>,
      .passes = nullptr,
  };
  return kernels;
}

}  // namespace tilefuse
