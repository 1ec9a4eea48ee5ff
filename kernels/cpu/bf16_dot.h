// The two AVX512_BF16 instructions, or a model of them: a translation unit that defines TILEFUSE_MODEL_BF16 gets the
// same kernels for CPUs that lack the instructions.
#pragma once

#include <immintrin.h>

namespace tilefuse {
namespace {

#ifdef TILEFUSE_MODEL_BF16

// VDPBF16PS: two products and sums, each rounded; low words after high ones, as its description orders them. (The
// instruction also flushes denormals; the model keeps them.)
inline __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)),
                        sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)),
                         sum);
}

inline __m512i bf16_bits(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  // Rounding would carry a NaN into its sign.
  return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
}

// VCVTNE2PS2BF16: words 0..15 from `low`, 16..31 from `high`.
inline __m512i pack_bf16(__m512 low, __m512 high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(bf16_bits(low))),
                            _mm512_cvtepi32_epi16(bf16_bits(high)), 1);
}

#else

inline __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

inline __m512i pack_bf16(__m512 low, __m512 high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)); }

#endif

}  // namespace
}  // namespace tilefuse
