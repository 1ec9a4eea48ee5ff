// Staging at the AVX2 level: two rows of eight channels a register.
#include <immintrin.h>

#include "staging_kernels.h"

namespace tilefuse {
namespace {

struct Rows2 {
  static constexpr int kRows = 2;
  using V = __m256i;

  static V load(const uint16_t* p) {
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + kKt));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
  }
  static V set1(int x) { return _mm256_set1_epi16(static_cast<int16_t>(x)); }
  static V and_(V a, V b) { return _mm256_and_si256(a, b); }
  static V or_(V a, V b) { return _mm256_or_si256(a, b); }
  static V xor_(V a, V b) { return _mm256_xor_si256(a, b); }
  static V add(V a, V b) { return _mm256_add_epi16(a, b); }
  static V sub(V a, V b) { return _mm256_sub_epi16(a, b); }
  static V max(V a, V b) { return _mm256_max_epi16(a, b); }
  static V greater(V a, V b) { return _mm256_cmpgt_epi16(a, b); }
  static V equal(V a, V b) { return _mm256_cmpeq_epi16(a, b); }
  static V multiply_high(V a, V b) { return _mm256_mulhi_epu16(a, b); }
  static V multiply_low(V a, V b) { return _mm256_mullo_epi16(a, b); }
  template <int n>
  static V shift_right(V v) {
    return _mm256_srli_epi16(v, n);
  }
  static V lane_max(V v) {
    v = max(v, _mm256_shuffle_epi32(v, 0x4e));
    v = max(v, _mm256_shuffle_epi32(v, 0xb1));
    return max(v, or_(_mm256_slli_epi32(v, 16), _mm256_srli_epi32(v, 16)));
  }
  static V power(V i) {
    const V table = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -128, 64, 32, 16, 8, 4, 2, 1, 0, 0, 0, 0, 0, 0, 0));
    // The upper byte of a lane looks up the power's; the lower byte, of index 128, is 0.
    const V index = or_(_mm256_slli_epi16(_mm256_min_epi16(i, set1(15)), 8), set1(0x80));
    return _mm256_shuffle_epi8(table, index);
  }
  static V with_sign(V v, V sign) { return _mm256_sign_epi16(v, or_(sign, set1(1))); }
  static void store(std::byte* out, V mantissas, V exponents) {
    const V bytes = _mm256_packs_epi16(mantissas, mantissas);
    out[0] = static_cast<std::byte>(_mm256_extract_epi16(exponents, 0));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 1), _mm256_castsi256_si128(bytes));
    out[9] = static_cast<std::byte>(_mm256_extract_epi16(exponents, 8));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 10), _mm256_extracti128_si256(bytes, 1));
  }
  static uint16_t largest(V lane_maxima) {
    const __m128i both = _mm_max_epi16(_mm256_castsi256_si128(lane_maxima), _mm256_extracti128_si256(lane_maxima, 1));
    return static_cast<uint16_t>(_mm_extract_epi16(both, 0));
  }
};

}  // namespace

const StagingKernels& staging_kernels_avx2() {
  static constexpr StagingKernels kernels = {.load = load_row, .write_band = write_band<Rows2>};
  return kernels;
}

}  // namespace tilefuse
