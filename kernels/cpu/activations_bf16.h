// Activations for the bfloat16 kernels: a pass of up to kMaxPassRows rows, interleaved (PassRows, matmul_kernels.h).
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "bf16_dot.h"
#include "matmul.h"
#include "matmul_kernels.h"

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

// 32 consecutive activations as bfloat16.
inline __m512i load_32(const std::byte* from, Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return pack_bf16(_mm512_loadu_ps(from), _mm512_loadu_ps(from + 64));
    case Dtype::f16: {
      const auto half = [](const std::byte* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
      };
      return pack_bf16(half(from), half(from + 32));
    }
    case Dtype::bf16:
      break;
  }
  return _mm512_loadu_si512(from);
}

// Activations k0 .. k0 + 127 of one row, permuted, zero beyond K, in `piece` where they don't lie like that in x.
inline const std::byte* tile_of_row(const MatmulArgs& args, int64_t row, int64_t k0, std::byte* piece) {
  const int64_t element = args.x_dtype == Dtype::f32 ? 4 : 2;
  const std::byte* from = static_cast<const std::byte*>(args.x) + row * args.x_stride * element;
  const int64_t count = std::min<int64_t>(kKt, args.layout.k - k0);
  if (args.perm == nullptr && count == kKt) return from + k0 * element;
  std::memset(piece + count * element, 0, static_cast<size_t>((kKt - count) * element));
  if (args.perm == nullptr) {
    std::memcpy(piece, from + k0 * element, static_cast<size_t>(count * element));
  } else if (element == 4) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(piece + i * 4, from + args.perm[k0 + i] * 4, 4);
  } else {
    for (int64_t i = 0; i < count; ++i) std::memcpy(piece + i * 2, from + args.perm[k0 + i] * 2, 2);
  }
  return piece;
}

bool write_pass_bf16(const MatmulArgs& args, int64_t row0, int rows, int64_t k, uint32_t* words, int64_t tile_stride,
                     float* sums) {
  const __m512i pairs = _mm512_set_epi16(31, 27, 30, 26, 29, 25, 28, 24, 23, 19, 22, 18, 21, 17, 20, 16, 15, 11, 14, 10,
                                         13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
  const __m512i ones = _mm512_set1_epi32(0x3F803F80);
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
  const auto lanes = static_cast<__mmask16>((1U << rows) - 1);
  __m512i largest = _mm512_setzero_si512();
  alignas(64) std::byte piece[kKt * 4];
  for (int64_t k0 = 0; k0 < k; k0 += kKt, words += tile_stride) {
    alignas(64) uint32_t tile[16][kKt / 2];
    for (int r = 0; r < rows; ++r) {
      const std::byte* from = tile_of_row(args, row0 + r, k0, piece);
      __m512 sum = _mm512_setzero_ps();
      for (int i = 0; i < kKt / 32; ++i) {
        const __m512i x = load_32(from + i * (args.x_dtype == Dtype::f32 ? 128 : 64), args.x_dtype);
        largest = _mm512_max_epu16(largest, _mm512_and_si512(x, magnitude));
        _mm512_storeu_si512(rows == 1 ? words + i * 16 : tile[r] + i * 16, _mm512_permutexvar_epi16(pairs, x));
        if (sums == nullptr) continue;
        sum = dot_bf16(sum, x, ones);
        if ((i + 1) * 32 % args.layout.tile_group == 0) {
          sums[(k0 + (i + 1) * 32) / args.layout.tile_group * rows - rows + r] = _mm512_reduce_add_ps(sum);
          sum = _mm512_setzero_ps();
        }
      }
    }
    for (int i = 0; rows > 1 && i < kKt / 2; i += 16) {
      __m512i block[16];
      for (int r = 0; r < 16; ++r) block[r] = r < rows ? _mm512_load_si512(tile[r] + i) : _mm512_setzero_si512();
      transpose_16x16(block);
      for (int j = 0; j < 16; ++j) _mm512_mask_storeu_epi32(words + (i + j) * rows, lanes, block[j]);
    }
  }
  // Inf and NaN included.
  return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(static_cast<int16_t>(kLargestExactPass))) == 0;
}

}  // namespace
}  // namespace tilefuse
