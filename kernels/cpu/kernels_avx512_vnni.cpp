// AVX-512 with VNNI: few rows in exact integers, panels in float.
#include "fused_digits.h"
#include "simd_avx512.h"

namespace tilefuse {

const MatmulKernels& matmul_kernels_avx512_vnni() {
  static constexpr FewRowsKernels few = few_rows_vnni([](const TileLayout&) { return 4; });
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
