// AVX-512 without VNNI (F, BW, DQ, VL).
#include "simd_avx512.h"

namespace tilefuse {
namespace {

void fused(const TileRun& run, const float* x, int64_t x_stride, int rows, float* acc) {
  fused_w4_f32<Simd16>(run, x, x_stride, rows, acc);
}

}  // namespace

const MatmulKernels& matmul_kernels_avx512() {
  static constexpr MatmulKernels kernels = {
      .fused_w4_f32 = fused,
      .fused_rows_w4 = 2,
      .dequantise = dequantise_f32<Simd16>,
      .panel_rows = panel_rows_f32<Simd16>,
      .passes = nullptr,
  };
  return kernels;
}

}  // namespace tilefuse
