// Activations as digits, sixteen at a time: groups are of 32, 64 or 128.
#include <immintrin.h>

#include "activations_rows.h"

namespace tilefuse {
namespace {

struct Group16 {
  static uint32_t largest_magnitude(const float* x, int group) {
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    __m512i largest = _mm512_setzero_si512();
    for (int i = 0; i < group; i += 16)
      largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
    return _mm512_reduce_max_epu32(largest);
  }

  template <bool kEvenFirst>
  static bool write_digits(const float* x, int group, float up, int8_t* out, int32_t* sums) {
    // Two blocks of eight; in each the order that the kernel's codes come in.
    const __m512i order = kEvenFirst ? _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)
                                     : _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 factor = _mm512_set1_ps(up);
    const __m512 magic = _mm512_set1_ps(kMagic);
    __m512i sum0 = _mm512_setzero_si512();
    __m512i sum1 = sum0;
    __m512i sum2 = sum0;
    __mmask16 inexact = 0;
    for (int i = 0; i < group; i += 16, out += 2 * kDigits * kBlock) {
      const __m512 scaled = _mm512_mul_ps(_mm512_permutexvar_ps(order, _mm512_loadu_ps(x + i)), factor);
      const __m512 shifted = _mm512_add_ps(scaled, magic);
      inexact |= _mm512_cmp_ps_mask(_mm512_sub_ps(shifted, magic), scaled, _CMP_NEQ_OQ);
      const __m512i value = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(kMagicBits));
      // The low byte, sign-extended; then what is left, without it.
      const __m512i d0 = _mm512_srai_epi32(_mm512_slli_epi32(value, 24), 24);
      const __m512i rest = _mm512_srai_epi32(_mm512_sub_epi32(value, d0), 8);
      const __m512i d1 = _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24);
      const __m512i last = _mm512_srai_epi32(_mm512_sub_epi32(rest, d1), 8);
      const __m512i d2 = _mm512_srai_epi32(_mm512_slli_epi32(last, 24), 24);
      sum0 = _mm512_add_epi32(sum0, d0);
      sum1 = _mm512_add_epi32(sum1, d1);
      sum2 = _mm512_add_epi32(sum2, d2);
      const __m128i b0 = _mm512_cvtepi32_epi8(d0);
      const __m128i b1 = _mm512_cvtepi32_epi8(d1);
      const __m128i b2 = _mm512_cvtepi32_epi8(d2);
      auto* at = reinterpret_cast<__m128i*>(out);
      _mm_storeu_si128(at, _mm_unpacklo_epi64(b0, b1));
      _mm_storeu_si128(at + 1, _mm_blend_epi32(b2, b0, 0b1100));
      _mm_storeu_si128(at + 2, _mm_unpackhi_epi64(b1, b2));
    }
    sums[0] = _mm512_reduce_add_epi32(sum0);
    sums[1] = _mm512_reduce_add_epi32(sum1);
    sums[2] = _mm512_reduce_add_epi32(sum2);
    return inexact == 0;
  }
};

}  // namespace

bool write_digits_avx512(const MatmulArgs& args, int64_t row, int64_t k, float* scratch, int8_t* digits, float* scales,
                         int32_t* sums, DigitRest* rests) {
  return write_digits_by<Group16>(args, row, k, scratch, digits, scales, sums, rests);
}

}  // namespace tilefuse
