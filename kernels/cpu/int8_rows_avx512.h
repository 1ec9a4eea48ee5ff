// Quantises activations (Int8Rows) on AVX512_VNNI.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "int8_rows.h"
#include "prefetch.h"
#include "transpose_avx512.h"

namespace tilefuse {
namespace {

constexpr int kVectorsOfTile = kKt / 16;

// Tiles of a row that are quantised before those of the next: rows of x lie far apart, and prefetchers need a run.
constexpr int64_t kTilesInTurn = 8;

template <Dtype kDtype>
inline __m512 load_16_floats(const std::byte* from, int i) {
  if constexpr (kDtype == Dtype::f32) {
    return _mm512_loadu_ps(from + i * 64);
  } else {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * 32));
    if constexpr (kDtype == Dtype::f16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
}

// 64 integers of 8 bits, in the order of Int8Rows' bytes.
inline __m512i to_bytes(const __m512i* v, int bits) {
  const __m512i pairs = _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_permutexvar_epi32(in_order, pairs);
  if (bits == 8) return bytes;
  const __m128i even_first = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  return _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(even_first));
}

inline int32_t sum_of_lanes(__m256i v) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
}

// One row's k tile to q[kKt]; scales and sums of its groups, `stride` apart.
template <Dtype kDtype, int kGroups>
inline void quantise_tile(const std::byte* from, int bits, int8_t* q, float* scales, int32_t* sums, int64_t stride) {
  constexpr int kVectors = kVectorsOfTile / kGroups;
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512 v[kVectorsOfTile];
#pragma GCC unroll 8
  for (int i = 0; i < kVectorsOfTile; ++i) v[i] = load_16_floats<kDtype>(from, i);
  __m512i integers[kVectorsOfTile];
  bool finite[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) {
    __m512i largest = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = g * kVectors; i < (g + 1) * kVectors; ++i) {
      largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(v[i]), magnitude));
    }
    const Int8Rule rule = int8_rule(_mm512_reduce_max_epu32(largest));
    scales[g * stride] = rule.scale;
    finite[g] = rule.inverse != 0.0F;
    const __m512 up = _mm512_set1_ps(rule.up);
    const __m512 inverse = _mm512_set1_ps(rule.inverse);
#pragma GCC unroll 8
    for (int i = g * kVectors; i < (g + 1) * kVectors; ++i) {
      integers[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_mul_ps(v[i], up), inverse));
    }
  }
  __m256i sums_of_32[4];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m512i bytes = to_bytes(integers + h * 4, bits);
    _mm512_store_si512(q + h * 64, bytes);
    const __m512i of_four = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
    sums_of_32[h * 2] = _mm512_castsi512_si256(of_four);
    sums_of_32[h * 2 + 1] = _mm512_extracti64x4_epi64(of_four, 1);
  }
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) {
    __m256i sum = sums_of_32[g * 4 / kGroups];
#pragma GCC unroll 4
    for (int i = 1; i < 4 / kGroups; ++i) sum = _mm256_add_epi32(sum, sums_of_32[g * 4 / kGroups + i]);
    sums[g * stride] = finite[g] ? sum_of_lanes(sum) : 0;
  }
}

// Words of one k tile, interleaved, from q[r * stride].
inline void interleave(const int8_t* q, int64_t stride, int rows, bool offset, uint32_t* words) {
  const __m512i sign = _mm512_set1_epi8(offset ? static_cast<char>(-128) : 0);
  const auto lanes = static_cast<__mmask16>((1U << rows) - 1);
  for (int i = 0; i < kInt8TileWords; i += 16) {
    __m512i block[16];
    for (int r = 0; r < 16; ++r) {
      block[r] = r < rows ? _mm512_xor_si512(_mm512_load_si512(q + r * stride + i * 4), sign) : sign;
    }
    transpose_16x16(block);
    for (int j = 0; j < 16; ++j) {
      // Whole vectors, as long as the next ones overwrite what is too much.
      uint32_t* to = words + (i + j) * rows;
      if ((i + j) * rows + 16 <= kInt8TileWords * rows) {
        _mm512_storeu_si512(to, block[j]);
      } else {
        _mm512_mask_storeu_epi32(to, lanes, block[j]);
      }
    }
  }
}

template <Dtype kDtype, int kGroups>
void quantise_rows(const MatmulArgs& args, int64_t row0, int64_t first, int64_t count, bool offset, const Int8Rows& x) {
  constexpr int64_t kStride = kTilesInTurn * kKt;
  alignas(64) std::byte piece[kKt * 4];
  alignas(64) int8_t q[kMaxInt8Rows * kStride];
  for (int64_t t0 = first; t0 < first + count; t0 += kTilesInTurn) {
    const int64_t tiles = std::min(kTilesInTurn, first + count - t0);
    for (int r = 0; r < x.rows; ++r) {
      for (int64_t t = 0; t < tiles; ++t) {
        const std::byte* from = tile_of_row(args, row0 + r, (t0 + t) * kKt, piece);
        const int64_t at = (t0 + t) * kGroups * x.rows + r;
        // After the last product they lie in other cores' caches, too.
        prefetch_to_write(x.words + (t0 + t) * x.tile_stride + r * kInt8TileWords);
        prefetch_to_write(x.words + (t0 + t) * x.tile_stride + r * kInt8TileWords + 16);
        quantise_tile<kDtype, kGroups>(from, args.layout.bits, q + r * kStride + t * kKt, x.scales + at, x.sums + at,
                                       x.rows);
      }
    }
    for (int64_t t = 0; t < tiles; ++t) {
      interleave(q + t * kKt, kStride, x.rows, offset, x.words + (t0 + t) * x.tile_stride);
    }
  }
}

template <Dtype kDtype>
void quantise_rows(const MatmulArgs& args, int64_t row0, int64_t first, int64_t count, bool offset, const Int8Rows& x) {
  switch (args.layout.groups_per_tile()) {
    case 1:
      return quantise_rows<kDtype, 1>(args, row0, first, count, offset, x);
    case 2:
      return quantise_rows<kDtype, 2>(args, row0, first, count, offset, x);
    default:
      return quantise_rows<kDtype, 4>(args, row0, first, count, offset, x);
  }
}

void quantise_int8_avx512(const MatmulArgs& args, int64_t row0, int64_t first, int64_t count, bool offset,
                          const Int8Rows& x) {
  switch (args.x_dtype) {
    case Dtype::f32:
      return quantise_rows<Dtype::f32>(args, row0, first, count, offset, x);
    case Dtype::bf16:
      return quantise_rows<Dtype::bf16>(args, row0, first, count, offset, x);
    case Dtype::f16:
      return quantise_rows<Dtype::f16>(args, row0, first, count, offset, x);
  }
}

}  // namespace
}  // namespace tilefuse
