// Fused matmul for few rows on AVX2: codes times the activations' digits (digits_avx2.h), in exact integers, as
// fused_digits.h does with AVX512_VNNI.
//
// 4-bit codes: VPMADDUBSW adds two products of a code and an 8-bit digit, at most 2 15 128 = 3840; 8 such sums, those
// of 4 blocks, fit 16 bits. 8-bit codes: VPMADDWD adds products with 14-bit digits in 32 bits. Zero points cancel
// before anything is rounded.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "digits_avx2.h"
#include "matmul_kernels.h"

namespace tilefuse {
namespace {

// As in fused_digits.h: hardware prefetchers stop at each 4 KiB page, and a tile is about that.
inline constexpr int64_t kTilesAhead256 = 1;

inline void prefetch_line(const std::byte* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

inline __m256 load_bf16_8(const std::byte* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

inline __m256i load_z8(const std::byte* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

// Digits of the rows of one tile group.
struct DigitGroup {
  const int8_t* digits = nullptr;
  const float* scales = nullptr;
  const int32_t* sums = nullptr;
  int64_t row_digits = 0;  // bytes from one row to the next
  int64_t row_groups = 0;  // scales from one row to the next

  [[nodiscard]] DigitGroup from_row(int r) const {
    return {digits + r * row_digits, scales + r * row_groups, sums + r * row_groups * kDigits, row_digits, row_groups};
  }
};

// Scales, zero points and what is left of minima, of 8 output channels in one group.
struct Affine8 {
  __m256 scale;
  __m256i zero;
  __m256 rest;  // m + z s
  bool minima;

  Affine8(const TileLayout& layout, const std::byte* tile, int group, int n) : minima(layout.zero == ZeroKind::m16) {
    const int64_t at = static_cast<int64_t>(group) * kNt + n;
    scale = load_bf16_8(tile + layout.scale_offset + at * 2);
    if (!minima) {
      zero = load_z8(tile + layout.zero_offset + at);
      rest = _mm256_setzero_ps();
      return;
    }
    // As fold_minimum does; the order of operands makes 0 / 0 a bound.
    const __m256 m = load_bf16_8(tile + layout.zero_offset + at * 2);
    const __m256 limit = _mm256_set1_ps(kMaxFoldedZero);
    const __m256 exact = _mm256_div_ps(_mm256_sub_ps(_mm256_setzero_ps(), m), scale);
    const __m256 bounded = _mm256_max_ps(_mm256_min_ps(exact, limit), _mm256_sub_ps(_mm256_setzero_ps(), limit));
    zero = _mm256_cvtps_epi32(bounded);
    rest = _mm256_fmadd_ps(_mm256_cvtepi32_ps(zero), scale, m);
  }

  // acc[0..7] += the group's contribution: dot times scale, sum being that of x over the group.
  void add(__m256 dot, float x_sum, float* acc) const {
    __m256 sum = _mm256_loadu_ps(acc);
    if (minima) sum = _mm256_fmadd_ps(rest, _mm256_set1_ps(x_sum), sum);
    _mm256_storeu_ps(acc, _mm256_fmadd_ps(dot, scale, sum));
  }
};

// D_i and z S_i are integers below 2^24 here, so floats hold them exactly.
inline void finish_bytes(const Affine8& affine, const __m256i (&dots)[kDigits], const float* x_scale,
                         const int32_t* x_sums, float* acc) {
  const __m256 zero = _mm256_cvtepi32_ps(affine.zero);
  __m256 d[kDigits];
  float sums[kDigits];
  for (int i = 0; i < kDigits; ++i) {
    sums[i] = static_cast<float>(x_sums[i]);
    d[i] = _mm256_fnmadd_ps(zero, _mm256_set1_ps(sums[i]), _mm256_cvtepi32_ps(dots[i]));
  }
  __m256 dot = _mm256_fmadd_ps(d[1], _mm256_set1_ps(256.0F), d[0]);
  dot = _mm256_fmadd_ps(d[2], _mm256_set1_ps(65536.0F), dot);
  const float x_sum = affine.minima ? *x_scale * (sums[0] + 256.0F * sums[1] + 65536.0F * sums[2]) : 0.0F;
  affine.add(_mm256_mul_ps(dot, _mm256_set1_ps(*x_scale)), x_sum, acc);
}

// What converting D_i - z S_i to float rounds away is less than 2^-24 of sum |q - z| |x|: |d_0| is at most |x / scale|.
inline void finish_wide(const Affine8& affine, const __m256i (&dots)[kWideDigits], const float* x_scale,
                        const int32_t* x_sums, float* acc) {
  __m256 d[kWideDigits];
  for (int i = 0; i < kWideDigits; ++i) {
    const __m256i correction = _mm256_mullo_epi32(affine.zero, _mm256_set1_epi32(x_sums[i]));
    d[i] = _mm256_cvtepi32_ps(_mm256_sub_epi32(dots[i], correction));
  }
  constexpr float kUp = 1 << kWideBits;
  const __m256 dot = _mm256_fmadd_ps(d[1], _mm256_set1_ps(kUp), d[0]);
  const float x_sum = *x_scale * (static_cast<float>(x_sums[0]) + kUp * static_cast<float>(x_sums[1]));
  affine.add(_mm256_mul_ps(dot, _mm256_set1_ps(*x_scale)), x_sum, acc);
}

// Makes the compiler add in the order written: left to itself it forms trees that keep many more registers live.
inline void in_order(__m256i& sum) { asm("" : "+v"(sum)); }

inline __m256i broadcast_4(const int8_t* p) {
  int32_t v;
  std::memcpy(&v, p, sizeof(v));
  return _mm256_set1_epi32(v);
}

// 8 kVectors output channels of one group, from n on, times kRowsHere rows. A 32-bit lane of codes is one output
// channel: input channels 0 2 4 6 in the low nibbles, 1 3 5 7 in the high ones.
template <int kRowsHere, int kVectors>
inline void channels_w4(const TileLayout& layout, const std::byte* tile, int group, int n, const DigitGroup& x,
                        float* acc) {
  constexpr int kBlocksIn16Bits = 4;
  const int blocks = layout.tile_group / kBlock;
  const std::byte* codes = tile + group * blocks * (kNt * 4) + n * 4;
  const int8_t* digits = x.digits;
  const __m256i low_mask = _mm256_set1_epi8(15);
  __m256i dots[kRowsHere][kVectors][kDigits];
  for (auto& row : dots) {
    for (auto& vector : row) {
      for (__m256i& d : vector) d = _mm256_setzero_si256();
    }
  }
  for (int kb = 0; kb < blocks; kb += kBlocksIn16Bits) {
    __m256i sums[kRowsHere][kVectors][kDigits];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocksIn16Bits; ++b, codes += kNt * 4, digits += ByteDigits::kBytes) {
      __m256i low[kVectors];
      __m256i high[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const __m256i w = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + v * 32));
        if ((v * 32) % 64 == 0 && (kVectors % 2 == 0 || n % 16 == 0)) {
          prefetch_line(codes + v * 32 + kTilesAhead256 * layout.tile_bytes);
        }
        low[v] = _mm256_and_si256(w, low_mask);
        high[v] = _mm256_and_si256(_mm256_srli_epi16(w, 4), low_mask);
      }
      for (int r = 0; r < kRowsHere; ++r) {
        for (int i = 0; i < kDigits; ++i) {
          const int8_t* d = digits + r * x.row_digits + i * kBlock;
          const __m256i d_low = broadcast_4(d);
          const __m256i d_high = broadcast_4(d + 4);
          for (int v = 0; v < kVectors; ++v) {
            const __m256i first = _mm256_maddubs_epi16(low[v], d_low);
            __m256i& sum = sums[r][v][i];
            sum = b == 0 ? first : _mm256_add_epi16(sum, first);
            in_order(sum);
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(high[v], d_high));
            in_order(sum);
          }
        }
      }
    }
    for (int r = 0; r < kRowsHere; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        for (int i = 0; i < kDigits; ++i) {
          const __m256i wide = _mm256_madd_epi16(sums[r][v][i], _mm256_set1_epi16(1));
          dots[r][v][i] = _mm256_add_epi32(dots[r][v][i], wide);
        }
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const Affine8 affine(layout, tile, group, n + v * 8);
    for (int r = 0; r < kRowsHere; ++r) {
      finish_bytes(affine, dots[r][v], x.scales + r * x.row_groups, x.sums + r * x.row_groups * kDigits,
                   acc + r * kNt + n + v * 8);
    }
  }
}

// Sums of 4 neighbouring lanes: of v[i], channel 2 i in the lower half and 2 i + 1 in the upper.
inline __m256i sum_quads(const __m256i (&v)[4]) {
  const __m256i even_odd = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
  return _mm256_permutevar8x32_epi32(even_odd, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// 8 output channels of one group, from n on: each 8 bytes, input channels in their own order.
inline void channels_w8(const TileLayout& layout, const std::byte* tile, int group, int n, const DigitGroup& x,
                        float* acc) {
  const int blocks = layout.tile_group / kBlock;
  const std::byte* codes = tile + group * blocks * (kNt * 8) + n * 8;
  const int8_t* digits = x.digits;
  __m256i sums[kWideDigits][4];
  for (auto& digit : sums) {
    for (__m256i& s : digit) s = _mm256_setzero_si256();
  }
  for (int kb = 0; kb < blocks; ++kb, codes += kNt * 8, digits += WideDigits::kBytes) {
    prefetch_line(codes + kTilesAhead256 * layout.tile_bytes);
    __m256i d[kWideDigits];
    for (int i = 0; i < kWideDigits; ++i) {
      d[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(digits + i * 16)));
    }
    for (int v = 0; v < 4; ++v) {
      const __m256i w = _mm256_cvtepu8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(codes + v * 16)));
      for (int i = 0; i < kWideDigits; ++i) sums[i][v] = _mm256_add_epi32(sums[i][v], _mm256_madd_epi16(w, d[i]));
    }
  }
  const __m256i dots[kWideDigits] = {sum_quads(sums[0]), sum_quads(sums[1])};
  finish_wide(Affine8(layout, tile, group, n), dots, x.scales, x.sums, acc + n);
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

// What follows the codes, scales and zero points, of one group of a tile ahead.
inline void prefetch_affine(const TileLayout& layout, const std::byte* tile, int group) {
  const std::byte* ahead = tile + kTilesAhead256 * layout.tile_bytes;
  const int64_t zero_bytes = layout.zero == ZeroKind::z8 ? kNt : 2 * kNt;
  for (int64_t i = 0; i < 2 * kNt; i += 64) prefetch_line(ahead + layout.scale_offset + group * (2 * kNt) + i);
  for (int64_t i = 0; i < zero_bytes; i += 64) prefetch_line(ahead + layout.zero_offset + group * zero_bytes + i);
}

template <int kRowsHere, int kVectors>
inline void group_w4_256(const TileLayout& layout, const std::byte* tile, int group, const DigitGroup& x, float* acc) {
  for (int n = 0; n < kNt; n += 8 * kVectors) {
    channels_w4<kRowsHere, kVectors>(layout, tile, group, n, x, acc);
  }
}

inline void rows_w4(const TileLayout& layout, const std::byte* tile, int group, const DigitGroup& x, int rows,
                    float* acc) {
  int r = 0;
  for (; r + 2 <= rows; r += 2) group_w4_256<2, 1>(layout, tile, group, x.from_row(r), acc + r * kNt);
  if (r < rows) group_w4_256<1, 2>(layout, tile, group, x.from_row(r), acc + r * kNt);
}

inline void rows_w8(const TileLayout& layout, const std::byte* tile, int group, const DigitGroup& x, int rows,
                    float* acc) {
  for (int r = 0; r < rows; ++r) {
    const DigitGroup row = x.from_row(r);
    for (int n = 0; n < kNt; n += 8) channels_w8(layout, tile, group, n, row, acc + r * kNt);
  }
}

void fused_digits_avx2(const TileRun& run, const DigitRows& x, int rows, float* acc) {
  const TileLayout& layout = *run.layout;
  const bool w4 = layout.bits == 4;
  const int tile_groups = layout.groups_per_tile();
  const int64_t block_bytes = w4 ? ByteDigits::kBytes : WideDigits::kBytes;
  DigitGroup group = {.digits = x.digits,
                      .scales = x.scales,
                      .sums = x.sums,
                      .row_digits = x.k / kBlock * block_bytes,
                      .row_groups = x.k / layout.tile_group};
  std::memset(acc, 0, sizeof(float) * static_cast<size_t>(rows) * kNt);
  const DigitRest* rest[kMaxDigitRows];
  for (int r = 0; r < rows; ++r) rest[r] = x.rests + r * rest_capacity(x.k);
  for (int64_t kt = 0; kt < layout.k_tiles_used(); ++kt) {
    const std::byte* tile = run.tiles + kt * layout.tile_bytes;
    for (int g = 0; g < tile_groups; ++g) {
      prefetch_affine(layout, tile, g);
      (w4 ? rows_w4 : rows_w8)(layout, tile, g, group, rows, acc);
      group.digits += layout.tile_group / kBlock * block_bytes;
      group.scales += 1;
      group.sums += kDigits;
    }
    for (int r = 0; r < rows; ++r) {
      for (; rest[r]->k < (kt + 1) * kKt; ++rest[r]) {
        add_rest_256(layout, tile, static_cast<int>(rest[r]->k - kt * kKt), rest[r]->value, acc + r * kNt);
      }
    }
  }
}

}  // namespace
}  // namespace tilefuse
