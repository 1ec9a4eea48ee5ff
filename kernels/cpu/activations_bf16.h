// Activations for the bfloat16 kernels: a pass of up to kMaxPassRows rows, interleaved (PassRows, matmul_kernels.h).
#pragma once

#include <immintrin.h>

#include "bf16_dot.h"
#include "matmul.h"
#include "matmul_kernels.h"
#include "prefetch.h"
#include "tile_of_row.h"
#include "transpose_avx512.h"

namespace tilefuse {
namespace {

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

bool write_pass_bf16(const MatmulArgs& args, int64_t row0, int rows, int64_t first, int64_t end, uint32_t* words,
                     int64_t tile_stride, float* sums) {
  const __m512i pairs = _mm512_set_epi16(31, 27, 30, 26, 29, 25, 28, 24, 23, 19, 22, 18, 21, 17, 20, 16, 15, 11, 14, 10,
                                         13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
  const __m512i ones = _mm512_set1_epi32(0x3F803F80);
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
  const auto lanes = static_cast<__mmask16>((1U << rows) - 1);
  __m512i largest = _mm512_setzero_si512();
  const int64_t tile_bytes = kKt * item_size(args.x_dtype);
  alignas(64) std::byte piece[kKt * 4];
  words += first * tile_stride;
  for (int64_t k0 = first * kKt; k0 < end * kKt; k0 += kKt, words += tile_stride) {
    alignas(64) uint32_t tile[16][kKt / 2];
    for (int r = 0; r < rows; ++r) {
      const std::byte* from = tile_of_row(args, row0 + r, k0, piece);
      // That many rows in turn are more than hardware prefetchers follow.
      const std::byte* next = from + tile_bytes;
      for (int64_t i = 0; i < tile_bytes; i += 64) prefetch(next + i);
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
