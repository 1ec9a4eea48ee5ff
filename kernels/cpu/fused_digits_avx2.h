// Fused matmul for few rows on AVX2: codes times the activations' digits (digits_avx2.h), in exact integers.
//
// 4-bit codes: VPMADDUBSW adds two products of a code and an 8-bit digit, at most 2 15 128 = 3840; 8 such sums, those
// of 4 blocks, fit 16 bits. 8-bit codes: VPMADDWD adds products with wider digits in 32 bits. Zero points cancel before
// anything is rounded, and the lowest digits are multiplied only in blocks that have any.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "digits_avx2.h"
#include "matmul_kernels.h"
#include "prefetch.h"

namespace tilefuse {
namespace {

// Hardware prefetchers stop at each 4 KiB page, a tile is about that: kernels prefetch the tile this far ahead. They
// read a tile by columns, but prefetch it from end to end: only that lets the hardware run ahead as well, and
// prefetches alone, of which a core has some 24 in flight, get a third of the memory's speed.
inline constexpr int64_t kTilesAhead256 = 1;

inline __m256 load_bf16_8(const std::byte* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

inline __m256i load_z8(const std::byte* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

// Beyond these bounds of folded zero points |q - z| is at least half of |z| for every code, and at most 510.
inline constexpr float kLeastZero = -255.0F;
inline constexpr float kMostZero = 510.0F;

// Scales, zero points and what is left of minima, of 8 output channels in one group.
struct Affine8 {
  __m256 scale;
  __m256i zero;
  __m256 rest;  // m + z s

  // Minima fold into zero points of [kLeastZero, kMostZero].
  Affine8(const TileLayout& layout, const std::byte* tile, int group, int n) {
    const int64_t at = static_cast<int64_t>(group) * kNt + n;
    scale = load_bf16_8(tile + layout.scale_offset + at * 2);
    if (layout.zero == ZeroKind::z8) {
      zero = load_z8(tile + layout.zero_offset + at);
      rest = _mm256_setzero_ps();
      return;
    }
    // As fold_minimum does; the order of operands makes 0 / 0 a bound.
    const __m256 m = load_bf16_8(tile + layout.zero_offset + at * 2);
    const __m256 exact = _mm256_div_ps(_mm256_sub_ps(_mm256_setzero_ps(), m), scale);
    zero =
        _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(exact, _mm256_set1_ps(kMostZero)), _mm256_set1_ps(kLeastZero)));
    rest = _mm256_fmadd_ps(_mm256_cvtepi32_ps(zero), scale, m);
  }
};

// acc[0..7] += what a group contributes: dot times scale and, with minima, what is left of them times the sum of x.
inline void add_group(const TileLayout& layout, const Affine8& affine, __m256 dot, const DigitGroup& x, float* acc) {
  __m256 sum = _mm256_loadu_ps(acc);
  if (layout.zero == ZeroKind::m16) sum = _mm256_fmadd_ps(affine.rest, _mm256_set1_ps(x.x_sum), sum);
  _mm256_storeu_ps(acc, _mm256_fmadd_ps(dot, affine.scale, sum));
}

// |D - z S| is at most 510 2^15 128 < 2^31. What converting it to float rounds away is less than 2^-24 of
// sum |q - z| |x|, as |low| and |kBase high| are at most about |x / scale|.
inline __m256 dot_of_digits(__m256i zero, __m256i high, __m256i low, const DigitGroup& x) {
  const auto corrected = [&](__m256i dot, int32_t sum) {
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(dot, _mm256_mullo_epi32(zero, _mm256_set1_epi32(sum))));
  };
  return _mm256_fmadd_ps(corrected(high, x.high_sum), _mm256_set1_ps(x.high_scale),
                         _mm256_mul_ps(corrected(low, x.low_sum), _mm256_set1_ps(x.low_scale)));
}

// Makes the compiler add in the order written: left to itself it forms trees that keep many more registers live.
inline void in_order(__m256i& sum) { asm("" : "+v"(sum)); }

inline __m256i broadcast_4(const int8_t* p) {
  int32_t v;
  std::memcpy(&v, p, sizeof(v));
  return _mm256_set1_epi32(v);
}

inline __m256i broadcast_16(const int8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// The codes of 8 output channels in one block, 4 bits each: a 32-bit lane is one output channel, input channels 0 2 4 6
// in its low nibbles and 1 3 5 7 in its high ones.
struct Nibbles {
  __m256i low;
  __m256i high;
};

inline Nibbles load_w4(const std::byte* codes) {
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i w = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes));
  return {_mm256_and_si256(w, mask), _mm256_and_si256(_mm256_srli_epi16(w, 4), mask)};
}

// sum += codes times the digits of one block, in the order low, high.
inline void add_w4(__m256i& sum, const Nibbles& q, __m256i d_low, __m256i d_high) {
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(q.low, d_low));
  in_order(sum);
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(q.high, d_high));
  in_order(sum);
}

constexpr int kBlocksIn16Bits = 4;

// dot + sums[0] + 256 sums[1], widened.
inline __m256i add_high(__m256i dot, const __m256i (&sums)[2]) {
  const __m256i wide = _mm256_madd_epi16(sums[1], _mm256_set1_epi16(256));
  return _mm256_add_epi32(_mm256_add_epi32(dot, wide), _mm256_madd_epi16(sums[0], _mm256_set1_epi16(1)));
}

// dots[64] = codes times the lowest digits.
inline void low_dots_w4(const std::byte* codes, const int8_t* digits, const DigitGroup& x, int32_t* dots) {
  constexpr int kVectors = kNt / 8;
  auto* out = reinterpret_cast<__m256i*>(dots);
  for (int v = 0; v < kVectors; ++v) _mm256_store_si256(out + v, _mm256_setzero_si256());
  for (int first = 0; first < x.low_count; first += kBlocksIn16Bits) {
    const int end = std::min(first + kBlocksIn16Bits, x.low_count);
    __m256i sums[kVectors];
    for (__m256i& sum : sums) sum = _mm256_setzero_si256();
    for (int i = first; i < end; ++i) {
      const int block = x.low_blocks[i];
      const __m256i d_low = broadcast_4(digits + block * ByteDigits::kLowBytes);
      const __m256i d_high = broadcast_4(digits + block * ByteDigits::kLowBytes + 4);
      for (int v = 0; v < kVectors; ++v) add_w4(sums[v], load_w4(codes + block * (kNt * 4) + v * 32), d_low, d_high);
    }
    for (int v = 0; v < kVectors; ++v) {
      const __m256i wide = _mm256_madd_epi16(sums[v], _mm256_set1_epi16(1));
      _mm256_store_si256(out + v, _mm256_add_epi32(_mm256_load_si256(out + v), wide));
    }
  }
}

// One group of one tile and the rows' digits there.
template <int kRowsHere>
struct GroupOperands {
  const TileLayout& layout;
  const std::byte* tile;
  int group;
  const std::byte* codes;
  const int8_t* high[kRowsHere];
  const int8_t* low[kRowsHere];
  const DigitGroup* x[kRowsHere];

  GroupOperands(const TileRun& run, int64_t kt, int g, const DigitRow<DigitGroup>* rows)
      : layout(*run.layout), tile(run.tiles + kt * layout.tile_bytes), group(g) {
    const int blocks = layout.tile_group / kBlock;
    codes = tile + g * blocks * (kNt * layout.bits);
    const int64_t at = kt * layout.groups_per_tile() + g;
    for (int r = 0; r < kRowsHere; ++r) {
      high[r] = rows[r].high + at * blocks * ByteDigits::kHighBytes;
      low[r] = rows[r].low + at * blocks * (layout.bits == 4 ? ByteDigits::kLowBytes : WideDigits::kLowBytes);
      x[r] = rows[r].groups + at;
    }
  }
};

static_assert(ByteDigits::kHighBytes == WideDigits::kHighBytes);

template <int kRowsHere>
inline void group_w4(const GroupOperands<kRowsHere>& op, float* acc) {
  constexpr int kHigh = 2;
  constexpr int kVectors = 2;  // one cache line of a block
  const int blocks = op.layout.tile_group / kBlock;
  alignas(32) int32_t low[kRowsHere][kNt];
  for (int r = 0; r < kRowsHere; ++r) low_dots_w4(op.codes, op.low[r], *op.x[r], low[r]);
  const std::byte* ahead = op.codes + kTilesAhead256 * op.layout.tile_bytes;
  for (int n = 0; n < kNt; n += 8 * kVectors) {
    const std::byte* codes = op.codes + n * 4;
    __m256i dots[kRowsHere][kVectors];
    for (auto& row : dots) {
      for (__m256i& d : row) d = _mm256_setzero_si256();
    }
    for (int kb = 0; kb < blocks; kb += kBlocksIn16Bits) {
      __m256i sums[kRowsHere][kVectors][kHigh];
      for (auto& row : sums) {
        for (auto& vector : row) {
          for (__m256i& d : vector) d = _mm256_setzero_si256();
        }
      }
#pragma GCC unroll 4
      for (int b = kb; b < kb + kBlocksIn16Bits; ++b, codes += kNt * 4) {
        prefetch(ahead);
        ahead += 64;
        Nibbles q[kVectors];
        for (int v = 0; v < kVectors; ++v) q[v] = load_w4(codes + v * 32);
        for (int r = 0; r < kRowsHere; ++r) {
          for (int i = 0; i < kHigh; ++i) {
            const int8_t* d = op.high[r] + b * ByteDigits::kHighBytes + i * kBlock;
            const __m256i d_low = broadcast_4(d);
            const __m256i d_high = broadcast_4(d + 4);
            for (int v = 0; v < kVectors; ++v) add_w4(sums[r][v][i], q[v], d_low, d_high);
          }
        }
      }
      for (int r = 0; r < kRowsHere; ++r) {
        for (int v = 0; v < kVectors; ++v) dots[r][v] = add_high(dots[r][v], sums[r][v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const int at = n + v * 8;
      const Affine8 affine(op.layout, op.tile, op.group, at);
      for (int r = 0; r < kRowsHere; ++r) {
        const __m256i low_dot = _mm256_load_si256(reinterpret_cast<const __m256i*>(low[r] + at));
        const __m256 dot = dot_of_digits(affine.zero, dots[r][v], low_dot, *op.x[r]);
        add_group(op.layout, affine, dot, *op.x[r], acc + r * kNt + at);
      }
    }
  }
}

// One row is read faster than 24 prefetches into the L1 cache deliver, and a core's window is too short to look ahead
// by itself: lines are asked for into the L2 cache, which its hardware prefetcher helps with, two tiles early. On Zen 4
// that reads 1.2 times as fast as loading lines in the order of memory just before they are used.
constexpr int64_t kBytesAhead = 8192;

TILEFUSE_ALWAYS_INLINE void prefetch_to_l2(const std::byte* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) prefetch_l2(p + at);
}

// dots[64] = codes times the high digits, one row.
inline void high_dots_w4(const std::byte* codes, int blocks, const int8_t* digits, int32_t* dots) {
  constexpr int kVectors = 4;
  for (int kb = 0; kb < blocks; kb += kBlocksIn16Bits) {
    prefetch_to_l2(codes + kb * (kNt * 4) + kBytesAhead, kBlocksIn16Bits * kNt * 4);
    for (int n = 0; n < kNt; n += 8 * kVectors) {
      __m256i sums[kVectors][2];
      for (auto& vector : sums) vector[0] = vector[1] = _mm256_setzero_si256();
#pragma GCC unroll 4
      for (int b = kb; b < kb + kBlocksIn16Bits; ++b) {
        const int8_t* d = digits + b * ByteDigits::kHighBytes;
        const __m256i d0 = broadcast_4(d);
        const __m256i d1 = broadcast_4(d + 4);
        const __m256i d2 = broadcast_4(d + 8);
        const __m256i d3 = broadcast_4(d + 12);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const Nibbles q = load_w4(codes + b * (kNt * 4) + n * 4 + v * 32);
          add_w4(sums[v][0], q, d0, d1);
          add_w4(sums[v][1], q, d2, d3);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        auto* out = reinterpret_cast<__m256i*>(dots + n + v * 8);
        const __m256i before = kb == 0 ? _mm256_setzero_si256() : _mm256_load_si256(out);
        _mm256_store_si256(out, add_high(before, sums[v]));
      }
    }
  }
}

// One row and tile: the high digits of all groups, the low ones, then what follows the codes.
inline void tile_w4(const TileRun& run, int64_t kt, const DigitRow<DigitGroup>& x, float* acc) {
  const TileLayout& layout = *run.layout;
  const std::byte* tile = run.tiles + kt * layout.tile_bytes;
  const int groups = layout.groups_per_tile();
  const int blocks = layout.tile_group / kBlock;
  alignas(32) int32_t high[4][kNt];
  alignas(32) int32_t low[4][kNt];
  const DigitGroup* group = x.groups + kt * groups;
  const int8_t* high_digits = x.high + kt * kKt / kBlock * ByteDigits::kHighBytes;
  const int8_t* low_digits = x.low + kt * kKt / kBlock * ByteDigits::kLowBytes;
  for (int g = 0; g < groups; ++g) {
    const std::byte* codes = tile + g * blocks * (kNt * 4);
    high_dots_w4(codes, blocks, high_digits + g * blocks * ByteDigits::kHighBytes, high[g]);
  }
  prefetch_to_l2(tile + layout.scale_offset + kBytesAhead, layout.tile_bytes - layout.scale_offset);
  for (int g = 0; g < groups; ++g) {
    const std::byte* codes = tile + g * blocks * (kNt * 4);
    low_dots_w4(codes, low_digits + g * blocks * ByteDigits::kLowBytes, group[g], low[g]);
  }
  for (int g = 0; g < groups; ++g) {
    for (int n = 0; n < kNt; n += 8) {
      const Affine8 affine(layout, tile, g, n);
      const __m256 dot = dot_of_digits(affine.zero, _mm256_load_si256(reinterpret_cast<const __m256i*>(high[g] + n)),
                                       _mm256_load_si256(reinterpret_cast<const __m256i*>(low[g] + n)), group[g]);
      add_group(layout, affine, dot, group[g], acc + n);
    }
  }
}

// Sums of 4 neighbouring lanes: of v[i], channel 2 i in the lower half and 2 i + 1 in the upper.
inline __m256i sum_quads(const __m256i (&v)[4]) {
  const __m256i even_odd = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
  return _mm256_permutevar8x32_epi32(even_odd, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Two output channels of one block.
inline __m256i load_w8(const std::byte* codes) {
  return _mm256_cvtepu8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(codes)));
}

inline __m256i low_dots_w8(const std::byte* codes, const int8_t* digits, const DigitGroup& x) {
  if (x.low_count == 0) return _mm256_setzero_si256();
  __m256i sums[4];
  for (__m256i& sum : sums) sum = _mm256_setzero_si256();
  for (int i = 0; i < x.low_count; ++i) {
    const int block = x.low_blocks[i];
    const __m256i d = broadcast_16(digits + block * WideDigits::kLowBytes);
    for (int v = 0; v < 4; ++v) {
      sums[v] = _mm256_add_epi32(sums[v], _mm256_madd_epi16(load_w8(codes + block * (kNt * 8) + v * 16), d));
    }
  }
  return sum_quads(sums);
}

template <int kRowsHere>
inline void group_w8(const GroupOperands<kRowsHere>& op, float* acc) {
  const int blocks = op.layout.tile_group / kBlock;
  const std::byte* ahead = op.codes + kTilesAhead256 * op.layout.tile_bytes;
  for (int n = 0; n < kNt; n += 8) {
    const std::byte* codes = op.codes + n * 8;
    __m256i sums[kRowsHere][4];
    for (auto& row : sums) {
      for (__m256i& sum : row) sum = _mm256_setzero_si256();
    }
// GCC 12 spills a sum of the loop as it stands.
#pragma GCC unroll 2
    for (int b = 0; b < blocks; ++b) {
      const std::byte* at = codes + b * (kNt * 8);
      prefetch(ahead);
      ahead += 64;
      __m256i d[kRowsHere];
      for (int r = 0; r < kRowsHere; ++r) d[r] = broadcast_16(op.high[r] + b * WideDigits::kHighBytes);
      for (int v = 0; v < 4; ++v) {
        const __m256i w = load_w8(at + v * 16);
        for (int r = 0; r < kRowsHere; ++r) sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(w, d[r]));
      }
    }
    const Affine8 affine(op.layout, op.tile, op.group, n);
    for (int r = 0; r < kRowsHere; ++r) {
      const __m256i low = low_dots_w8(codes, op.low[r], *op.x[r]);
      const __m256 dot = dot_of_digits(affine.zero, sum_quads(sums[r]), low, *op.x[r]);
      add_group(op.layout, affine, dot, *op.x[r], acc + r * kNt + n);
    }
  }
}

// acc[0..63] += value * the weights of input channel k of the tile.
inline void add_rest_256(const TileLayout& layout, const std::byte* tile, int k, float value, float* acc) {
  const int group = k / layout.tile_group;
  const int j = k % kBlock;
  const std::byte* block_row = tile + (k / kBlock) * (kNt * layout.bits);
  for (int n = 0; n < kNt; n += 8) {
    alignas(32) int32_t codes[8];
    for (int i = 0; i < 8; ++i) {
      const std::byte* word = block_row + (n + i) * layout.bits;
      codes[i] =
          layout.bits == 4 ? static_cast<int>(word[j / 2] >> (4 * (j % 2)) & std::byte{15}) : static_cast<int>(word[j]);
    }
    const __m256i q = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes));
    const int64_t at = static_cast<int64_t>(group) * kNt + n;
    const __m256 scale = load_bf16_8(tile + layout.scale_offset + at * 2);
    __m256 w;
    if (layout.zero == ZeroKind::z8) {
      const __m256i z = load_z8(tile + layout.zero_offset + at);
      w = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(q, z)), scale);
    } else {
      w = _mm256_fmadd_ps(_mm256_cvtepi32_ps(q), scale, load_bf16_8(tile + layout.zero_offset + at * 2));
    }
    _mm256_storeu_ps(acc + n, _mm256_fmadd_ps(_mm256_set1_ps(value), w, _mm256_loadu_ps(acc + n)));
  }
}

// What follows the codes of a tile ahead.
TILEFUSE_ALWAYS_INLINE void prefetch_affine(const TileLayout& layout, const std::byte* tile) {
  const std::byte* ahead = tile + kTilesAhead256 * layout.tile_bytes;
  for (int64_t i = layout.scale_offset; i < layout.tile_bytes; i += 64) prefetch(ahead + i);
}

// Rows [first, rows) of one group, kRowsHere at a time.
template <int kRowsHere>
inline int rows_of_group(const TileRun& run, int64_t kt, int group, const DigitRow<DigitGroup>* x, int first, int rows,
                         float* acc) {
  for (; first + kRowsHere <= rows; first += kRowsHere) {
    const GroupOperands<kRowsHere> op(run, kt, group, x + first);
    if (run.layout->bits == 4) {
      group_w4<kRowsHere>(op, acc + first * kNt);
    } else {
      group_w8<kRowsHere>(op, acc + first * kNt);
    }
  }
  return first;
}

// Panels in float don't scale each group's sums, so small groups make them the faster way from fewer rows on.
inline int max_few_rows(const TileLayout& layout) {
  if (layout.bits == 8) return layout.tile_group == 32 ? 8 : layout.tile_group == 64 ? 12 : 32;
  const bool minima = layout.zero == ZeroKind::m16;
  if (layout.tile_group == 32) return minima ? 8 : 12;
  return layout.tile_group == 64 || minima ? kMaxFewRows : INT_MAX;
}

void fused_digits_avx2(const TileRun& run, const std::byte* digits, int rows, float* acc) {
  const TileLayout& layout = *run.layout;
  const DigitMemory<DigitGroup> at(layout);
  std::memset(acc, 0, sizeof(float) * static_cast<size_t>(rows) * kNt);
  DigitRow<DigitGroup> x[kMaxFewRows];
  for (int r = 0; r < rows; ++r) x[r] = {at, digits, r};
  for (int64_t kt = 0; kt < layout.k_tiles_used(); ++kt) {
    const std::byte* tile = run.tiles + kt * layout.tile_bytes;
    if (rows == 1 && layout.bits == 4) {
      tile_w4(run, kt, x[0], acc);
    } else {
      for (int g = 0; g < layout.groups_per_tile(); ++g) {
        const int done = rows_of_group<2>(run, kt, g, x, 0, rows, acc);
        rows_of_group<1>(run, kt, g, x, done, rows, acc);
      }
      prefetch_affine(layout, tile);
    }
    for (int r = 0; r < rows; ++r) {
      for (; x[r].rests->k < (kt + 1) * kKt; ++x[r].rests) {
        add_rest_256(layout, tile, static_cast<int>(x[r].rests->k - kt * kKt), x[r].rests->value, acc + r * kNt);
      }
    }
  }
}

constexpr FewRowsKernels kFewRowsAvx2 = {
    .max_rows = max_few_rows,
    .row_bytes = digit_row_bytes,
    .scratch_bytes = digit_scratch_bytes,
    .write = write_digits_avx2,
    .fused = fused_digits_avx2,
};

}  // namespace
}  // namespace tilefuse
