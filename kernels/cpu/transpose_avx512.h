// A transposition in registers.
#pragma once

#include <immintrin.h>

namespace tilefuse {
namespace {

// 16x16 words, transposed.
inline void transpose_16x16(__m512i (&v)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  // v[4 b + c]: of rows 4 b .. 4 b + 3, column 4 l + c in 128-bit lane l.
  for (int b = 0; b < 16; b += 4) {
    v[b] = _mm512_unpacklo_epi64(t[b], t[b + 2]);
    v[b + 1] = _mm512_unpackhi_epi64(t[b], t[b + 2]);
    v[b + 2] = _mm512_unpacklo_epi64(t[b + 1], t[b + 3]);
    v[b + 3] = _mm512_unpackhi_epi64(t[b + 1], t[b + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512i low_01 = _mm512_shuffle_i32x4(v[c], v[4 + c], 0x44);
    const __m512i high_01 = _mm512_shuffle_i32x4(v[c], v[4 + c], 0xEE);
    const __m512i low_23 = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0x44);
    const __m512i high_23 = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0xEE);
    t[c] = _mm512_shuffle_i32x4(low_01, low_23, 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(low_01, low_23, 0xDD);
    t[8 + c] = _mm512_shuffle_i32x4(high_01, high_23, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(high_01, high_23, 0xDD);
  }
  for (int i = 0; i < 16; ++i) v[i] = t[i];
}

}  // namespace
}  // namespace tilefuse
