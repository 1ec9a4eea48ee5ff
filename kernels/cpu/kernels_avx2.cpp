// The AVX2 + FMA level. Compiled with -mavx2 -mfma; called only where cpu_features.h found both.
#include <immintrin.h>

#include "fused_digits_avx2.h"
#include "kernels_f32.h"

namespace tilefuse {
namespace {

struct Simd8 {
  static constexpr int kLanes = 8;
  static constexpr int kPanelVectors = 2;  // 6 rows x 2 vectors = 12 of 16 registers
  static constexpr int kFusedVectors = 4;
  using F = __m256;
  using I = __m256i;

  static F load_f(const float* p) { return _mm256_loadu_ps(p); }
  static void store_f(float* p, F v) { _mm256_storeu_ps(p, v); }
  static I load_i(const std::byte* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static I load_u8(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F to_float(I v) { return _mm256_cvtepi32_ps(v); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  template <int j>
  static F nibble_to_float(I v) {
    return to_float(_mm256_and_si256(_mm256_srli_epi32(v, 4 * j), _mm256_set1_epi32(15)));
  }
};

}  // namespace

const MatmulKernels& matmul_kernels_avx2() {
  static constexpr MatmulKernels kernels = {
      .fused_w4_f32 = nullptr,
      .fused_rows_w4 = 0,
      .few = &kFewRowsAvx2,
      .dequantise = dequantise_f32<Simd8>,
      .panel_rows = panel_rows_f32<Simd8>,
      .passes = nullptr,
  };
  return kernels;
}

}  // namespace tilefuse
