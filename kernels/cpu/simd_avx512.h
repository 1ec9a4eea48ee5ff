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

  // An 8x8 block of bytes is one register. Within each 128-bit lane (two output channels) a byte shuffle pairs the two
  // channels' bytes of every input channel; a word permutation then gathers the four lanes' pairs.
  static __m512i transpose_8x8(const std::byte* block) {
    const __m512i pair = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    const __m512i words = _mm512_set_epi16(31, 23, 15, 7, 30, 22, 14, 6, 29, 21, 13, 5, 28, 20, 12, 4, 27, 19, 11, 3,
                                           26, 18, 10, 2, 25, 17, 9, 1, 24, 16, 8, 0);
    return _mm512_permutexvar_epi16(words, _mm512_shuffle_epi8(_mm512_loadu_si512(block), pair));
  }

  template <int j>
  static void store_w8_row(__m512i channels, const GroupAffine& affine, int n, float* panel) {
    const F q = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(channels, j / 2)));
    store_f(panel + j * kNt + n, fma(q, load_f(affine.scale + n), load_f(affine.offset + n)));
  }

  static void dequantise_w8_block_row(const std::byte* codes, const GroupAffine& affine, float* panel) {
    for (int n = 0; n < kNt; n += 16) {
      const __m512i a = transpose_8x8(codes + n * 8);
      const __m512i b = transpose_8x8(codes + n * 8 + 64);
      // 128-bit lane i: sixteen output channels of input channel 2 i (even) or 2 i + 1 (odd).
      const __m512i even = _mm512_unpacklo_epi64(a, b);
      const __m512i odd = _mm512_unpackhi_epi64(a, b);
      store_w8_row<0>(even, affine, n, panel);
      store_w8_row<1>(odd, affine, n, panel);
      store_w8_row<2>(even, affine, n, panel);
      store_w8_row<3>(odd, affine, n, panel);
      store_w8_row<4>(even, affine, n, panel);
      store_w8_row<5>(odd, affine, n, panel);
      store_w8_row<6>(even, affine, n, panel);
      store_w8_row<7>(odd, affine, n, panel);
    }
  }
};

}  // namespace
}  // namespace tilefuse
