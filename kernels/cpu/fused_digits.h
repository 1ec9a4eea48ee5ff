// Fused matmul for few rows on AVX512_VNNI: codes times the activations' digits (matmul_kernels.h), in exact integers.
//
// Per group and output channel: D_i = sum q d_i and S_i = sum d_i are 32-bit integers (|D_i - z S_i| is at most
// (255 + kMaxFoldedZero) 128 * 128 < 2^24, so converting it to float is exact too), and sum (q - z) x = scale_x * sum_i
// 256^i (D_i - z S_i): zero points cancel without rounding. What the digits can't hold (DigitRest) is added one input
// channel at a time.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "bf16.h"
#include "matmul_kernels.h"

namespace tilefuse {
namespace {

constexpr int kVectors = kNt / 16;  // vectors of 32-bit lanes that hold the 64 output channels

// Hardware prefetchers stop at each 4 KiB page, a tile is about that: kernels prefetch the tile kTilesAhead of theirs,
// each line as its counterpart is read.
constexpr int64_t kTilesAhead = 1;

inline void prefetch(const std::byte* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// What follows the codes, scales and zero points, of one group of a tile.
inline void prefetch_scales(const TileLayout& layout, const std::byte* tile, int group) {
  const std::byte* ahead = tile + kTilesAhead * layout.tile_bytes;
  const int64_t zero_bytes = layout.zero == ZeroKind::z8 ? kNt : 2 * kNt;
  for (int64_t i = 0; i < 2 * kNt; i += 64) prefetch(ahead + layout.scale_offset + group * (2 * kNt) + i);
  for (int64_t i = 0; i < zero_bytes; i += 64) prefetch(ahead + layout.zero_offset + group * zero_bytes + i);
}

inline __m512 load_bf16(const std::byte* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

// dots[i][v]: D_i of output channels 16 v .. 16 v + 15. Adds the group's contribution to acc[0..63].
inline void finish_group(const TileLayout& layout, const std::byte* tile, int group,
                         const __m512i (&dots)[kDigits][kVectors], float x_scale, const int32_t* x_sums, float* acc) {
  const std::byte* scales = tile + layout.scale_offset + static_cast<int64_t>(group) * kNt * 2;
  const std::byte* zeros = tile + layout.zero_offset;
  const __m512 x_scales = _mm512_set1_ps(x_scale);
  const float x_sum = x_scale * (static_cast<float>(x_sums[0]) + 256.0F * static_cast<float>(x_sums[1]) +
                                 65536.0F * static_cast<float>(x_sums[2]));
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = static_cast<int64_t>(group) * kNt + v * 16;
    const __m512 scale = load_bf16(scales + v * 32);
    __m512 sum = _mm512_loadu_ps(acc + v * 16);
    __m512i z;
    if (layout.zero == ZeroKind::z8) {
      z = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + at)));
    } else {
      // As fold_minimum does; the order of operands makes 0 / 0 a bound.
      const __m512 m = load_bf16(zeros + at * 2);
      const __m512 limit = _mm512_set1_ps(kMaxFoldedZero);
      const __m512 exact = _mm512_div_ps(_mm512_sub_ps(_mm512_setzero_ps(), m), scale);
      z = _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(exact, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit)));
      sum = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_cvtepi32_ps(z), scale, m), _mm512_set1_ps(x_sum), sum);
    }
    __m512 d[kDigits];
    for (int i = 0; i < kDigits; ++i) {
      d[i] = _mm512_cvtepi32_ps(_mm512_sub_epi32(dots[i][v], _mm512_mullo_epi32(z, _mm512_set1_epi32(x_sums[i]))));
    }
    __m512 dot = _mm512_fmadd_ps(d[1], _mm512_set1_ps(256.0F), d[0]);
    dot = _mm512_fmadd_ps(d[2], _mm512_set1_ps(65536.0F), dot);
    _mm512_storeu_ps(acc + v * 16, _mm512_fmadd_ps(_mm512_mul_ps(dot, x_scales), scale, sum));
  }
}

inline int32_t load_i32(const int8_t* p) {
  int32_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// 4-bit codes: a 32-bit lane holds 8 consecutive input channels of one output channel; its low nibbles are channels
// 0 2 4 6, its high ones 1 3 5 7, and the digits of a block come in that order.
template <int kRowsHere>
inline void dots_w4(const std::byte* codes, int64_t ahead, int blocks, const int8_t* digits, int64_t row_stride,
                    __m512i (&dots)[kRowsHere][kDigits][kVectors]) {
  const __m512i low_mask = _mm512_set1_epi8(15);
  for (int kb = 0; kb < blocks; ++kb) {
    const std::byte* block_row = codes + kb * (kNt * 4);
    for (int v = 0; v < kVectors; ++v) {
      const __m512i w = _mm512_load_si512(block_row + v * 64);
      prefetch(block_row + v * 64 + ahead);
      const __m512i low = _mm512_and_si512(w, low_mask);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(w, 4), low_mask);
      for (int r = 0; r < kRowsHere; ++r) {
        const int8_t* d = digits + r * row_stride + kb * (kDigits * 8);
        for (int i = 0; i < kDigits; ++i) {
          __m512i sum = _mm512_dpbusd_epi32(dots[r][i][v], low, _mm512_set1_epi32(load_i32(d + i * 8)));
          dots[r][i][v] = _mm512_dpbusd_epi32(sum, high, _mm512_set1_epi32(load_i32(d + i * 8 + 4)));
        }
      }
    }
  }
}

template <int kRowsHere>
inline void group_w4(const TileLayout& layout, const std::byte* tile, int group, const int8_t* digits,
                     int64_t row_stride, const float* x_scales, const int32_t* x_sums, int64_t groups, float* acc) {
  const int blocks = layout.tile_group / kBlock;
  __m512i dots[kRowsHere][kDigits][kVectors];
  for (auto& row : dots) {
    for (auto& digit : row) {
      for (__m512i& v : digit) v = _mm512_setzero_si512();
    }
  }
  dots_w4<kRowsHere>(tile + group * blocks * (kNt * 4), kTilesAhead * layout.tile_bytes, blocks, digits, row_stride,
                     dots);
  for (int r = 0; r < kRowsHere; ++r) {
    finish_group(layout, tile, group, dots[r], x_scales[r * groups], x_sums + r * groups * kDigits, acc + r * kNt);
  }
}

// 8-bit codes: 8 consecutive input channels of one output channel are two neighbouring 32-bit lanes, whose partial sums
// are added when the group is done.
inline void group_w8(const TileLayout& layout, const std::byte* tile, int group, const int8_t* digits, float x_scale,
                     const int32_t* x_sums, float* acc) {
  constexpr int kHalves = 2 * kVectors;
  const int blocks = layout.tile_group / kBlock;
  const std::byte* codes = tile + group * blocks * (kNt * 8);
  __m512i halves[kDigits][kHalves];
  for (auto& digit : halves) {
    for (__m512i& v : digit) v = _mm512_setzero_si512();
  }
  for (int kb = 0; kb < blocks; ++kb) {
    __m512i d[kDigits];
    for (int i = 0; i < kDigits; ++i) {
      int64_t pair;
      std::memcpy(&pair, digits + kb * (kDigits * 8) + i * 8, sizeof(pair));
      d[i] = _mm512_set1_epi64(pair);
    }
    for (int v = 0; v < kHalves; ++v) {
      const std::byte* at = codes + kb * (kNt * 8) + v * 64;
      const __m512i w = _mm512_load_si512(at);
      prefetch(at + kTilesAhead * layout.tile_bytes);
      for (int i = 0; i < kDigits; ++i) halves[i][v] = _mm512_dpbusd_epi32(halves[i][v], w, d[i]);
    }
  }
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  __m512i dots[kDigits][kVectors];
  for (int i = 0; i < kDigits; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      const __m512i a = halves[i][2 * v];
      const __m512i b = halves[i][2 * v + 1];
      dots[i][v] = _mm512_add_epi32(_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b));
    }
  }
  finish_group(layout, tile, group, dots, x_scale, x_sums, acc);
}

// The codes of input channel k, relative to the tile, of output channels 16 v .. 16 v + 15 as floats.
inline __m512 load_codes(const TileLayout& layout, const std::byte* tile, int k, int v) {
  const int block = k / kBlock;
  const int j = k % kBlock;
  if (layout.bits == 4) {
    const __m512i w = _mm512_loadu_si512(tile + block * (kNt * 4) + v * 64);
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srl_epi32(w, _mm_cvtsi32_si128(4 * j)), _mm512_set1_epi32(15)));
  }
  const std::byte* at = tile + block * (kNt * 8) + v * 128;
  const auto low_byte = [&](const std::byte* p) {
    const __m512i w = _mm512_srl_epi64(_mm512_loadu_si512(p), _mm_cvtsi32_si128(8 * j));
    return _mm512_cvtepi64_epi32(_mm512_and_si512(w, _mm512_set1_epi64(255)));
  };
  return _mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(low_byte(at)), low_byte(at + 64), 1));
}

// acc[0..63] += value * the weights of input channel k.
inline void add_rest(const TileLayout& layout, const std::byte* tile, int k, float value, float* acc) {
  const int group = k / layout.tile_group;
  for (int v = 0; v < kVectors; ++v) {
    const __m512 q = load_codes(layout, tile, k, v);
    const __m512 scale = load_bf16(tile + layout.scale_offset + (group * kNt + v * 16) * 2);
    __m512 w;
    if (layout.zero == ZeroKind::z8) {
      const std::byte* at = tile + layout.zero_offset + group * kNt + v * 16;
      const __m512i z = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
      w = _mm512_mul_ps(_mm512_sub_ps(q, _mm512_cvtepi32_ps(z)), scale);
    } else {
      w = _mm512_fmadd_ps(q, scale, load_bf16(tile + layout.zero_offset + (group * kNt + v * 16) * 2));
    }
    _mm512_storeu_ps(acc + v * 16, _mm512_fmadd_ps(_mm512_set1_ps(value), w, _mm512_loadu_ps(acc + v * 16)));
  }
}

void fused_digits_vnni(const TileRun& run, const DigitRows& x, int rows, float* acc) {
  const TileLayout& layout = *run.layout;
  const int tile_groups = layout.groups_per_tile();
  const int64_t groups = x.k / layout.tile_group;
  const int64_t row_stride = x.k * kDigits;
  std::memset(acc, 0, sizeof(float) * static_cast<size_t>(rows) * kNt);
  const DigitRest* rest[kMaxDigitRows];
  for (int r = 0; r < rows; ++r) rest[r] = x.rests + r * rest_capacity(x.k);
  for (int64_t kt = 0; kt < layout.k_tiles_used(); ++kt) {
    const std::byte* tile = run.tiles + kt * layout.tile_bytes;
    for (int g = 0; g < tile_groups; ++g) {
      const int64_t group = kt * tile_groups + g;
      prefetch_scales(layout, tile, g);
      const int8_t* digits = x.digits + group * layout.tile_group * kDigits;
      const float* scales = x.scales + group;
      const int32_t* sums = x.sums + group * kDigits;
      int r = 0;
      if (layout.bits == 4) {
        for (; r + 2 <= rows; r += 2) {
          group_w4<2>(layout, tile, g, digits + r * row_stride, row_stride, scales + r * groups,
                      sums + r * groups * kDigits, groups, acc + r * kNt);
        }
        if (r < rows) {
          group_w4<1>(layout, tile, g, digits + r * row_stride, row_stride, scales + r * groups,
                      sums + r * groups * kDigits, groups, acc + r * kNt);
        }
      } else {
        for (; r < rows; ++r) {
          group_w8(layout, tile, g, digits + r * row_stride, scales[r * groups], sums + r * groups * kDigits,
                   acc + r * kNt);
        }
      }
    }
    for (int r = 0; r < rows; ++r) {
      for (; rest[r]->k < (kt + 1) * kKt; ++rest[r]) {
        add_rest(layout, tile, static_cast<int>(rest[r]->k - kt * kKt), rest[r]->value, acc + r * kNt);
      }
    }
  }
}

}  // namespace
}  // namespace tilefuse
