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
#include "loads_avx512.h"
#include "matmul_kernels.h"

namespace tilefuse {
namespace {

constexpr int kVectors = kNt / 16;  // vectors of 32-bit lanes that hold the 64 output channels

// Tiles are read in the order of memory, which hardware prefetchers follow better by themselves: on Zen 4 asking for
// the codes of a later tile cost a tenth to a third of the speed. But with several groups, what follows the codes is
// asked for at once, before the first of it is used: the arithmetic in between is longer than the window in which a
// core looks for loads.
inline void prefetch_tail(const TileLayout& layout, const std::byte* tile) {
  for (int64_t at = layout.scale_offset; at < layout.tile_bytes; at += 64) prefetch(tile + at);
}

// The codes of an output tile drive the digits out of the L1 cache, and what waits for digits can't look ahead for
// codes.
constexpr int64_t kDigitsAhead = 3 * kKt;

// Kernels that read a tile in another order, or more slowly than memory delivers it, prefetch the tile kTilesAhead of
// theirs, each line as its counterpart is read. Hardware prefetchers stop at each 4 KiB page, a tile is about that.
constexpr int64_t kTilesAhead = 2;

// What follows the codes, scales and zero points, of one group of that tile.
inline void prefetch_scales(const TileLayout& layout, const std::byte* tile, int group) {
  const std::byte* ahead = tile + kTilesAhead * layout.tile_bytes;
  const int64_t zero_bytes = layout.zero == ZeroKind::z8 ? kNt : 2 * kNt;
  for (int64_t i = 0; i < 2 * kNt; i += 64) prefetch(ahead + layout.scale_offset + group * (2 * kNt) + i);
  for (int64_t i = 0; i < zero_bytes; i += 64) prefetch(ahead + layout.zero_offset + group * zero_bytes + i);
}

// D_i of one group: [kDigits][64 output channels].
struct alignas(64) GroupDots {
  int32_t d[kDigits][kNt];
};

// VPDPBUSD in place. GCC 12 copies the sums around its intrinsic, and then spills them.
inline void dot_u8_s8(__m512i& sum, __m512i u8, __m512i s8) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u8), "v"(s8));
}

inline __m512i four_digits(const int8_t* p) {
  int32_t v;
  std::memcpy(&v, p, sizeof(v));
  return _mm512_set1_epi32(v);
}

// In the loops below every index is a constant once they are unrolled: only then does the compiler keep the sums in
// registers.

// 4-bit codes: a 32-bit lane holds 8 consecutive input channels of one output channel; its low nibbles are channels
// 0 2 4 6, its high ones 1 3 5 7, and the digits of a block come in that order.
template <int kRowsHere>
inline void dots_w4(const std::byte* codes, int blocks, const int8_t* digits, int64_t row_stride, GroupDots* out,
                    int64_t out_stride) {
  const __m512i low_mask = _mm512_set1_epi8(15);
  __m512i sums[kRowsHere][kDigits][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRowsHere; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kDigits; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][i][v] = _mm512_setzero_si512();
    }
  }
  for (int kb = 0; kb < blocks; ++kb, codes += kNt * 4, digits += kDigits * 8) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const __m512i w = _mm512_load_si512(codes + v * 64);
      const __m512i low = _mm512_and_si512(w, low_mask);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(w, 4), low_mask);
#pragma GCC unroll 8
      for (int r = 0; r < kRowsHere; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < kDigits; ++i) {
          const int8_t* d = digits + r * row_stride + i * 8;
          dot_u8_s8(sums[r][i][v], low, four_digits(d));
          dot_u8_s8(sums[r][i][v], high, four_digits(d + 4));
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRowsHere; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kDigits; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) _mm512_store_si512(out[r * out_stride].d[i] + v * 16, sums[r][i][v]);
    }
  }
}

// 8-bit codes: 8 consecutive input channels of one output channel are two neighbouring 32-bit lanes, whose partial sums
// are added when the group is done.
inline void dots_w8(const std::byte* codes, int blocks, const int8_t* digits, GroupDots* out) {
  constexpr int kHalves = 2 * kVectors;
  __m512i sums[kDigits][kHalves];
#pragma GCC unroll 8
  for (int i = 0; i < kDigits; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kHalves; ++v) sums[i][v] = _mm512_setzero_si512();
  }
  for (int kb = 0; kb < blocks; ++kb, codes += kNt * 8, digits += kDigits * 8) {
#pragma GCC unroll 8
    for (int v = 0; v < kHalves; ++v) {
      const __m512i w = _mm512_load_si512(codes + v * 64);
#pragma GCC unroll 8
      for (int i = 0; i < kDigits; ++i) {
        int64_t pair;
        std::memcpy(&pair, digits + i * 8, sizeof(pair));
        dot_u8_s8(sums[i][v], w, _mm512_set1_epi64(pair));
      }
    }
  }
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#pragma GCC unroll 8
  for (int i = 0; i < kDigits; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const __m512i a = sums[i][2 * v];
      const __m512i b = sums[i][2 * v + 1];
      _mm512_store_si512(out->d[i] + v * 16,
                         _mm512_add_epi32(_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b)));
    }
  }
}

// Adds a group's contribution to acc[0..63].
inline void finish_group(const TileLayout& layout, const std::byte* tile, int group, const GroupDots& dots,
                         float x_scale, const int32_t* x_sums, float* acc) {
  const std::byte* scales = tile + layout.scale_offset + static_cast<int64_t>(group) * kNt * 2;
  const std::byte* zeros = tile + layout.zero_offset;
  const __m512 x_scales = _mm512_set1_ps(x_scale);
  const float sums[kDigits] = {static_cast<float>(x_sums[0]), static_cast<float>(x_sums[1]),
                               static_cast<float>(x_sums[2])};
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = static_cast<int64_t>(group) * kNt + v * 16;
    const __m512 scale = load_bf16(scales + v * 32);
    __m512 sum = _mm512_loadu_ps(acc + v * 16);
    __m512 z;
    if (layout.zero == ZeroKind::z8) {
      z = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + at))));
    } else {
      // As fold_minimum does; the order of operands makes 0 / 0 a bound.
      const __m512 m = load_bf16(zeros + at * 2);
      const __m512 limit = _mm512_set1_ps(kMaxFoldedZero);
      const __m512 exact = _mm512_div_ps(_mm512_sub_ps(_mm512_setzero_ps(), m), scale);
      z = _mm512_roundscale_ps(_mm512_max_ps(_mm512_min_ps(exact, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      const float x_sum = x_scale * (sums[0] + 256.0F * sums[1] + 65536.0F * sums[2]);
      sum = _mm512_fmadd_ps(_mm512_fmadd_ps(z, scale, m), _mm512_set1_ps(x_sum), sum);
    }
    __m512 d[kDigits];
#pragma GCC unroll 8
    for (int i = 0; i < kDigits; ++i) {
      // Exact: below 2^24.
      d[i] = _mm512_fnmadd_ps(z, _mm512_set1_ps(sums[i]), _mm512_cvtepi32_ps(_mm512_load_si512(dots.d[i] + v * 16)));
    }
    __m512 dot = _mm512_fmadd_ps(d[1], _mm512_set1_ps(256.0F), d[0]);
    dot = _mm512_fmadd_ps(d[2], _mm512_set1_ps(65536.0F), dot);
    _mm512_storeu_ps(acc + v * 16, _mm512_fmadd_ps(_mm512_mul_ps(dot, x_scales), scale, sum));
  }
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

// All groups' sums of a tile first, then its scales: in the order of memory, which is what hardware prefetchers follow.
template <int kRowsHere>
inline void tile_digits(const TileLayout& layout, const std::byte* tile, const DigitRows& x, int row,
                        int64_t first_group, float* acc) {
  constexpr int kMaxGroups = kKt / 32;
  const int tile_groups = layout.groups_per_tile();
  const int blocks = layout.tile_group / kBlock;
  const int64_t groups = x.k / layout.tile_group;
  GroupDots dots[kRowsHere][kMaxGroups];
  for (int g = 0; g < tile_groups; ++g) {
    const std::byte* codes = tile + int64_t{g} * blocks * kNt * layout.bits;
    const int8_t* digits = x.digits + (row * x.k + (first_group + g) * layout.tile_group) * kDigits;
    for (int r = 0; r < kRowsHere; ++r) {
      const auto* ahead = reinterpret_cast<const std::byte*>(digits + r * x.k * kDigits + kDigitsAhead);
      for (int i = 0; i < layout.tile_group * kDigits; i += 64) prefetch(ahead + i);
    }
    if (layout.bits == 4) {
      dots_w4<kRowsHere>(codes, blocks, digits, x.k * kDigits, &dots[0][g], kMaxGroups);
    } else {
      for (int r = 0; r < kRowsHere; ++r) dots_w8(codes, blocks, digits + r * x.k * kDigits, &dots[r][g]);
    }
  }
  if (tile_groups > 1) prefetch_tail(layout, tile);
  for (int g = 0; g < tile_groups; ++g) {
    for (int r = 0; r < kRowsHere; ++r) {
      const int64_t at = (row + r) * groups + first_group + g;
      finish_group(layout, tile, g, dots[r][g], x.scales[at], x.sums + at * kDigits, acc + (row + r) * kNt);
    }
  }
}

void fused_digits_vnni(const TileRun& run, const DigitRows& x, int rows, float* acc) {
  const TileLayout& layout = *run.layout;
  const int tile_groups = layout.groups_per_tile();
  std::memset(acc, 0, sizeof(float) * static_cast<size_t>(rows) * kNt);
  const DigitRest* rest[kMaxDigitRows];
  for (int r = 0; r < rows; ++r) rest[r] = x.rests + r * rest_capacity(x.k);
  for (int64_t kt = 0; kt < layout.k_tiles_used(); ++kt) {
    const std::byte* tile = run.tiles + kt * layout.tile_bytes;
    int r = 0;
    for (; r + 2 <= rows; r += 2) tile_digits<2>(layout, tile, x, r, kt * tile_groups, acc);
    if (r < rows) tile_digits<1>(layout, tile, x, r, kt * tile_groups, acc);
    for (r = 0; r < rows; ++r) {
      for (; rest[r]->k < (kt + 1) * kKt; ++rest[r]) {
        add_rest(layout, tile, static_cast<int>(rest[r]->k - kt * kKt), rest[r]->value, acc + r * kNt);
      }
    }
  }
}

}  // namespace
}  // namespace tilefuse
