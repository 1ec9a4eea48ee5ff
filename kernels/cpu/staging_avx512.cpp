// Staging at the AVX-512 levels: four rows of eight channels a register.
#include <immintrin.h>

#include "staging_kernels.h"

namespace tilefuse {
namespace {

struct Rows4 {
  static constexpr int kRows = 4;
  using V = __m512i;

  static V load(const uint16_t* p) {
    const auto row = [p](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + r * kKt)); };
    V v = _mm512_castsi128_si512(row(0));
    v = _mm512_inserti32x4(v, row(1), 1);
    v = _mm512_inserti32x4(v, row(2), 2);
    return _mm512_inserti32x4(v, row(3), 3);
  }
  static V set1(int x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); }
  static V and_(V a, V b) { return _mm512_and_si512(a, b); }
  static V or_(V a, V b) { return _mm512_or_si512(a, b); }
  static V xor_(V a, V b) { return _mm512_xor_si512(a, b); }
  static V add(V a, V b) { return _mm512_add_epi16(a, b); }
  static V sub(V a, V b) { return _mm512_sub_epi16(a, b); }
  static V max(V a, V b) { return _mm512_max_epi16(a, b); }
  static V greater(V a, V b) { return _mm512_movm_epi16(_mm512_cmpgt_epi16_mask(a, b)); }
  static V equal(V a, V b) { return _mm512_movm_epi16(_mm512_cmpeq_epi16_mask(a, b)); }
  static V multiply_high(V a, V b) { return _mm512_mulhi_epu16(a, b); }
  static V multiply_low(V a, V b) { return _mm512_mullo_epi16(a, b); }
  template <int n>
  static V shift_right(V v) {
    return _mm512_srli_epi16(v, n);
  }
  static V lane_max(V v) {
    v = max(v, _mm512_shuffle_epi32(v, static_cast<_MM_PERM_ENUM>(0x4e)));
    v = max(v, _mm512_shuffle_epi32(v, static_cast<_MM_PERM_ENUM>(0xb1)));
    return max(v, _mm512_rol_epi32(v, 16));
  }
  static V power(V i) {
    const V table = _mm512_broadcast_i32x4(_mm_setr_epi8(0, -128, 64, 32, 16, 8, 4, 2, 1, 0, 0, 0, 0, 0, 0, 0));
    // The upper byte of a lane looks up the power's; the lower byte, of index 128, is 0.
    const V index = or_(_mm512_slli_epi16(_mm512_min_epi16(i, set1(15)), 8), set1(0x80));
    return _mm512_shuffle_epi8(table, index);
  }
  static V with_sign(V v, V sign) {
    return _mm512_mask_sub_epi16(v, _mm512_movepi16_mask(sign), _mm512_setzero_si512(), v);
  }
  static void store(std::byte* out, V mantissas, V exponents) {
    const __m256i bytes = _mm512_cvtepi16_epi8(mantissas);
    const __m256i tops = _mm512_cvtepi16_epi8(exponents);
    store_two(out, _mm256_castsi256_si128(bytes), _mm256_castsi256_si128(tops));
    store_two(out + 18, _mm256_extracti128_si256(bytes, 1), _mm256_extracti128_si256(tops, 1));
  }
  static uint16_t largest(V lane_maxima) {
    const __m512i pairs = max(lane_maxima, _mm512_shuffle_i64x2(lane_maxima, lane_maxima, 0x4e));
    const __m512i all = max(pairs, _mm512_shuffle_i64x2(pairs, pairs, 0xb1));
    return static_cast<uint16_t>(_mm_extract_epi16(_mm512_castsi512_si128(all), 0));
  }

 private:
  static void store_two(std::byte* out, __m128i bytes, __m128i tops) {
    out[0] = static_cast<std::byte>(_mm_extract_epi8(tops, 0));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 1), bytes);
    out[9] = static_cast<std::byte>(_mm_extract_epi8(tops, 8));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 10), _mm_unpackhi_epi64(bytes, bytes));
  }
};

}  // namespace

const StagingKernels& staging_kernels_avx512() {
  static constexpr StagingKernels kernels = {.load = load_row, .write_band = write_band<Rows4>};
  return kernels;
}

}  // namespace tilefuse
