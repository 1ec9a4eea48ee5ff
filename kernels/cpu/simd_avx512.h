// The SIMD type of the float kernels on AVX-512, shared by the AVX-512 translation units.
#pragma once

#include <immintrin.h>

#include "kernels_f32.h"

namespace tilefuse {
namespace {

struct Simd16 {
  static constexpr int kLanes = 16;
  static constexpr int kPanelVectors = 4;  // 6 rows x 4 vectors = 24 of 32 registers
  static constexpr int kFusedVectors = 4;
  using F = __m512;
  using I = __m512i;

  static F load_f(const float* p) { return _mm512_loadu_ps(p); }
  static void store_f(float* p, F v) { _mm512_storeu_ps(p, v); }
  static I load_i(const std::byte* p) { return _mm512_loadu_si512(p); }
  static I load_u8(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F to_float(I v) { return _mm512_cvtepi32_ps(v); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  // VPERMPS reads only the low four bits of an index: a table of 0..15 masks and converts in one instruction.
  template <int j>
  static F nibble_to_float(I v) {
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(j == 0 ? v : _mm512_srli_epi32(v, 4 * j), table);
  }
};

}  // namespace
}  // namespace tilefuse
