// Few rows of activations as integer digits, on AVX2. Split so that few of the lowest are other than zero: kernels look
// those up instead of multiplying by all.
//
// In each group of tile_group input channels x = scale (low + kBase high), scale a power of two. 4-bit codes: `high` is
// two signed bytes, high = h0 + 256 h1, and `low` is one, so that x has 23 bits below the group's largest magnitude.
// 8-bit codes: `high` has 16 bits, `low` 12, x 27. Of normally distributed activations, which have 8 significant bits,
// one in a hundred has a low digit.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "activations.h"
#include "digits.h"

namespace tilefuse {
namespace {

inline constexpr int kMaxGroupBlocks = kKt / kBlock;

// One group of one row. Its dot product is low_scale (L - z low_sum) + high_scale (H - z high_sum), L and H those of
// the codes with `low` and `high`.
struct alignas(64) DigitGroup {
  float low_scale;
  float high_scale;
  int32_t low_sum;
  int32_t high_sum;
  float x_sum;        // of x over the group
  int32_t low_count;  // blocks that have low digits, and which of the group these are
  uint8_t low_blocks[kMaxGroupBlocks];
};

// What follows the digits of 4-bit codes. `high` of a block of 8 input channels is h0[8] h1[8], in the order 0 2 4 6
// 1 3 5 7 in which codes come.
struct ByteDigits {
  static constexpr int kHighBytes = 2 * kBlock;  // of a block
  static constexpr int kLowBytes = kBlock;
  static constexpr float kBase = 256.0F;

  // The power of two, as an exponent, that scales activations below 2^(exponent + 1): h1 would not hold 255 / 256 2^23.
  static int scale_exponent(uint32_t largest, int exponent) {
    return 22 - exponent - ((largest & 0x7F0000) == 0x7F0000);
  }

  static __m256 order(__m256 x) { return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)); }

  // Adds to sums[8]: two lanes a digit.
  static void store(__m256i value, int8_t* high, int8_t* low, __m256i& sums) {
    // Digit i plus 128 is byte i of the value plus 0x808080.
    const __m256i bias = _mm256_set1_epi32(0x808080);
    const __m256i bytes = _mm256_xor_si256(_mm256_add_epi32(value, bias), bias);
    const __m256i planes = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, -1, -1, -1, -1,  //
                                            0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, -1, -1, -1, -1);
    const __m256i halves = _mm256_shuffle_epi8(bytes, planes);
    const __m256i digits = _mm256_permutevar8x32_epi32(halves, _mm256_setr_epi32(1, 5, 2, 6, 0, 4, 3, 7));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm256_castsi256_si128(digits));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(low), _mm256_extracti128_si256(digits, 1));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), digits);
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }

  static void store_sums(const int32_t* s, DigitGroup& group) {
    group.low_sum = s[4] + s[5];
    group.high_sum = s[0] + s[1] + 256 * (s[2] + s[3]);
  }

  static bool has_low(__m256i value) { return _mm256_testz_si256(value, _mm256_set1_epi32(255)) == 0; }
};

// The same for 8-bit codes: `high` and `low` are int16 [8], input channels in their own order.
struct WideDigits {
  static constexpr int kHighBytes = 2 * kBlock;
  static constexpr int kLowBytes = 2 * kBlock;
  static constexpr int kLowBits = 12;
  static constexpr float kBase = 1 << kLowBits;

  static int scale_exponent(uint32_t /*largest*/, int exponent) { return 26 - exponent; }

  static __m256 order(__m256 x) { return x; }

  // Adds to sums[8]: four lanes a digit.
  static void store(__m256i value, int8_t* high, int8_t* low, __m256i& sums) {
    const __m256i half = _mm256_set1_epi32(1 << (kLowBits - 1));
    const __m256i up = _mm256_add_epi32(value, half);
    const __m256i low_digits = _mm256_sub_epi32(_mm256_and_si256(up, _mm256_set1_epi32((1 << kLowBits) - 1)), half);
    const __m256i halves = _mm256_packs_epi32(_mm256_srai_epi32(up, kLowBits), low_digits);
    const __m256i digits = _mm256_permute4x64_epi64(halves, 0xD8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm256_castsi256_si128(digits));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm256_extracti128_si256(digits, 1));
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(digits, _mm256_set1_epi16(1)));
  }

  static void store_sums(const int32_t* s, DigitGroup& group) {
    group.low_sum = s[4] + s[5] + s[6] + s[7];
    group.high_sum = s[0] + s[1] + s[2] + s[3];
  }

  static bool has_low(__m256i value) { return _mm256_testz_si256(value, _mm256_set1_epi32((1 << kLowBits) - 1)) == 0; }
};

inline uint32_t largest_magnitude(const float* x, int count) {
  const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < count; i += 8) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, mask));
  }
  __m128i half = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4E));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(half));
}

// One row; false if the digits can't hold it, for the reasons that write_digits_vnni gives.
template <class Format>
bool write_digit_row(const MatmulArgs& args, int64_t row, const DigitMemory<DigitGroup>& at, std::byte* memory,
                     float* scratch) {
  auto* rest = reinterpret_cast<DigitRest*>(memory);
  const DigitRest* const last_rest = rest + at.rests - 1;
  auto* groups = reinterpret_cast<DigitGroup*>(memory + at.group_at);
  auto* high = reinterpret_cast<int8_t*>(memory + at.high_at);
  auto* low = reinterpret_cast<int8_t*>(memory + at.low_at);
  const int count = args.layout.tile_group;
  write_row(args, row, at.k, scratch);
  for (int64_t g = 0; g < at.groups; ++g) {
    const float* x = scratch + g * count;
    DigitGroup& group = groups[g];
    const uint32_t largest = largest_magnitude(x, count);
    const auto exponent = static_cast<int>(largest >> 23) - 127;
    // From 2^111 on, a group's sum of code differences (below 2^15 in all) times activations could overflow.
    if (exponent > 110 || (largest != 0 && exponent < -100)) return false;
    const int up_exponent = largest == 0 ? 0 : Format::scale_exponent(largest, exponent);
    const float up = power_of_two(up_exponent);
    const float scale = power_of_two(-up_exponent);
    group.low_scale = scale;
    group.high_scale = scale * Format::kBase;
    group.low_count = 0;
    __m256i sums = _mm256_setzero_si256();
    __m256 inexact = _mm256_setzero_ps();
    for (int b = 0; b < count / kBlock; ++b, high += Format::kHighBytes, low += Format::kLowBytes) {
      const __m256 scaled = _mm256_mul_ps(Format::order(_mm256_loadu_ps(x + b * kBlock)), _mm256_set1_ps(up));
      const __m256i value = _mm256_cvtps_epi32(scaled);
      inexact = _mm256_or_ps(inexact, _mm256_cmp_ps(_mm256_cvtepi32_ps(value), scaled, _CMP_NEQ_UQ));
      Format::store(value, high, low, sums);
      group.low_blocks[group.low_count] = static_cast<uint8_t>(b);
      group.low_count += Format::has_low(value) ? 1 : 0;
    }
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sums);
    Format::store_sums(lanes, group);
    group.x_sum =
        group.high_scale * static_cast<float>(group.high_sum) + group.low_scale * static_cast<float>(group.low_sum);
    if (_mm256_movemask_ps(inexact) == 0) continue;
    for (int i = 0; i < count; ++i) {
      const float value = x[i] - static_cast<float>(_mm_cvtss_si32(_mm_set_ss(x[i] * up))) * scale;
      if (value == 0.0F) continue;
      if (rest == last_rest) return false;
      *rest++ = {.k = g * count + i, .value = value};
    }
  }
  *rest = {.k = kNoRest};
  return true;
}

inline int64_t digit_row_bytes(const TileLayout& layout) { return DigitMemory<DigitGroup>(layout).row_bytes; }

inline int64_t digit_scratch_bytes(const TileLayout& layout) { return DigitMemory<DigitGroup>(layout).k * 4; }

inline bool write_digits_avx2(const MatmulArgs& args, int64_t row, std::byte* digits, std::byte* scratch) {
  const DigitMemory<DigitGroup> at(args.layout);
  const auto write = args.layout.bits == 4 ? write_digit_row<ByteDigits> : write_digit_row<WideDigits>;
  return write(args, row, at, digits, reinterpret_cast<float*>(scratch));
}

}  // namespace
}  // namespace tilefuse
