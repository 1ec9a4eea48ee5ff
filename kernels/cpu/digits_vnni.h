// Few rows of activations as integer digits, on AVX512_VNNI.
//
// In each group of tile_group input channels x = scale (d0 + 256 d1 + 65536 d2) with signed 8-bit digits and a power of
// two as scale. That is 23 bits below the group's largest magnitude: an element down to 2^-15 of the largest keeps all
// 8 bits of its bfloat16 significand. What a smaller one loses is listed beside them, so that an outlier doesn't drown
// its group. An element down to 2^-7 of the largest has no d0: of normally distributed activations one in a hundred
// has, of a language model's two to eight in a hundred, and kernels look these up.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "activations.h"
#include "digits.h"
#include "tile_of_row.h"

namespace tilefuse {
namespace {

inline constexpr int kDigits = 3;

// One group of one row.
struct alignas(32) DigitGroup {
  float scale = 0.0F;
  float x_sum = 0.0F;        // of x over the group
  float sums[kDigits] = {};  // of each digit, exactly
  uint32_t low_parts = 0;    // which parts of the group have a d0 other than zero
};

// Digits of a block of 8 input channels: d1[8] d2[8] in the upper plane, d0[8] in the lower. 4-bit codes: the channels
// in the order 0 2 4 6 1 3 5 7, in which codes come; a part is half a block, 4 of these. 8-bit codes: in their own
// order; a part is a block.
inline constexpr int kHighBytes = 2 * kBlock;
inline constexpr int kLowBytes = kBlock;

// 16 activations as floats, not yet rounded.
inline __m512 load_floats(const std::byte* from, Dtype dtype, int i) {
  if (dtype == Dtype::f32) return _mm512_loadu_ps(from + i * 4);
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * 2));
  if (dtype == Dtype::f16) return _mm512_cvtph_ps(raw);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

// To bfloat16, to nearest even. Not for NaN.
inline __m512 round_floats(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xFFFF0000U))));
}

struct GroupWriter {
  __m512i planes;  // bytes of 4 channels -> words of two channels' d1, d1, d2, d2, d0, d0
  __m512i words;   // those of 16 channels -> d1 d2 of the first block, of the second, d0 of both
  bool w4;

  explicit GroupWriter(const TileLayout& layout) : w4(layout.bits == 4) {
    const __m128i even_odd = _mm_setr_epi8(1, 9, 5, 13, 2, 10, 6, 14, 0, 8, 4, 12, -1, -1, -1, -1);
    const __m128i in_order = _mm_setr_epi8(1, 5, 9, 13, 2, 6, 10, 14, 0, 4, 8, 12, -1, -1, -1, -1);
    const __m512i interleaved = _mm512_set_epi16(31, 31, 31, 31, 31, 31, 31, 31, 29, 21, 28, 20, 13, 5, 12, 4,  //
                                                 27, 19, 26, 18, 25, 17, 24, 16, 11, 3, 10, 2, 9, 1, 8, 0);
    const __m512i neighbours = _mm512_set_epi16(31, 31, 31, 31, 31, 31, 31, 31, 29, 28, 21, 20, 13, 12, 5, 4,  //
                                                27, 26, 19, 18, 25, 24, 17, 16, 11, 10, 3, 2, 9, 8, 1, 0);
    planes = _mm512_broadcast_i32x4(w4 ? even_odd : in_order);
    words = w4 ? interleaved : neighbours;
  }

  // The digits of x[count], bfloat16 values below 2^23 scaled by `up`; whether they hold all of it.
  bool write(const float* x, int count, float up, int8_t* high, int8_t* low, DigitGroup& group) const {
    const __m512 factor = _mm512_set1_ps(up);
    // Digit i plus 128 is byte i of the value plus 0x808080.
    const __m512i bias = _mm512_set1_epi32(0x808080);
    __m512i sums = _mm512_setzero_si512();
    __mmask16 inexact = 0;
    uint64_t low_parts = 0;
    for (int i = 0; i < count; i += 16, high += 2 * kHighBytes, low += 2 * kLowBytes) {
      const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(x + i), factor);
      const __m512i value = _mm512_cvtps_epi32(scaled);
      inexact |= _mm512_cmp_ps_mask(_mm512_cvtepi32_ps(value), scaled, _CMP_NEQ_OQ);
      const __m512i bytes = _mm512_xor_si512(_mm512_add_epi32(value, bias), bias);
      const __m512i digits = _mm512_permutexvar_epi16(words, _mm512_shuffle_epi8(bytes, planes));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_castsi512_si256(digits));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_extracti32x4_epi32(digits, 2));
      sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), digits);
      if (w4) {
        low_parts |= (uint64_t{_mm512_test_epi32_mask(digits, digits)} >> 8 & 15U) << (i / 4);
      } else {
        low_parts |= (uint64_t{_mm512_test_epi64_mask(digits, digits)} >> 4 & 3U) << (i / 8);
      }
    }
    alignas(64) int32_t lanes[16];
    _mm512_store_si512(lanes, sums);
    group.sums[0] = static_cast<float>(lanes[8] + lanes[9] + lanes[10] + lanes[11]);
    group.sums[1] = static_cast<float>(lanes[0] + lanes[1] + lanes[4] + lanes[5]);
    group.sums[2] = static_cast<float>(lanes[2] + lanes[3] + lanes[6] + lanes[7]);
    group.x_sum = group.scale * (group.sums[0] + 256.0F * group.sums[1] + 65536.0F * group.sums[2]);
    group.low_parts = static_cast<uint32_t>(low_parts);
    return inexact == 0;
  }
};

// One row. False if it can't be held: it has a NaN or Inf, a group whose largest magnitude is below 2^-100 but not zero
// (its scale would be denormal), or too many rests; the float kernels take such rows.
bool write_digits_vnni(const MatmulArgs& args, int64_t row, std::byte* memory, std::byte* /*scratch*/) {
  const DigitMemory<DigitGroup> at(args.layout);
  auto* rest = reinterpret_cast<DigitRest*>(memory);
  const DigitRest* const last_rest = rest + at.rests - 1;
  auto* groups = reinterpret_cast<DigitGroup*>(memory + at.group_at);
  auto* high = reinterpret_cast<int8_t*>(memory + at.high_at);
  auto* low = reinterpret_cast<int8_t*>(memory + at.low_at);
  const int count = args.layout.tile_group;
  const GroupWriter writer(args.layout);
  alignas(64) std::byte piece[kKt * 4];
  for (int64_t k0 = 0; k0 < at.k; k0 += count, ++groups, high += count * 2, low += count) {
    const std::byte* from = tile_of_row(args, row, k0 / kKt * kKt, piece);
    from += k0 % kKt * item_size(args.x_dtype);
    alignas(64) float x[kKt];
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < count; i += 16) {
      const __m512 given = load_floats(from, args.x_dtype, i);
      most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(given), _mm512_set1_epi32(0x7FFFFFFF)));
      _mm512_store_ps(x + i, args.x_dtype == Dtype::bf16 ? given : round_floats(given));
    }
    const uint32_t unrounded = _mm512_reduce_max_epu32(most);
    if (unrounded >= kFloatExponent) return false;
    const uint32_t largest = static_cast<uint32_t>(float_bits_to_bf16(unrounded)) << 16;
    const auto exponent = static_cast<int>(largest >> 23) - 127;
    // From 2^111 on, a group's sum of code differences (below 2^15 in all) times activations could overflow.
    if (exponent > 110 || (largest != 0 && exponent < -100)) return false;
    // Below 255 / 256 2^23, which is what d2 holds. All-zero: any scale does.
    const int up = largest == 0 ? 0 : 22 - exponent - ((largest & 0x7F0000) == 0x7F0000);
    groups->scale = power_of_two(-up);
    if (writer.write(x, count, power_of_two(up), high, low, *groups)) continue;
    for (int i = 0; i < count; ++i) {
      const float held = static_cast<float>(_mm_cvtss_si32(_mm_set_ss(x[i] * power_of_two(up)))) * groups->scale;
      if (x[i] == held) continue;
      if (rest == last_rest) return false;
      *rest++ = {.k = k0 + i, .value = x[i] - held};
    }
  }
  *rest = {.k = kNoRest};
  return true;
}

}  // namespace
}  // namespace tilefuse
