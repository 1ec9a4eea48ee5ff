// Quantises activations (Int8Rows) on AVX512_VNNI.
#pragma once

#include <immintrin.h>

#include "int8_rows.h"
#include "transpose_avx512.h"

namespace tilefuse {
namespace {

inline __m512 load_16_floats(const std::byte* from, int i, Dtype dtype) {
  const auto half = [&] { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * 32)); };
  switch (dtype) {
    case Dtype::f16:
      return _mm512_cvtph_ps(half());
    case Dtype::bf16:
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half()), 16));
    case Dtype::f32:
      break;
  }
  return _mm512_loadu_ps(from + i * 64);
}

void quantise_int8_avx512(const MatmulArgs& args, int64_t row0, int64_t first, int64_t count, bool offset,
                          const Int8Rows& x) {
  constexpr int kVectors = kKt / 16;
  const int groups = args.layout.groups_per_tile();
  const int vectors = kVectors / groups;
  const __m128i even_first = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  const __m512i sign = _mm512_set1_epi8(offset ? static_cast<char>(-128) : 0);
  const auto lanes = static_cast<__mmask16>((1U << x.rows) - 1);
  alignas(64) std::byte piece[kKt * 4];
  alignas(64) int8_t q[kMaxInt8Rows][kKt];
  for (int64_t t = first; t < first + count; ++t) {
    for (int r = 0; r < x.rows; ++r) {
      const std::byte* from = tile_of_row(args, row0 + r, t * kKt, piece);
      __m512 v[kVectors];
      for (int i = 0; i < kVectors; ++i) v[i] = load_16_floats(from, i, args.x_dtype);
      for (int g = 0; g < groups; ++g) {
        __m512i largest = _mm512_setzero_si512();
        for (int i = g * vectors; i < (g + 1) * vectors; ++i) {
          largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(v[i]), magnitude));
        }
        const Int8Rule rule = int8_rule(_mm512_reduce_max_epu32(largest));
        __m512i sums = _mm512_setzero_si512();
        for (int i = g * vectors; i < (g + 1) * vectors; ++i) {
          const __m512 scaled =
              _mm512_mul_ps(_mm512_mul_ps(v[i], _mm512_set1_ps(rule.up)), _mm512_set1_ps(rule.inverse));
          const __m512i rounded = _mm512_cvtps_epi32(scaled);
          sums = _mm512_add_epi32(sums, rounded);
          const __m128i bytes = _mm512_cvtepi32_epi8(rounded);
          _mm_store_si128(reinterpret_cast<__m128i*>(q[r] + i * 16),
                          args.layout.bits == 4 ? _mm_shuffle_epi8(bytes, even_first) : bytes);
        }
        const int64_t at = (t * groups + g) * x.rows + r;
        x.scales[at] = rule.scale;
        x.sums[at] = rule.inverse == 0.0F ? 0 : _mm512_reduce_add_epi32(sums);
      }
    }
    uint32_t* words = x.words + t * x.tile_stride;
    for (int i = 0; i < kInt8TileWords; i += 16) {
      __m512i block[16];
      for (int r = 0; r < 16; ++r) {
        block[r] = r < x.rows ? _mm512_xor_si512(_mm512_load_si512(q[r] + i * 4), sign) : _mm512_setzero_si512();
      }
      transpose_16x16(block);
      for (int j = 0; j < 16; ++j) _mm512_mask_storeu_epi32(words + (i + j) * x.rows, lanes, block[j]);
    }
  }
}

}  // namespace
}  // namespace tilefuse
