// Rows of activations as digits (matmul_kernels.h), on AVX2.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "activations.h"
#include "matmul_kernels.h"

namespace tilefuse {
namespace {

// 8-bit codes fill VPMADDWD's 16 bits with zeros, so their activations may fill them with digits: two of 14 bits,
// x = scale * (d0 + 16384 d1). A group's dot product |D_i - z S_i| is at most (255 + kMaxFoldedZero) 2^13 128 < 2^31.
inline constexpr int kWideDigits = 2;
inline constexpr int kWideBits = 14;

// What 3 bytes hold below the sign is 22 bits of the group's largest magnitude; 2 times 14 bits are 27.
struct ByteDigits {
  static constexpr int kBits = 22;
  static constexpr int kBytes = kDigits * kBlock;  // of a block

  // Digits of 8 scaled activations, in the order in which 4-bit codes come, to out[kDigits][8]. Adds each to `sums`.
  static void store(__m256i value, int8_t* out, __m256i& sums) {
    // Digit i plus 128 is byte i of the value plus 0x808080.
    const __m256i bias = _mm256_set1_epi32(0x808080);
    const __m256i bytes = _mm256_xor_si256(_mm256_add_epi32(value, bias), bias);
    const __m256i planes = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, -1, -1, -1, -1,  //
                                            0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, -1, -1, -1, -1);
    const __m256i halves = _mm256_shuffle_epi8(bytes, planes);
    const __m256i digits = _mm256_permutevar8x32_epi32(halves, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(digits));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 16), _mm256_extracti128_si256(digits, 1));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), digits);
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }

  static __m256 order(__m256 x) { return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)); }

  static void store_sums(__m256i sums, int32_t* out) {
    alignas(32) int32_t s[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(s), sums);
    for (int i = 0; i < kDigits; ++i) out[i] = s[2 * i] + s[2 * i + 1];
  }
};

struct WideDigits {
  static constexpr int kBits = 27;
  static constexpr int kBytes = 2 * kWideDigits * kBlock;

  // To int16 out[kWideDigits][8], input channels in their own order.
  static void store(__m256i value, int8_t* out, __m256i& sums) {
    const __m256i half = _mm256_set1_epi32(1 << (kWideBits - 1));
    const __m256i up = _mm256_add_epi32(value, half);
    const __m256i low = _mm256_sub_epi32(_mm256_and_si256(up, _mm256_set1_epi32((1 << kWideBits) - 1)), half);
    const __m256i halves = _mm256_packs_epi32(low, _mm256_srai_epi32(up, kWideBits));
    const __m256i digits = _mm256_permute4x64_epi64(halves, 0xD8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), digits);
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(digits, _mm256_set1_epi16(1)));
  }

  static __m256 order(__m256 x) { return x; }

  static void store_sums(__m256i sums, int32_t* out) {
    alignas(32) int32_t s[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(s), sums);
    for (int i = 0; i < kWideDigits; ++i) out[i] = s[4 * i] + s[4 * i + 1] + s[4 * i + 2] + s[4 * i + 3];
  }
};

inline float power_of_two(int exponent) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(exponent + 127) << 23);
}

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

// As write_digits (activations.h).
template <class Format>
bool write_digits_avx2(const MatmulArgs& args, int64_t row, int64_t k, float* scratch, int8_t* digits, float* scales,
                       int32_t* sums, DigitRest* rests) {
  const int group = args.layout.tile_group;
  write_row(args, row, k, scratch);
  const DigitRest* const last_rest = rests + rest_capacity(k) - 1;
  for (int64_t g = 0; g < k / group; ++g) {
    const float* x = scratch + g * group;
    const uint32_t largest = largest_magnitude(x, group);
    const auto exponent = static_cast<int>(largest >> 23) - 127;
    // From 2^111 on, a group's sum of code differences (below 2^15 in all) times activations could overflow.
    if (exponent > 110 || (largest != 0 && exponent < -100)) return false;
    // The largest magnitude is below 2^(exponent + 1), scaled below 2^kBits. All-zero: any scale does.
    const float up = largest == 0 ? 0.0F : power_of_two(Format::kBits - 1 - exponent);
    scales[g] = largest == 0 ? 0.0F : power_of_two(exponent - (Format::kBits - 1));
    __m256i group_sums = _mm256_setzero_si256();
    __m256 inexact = _mm256_setzero_ps();
    for (int b = 0; b < group / kBlock; ++b, digits += Format::kBytes) {
      const __m256 scaled = _mm256_mul_ps(Format::order(_mm256_loadu_ps(x + b * kBlock)), _mm256_set1_ps(up));
      const __m256i value = _mm256_cvtps_epi32(scaled);
      inexact = _mm256_or_ps(inexact, _mm256_cmp_ps(_mm256_cvtepi32_ps(value), scaled, _CMP_NEQ_UQ));
      Format::store(value, digits, group_sums);
    }
    Format::store_sums(group_sums, sums + g * kDigits);
    if (_mm256_movemask_ps(inexact) == 0) continue;
    for (int i = 0; i < group; ++i) {
      const float scaled = x[i] * up;
      const float rest = x[i] - static_cast<float>(_mm_cvtss_si32(_mm_set_ss(scaled))) * scales[g];
      if (rest == 0.0F) continue;
      if (rests == last_rest) return false;
      *rests++ = {.k = g * group + i, .value = rest};
    }
  }
  *rests = {.k = kNoRest};
  return true;
}

bool write_digits_avx2(const MatmulArgs& args, int64_t row, int64_t k, float* scratch, int8_t* digits, float* scales,
                       int32_t* sums, DigitRest* rests) {
  return args.layout.bits == 4 ? write_digits_avx2<ByteDigits>(args, row, k, scratch, digits, scales, sums, rests)
                               : write_digits_avx2<WideDigits>(args, row, k, scratch, digits, scales, sums, rests);
}

}  // namespace
}  // namespace tilefuse
