// The portable level: GCC/Clang vector extensions, four floats at a time; becomes SSE2, NEON or scalar code.
#include "kernels_f32.h"

namespace tilefuse {
namespace {

struct Simd4 {
  static constexpr int kLanes = 4;
  static constexpr int kPanelVectors = 2;
  static constexpr int kFusedVectors = 2;
  using F = float __attribute__((vector_size(16)));
  using I = uint32_t __attribute__((vector_size(16)));

  static F load_f(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void store_f(float* p, F v) { std::memcpy(p, &v, sizeof(v)); }
  static I load_i(const std::byte* p) {
    I v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static I load_u8(const uint8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
  static F set1(float x) { return F{x, x, x, x}; }
  // The lanes are below 2^31, so the signed conversion (one instruction on SSE2) is the same.
  static F to_float(I v) {
    using S = int32_t __attribute__((vector_size(16)));
    return __builtin_convertvector(reinterpret_cast<S>(v), F);
  }
  static F fma(F a, F b, F c) { return a * b + c; }
  template <int j>
  static F nibble_to_float(I v) {
    return to_float((v >> (4 * j)) & 15U);
  }
};

void fused(const TileRun& run, const float* x, int64_t x_stride, int rows, float* acc) {
  fused_w4_f32<Simd4>(run, x, x_stride, rows, acc);
}

}  // namespace

const MatmulKernels& matmul_kernels_portable() {
  static constexpr MatmulKernels kernels = {
      .fused_w4_f32 = fused,
      .fused_rows_w4 = 2,
      .dequantise = dequantise_f32<Simd4>,
      .panel_rows = panel_rows_f32<Simd4>,
      .passes = nullptr,
  };
  return kernels;
}

}  // namespace tilefuse
