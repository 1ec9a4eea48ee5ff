// compute="int8" on AVX512_VNNI. VPDPBUSD multiplies unsigned by signed bytes. Few rows: codes are the unsigned
// operand, and sums start from -z sum x. Many rows, 4-bit codes: x + 128 is the unsigned operand and q - z the signed
// one, and sums start from -128 sum (q - z), the same for all rows: zero points cost nothing per row.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "int8_group.h"
#include "int8_kernels.h"

namespace tilefuse {
namespace {

constexpr int kInt8Vectors = kNt / 16;  // vectors of 32-bit lanes that hold the 64 output channels
constexpr int kVnniRows = 12;

// Sums have the type that VPDPBUSD's operand has inside the compiler: with __m512i GCC keeps two copies of each.
using Sums16 = int32_t __attribute__((vector_size(64)));

// Hardware prefetchers stop at each 4 KiB page, a tile is about that: kernels prefetch the next tile.
inline void prefetch_line(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline __m512 load_16_bf16(const std::byte* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

// 8-bit codes of 8 input by 16 output channels: `low` has channels 0..3, `high` 4..7.
struct CodesW8 {
  __m512i low, high;
  explicit CodesW8(const std::byte* codes) {
    const __m512i first = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i second = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const __m512i a = _mm512_load_si512(codes);
    const __m512i b = _mm512_load_si512(codes + 64);
    low = _mm512_permutex2var_epi32(a, first, b);
    high = _mm512_permutex2var_epi32(a, second, b);
  }
};

// The zero points of 16 output channels and, with minima, what they leave of them.
inline __m512i int8_zeros(const TileLayout& layout, const std::byte* tile, int64_t at, __m512 scale, float* rest) {
  const std::byte* zeros = tile + layout.zero_offset;
  if (layout.zero == ZeroKind::z8) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + at)));
  }
  const __m512 m = load_16_bf16(zeros + at * 2);
  const __m512 limit = _mm512_set1_ps(static_cast<float>((1 << layout.bits) - 1));
  // The order of operands makes 0 / 0 a bound.
  const __m512 exact = _mm512_div_ps(_mm512_sub_ps(_mm512_setzero_ps(), m), scale);
  const __m512i z = _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(exact, limit), _mm512_setzero_ps()));
  _mm512_store_ps(rest, _mm512_fmadd_ps(_mm512_cvtepi32_ps(z), scale, m));
  return z;
}

// Sum of the 4-bit codes of a group, 16 output channels: the low nibbles add up in bytes (at most 16 of them), whole
// bytes by multiplying with one.
inline __m512i sum_codes_w4(const std::byte* codes, int blocks) {
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i lows = _mm512_setzero_si512();
  __m512i all[2] = {lows, lows};  // sum of low + 16 high
  for (int kb = 0; kb < blocks; kb += 2) {
    for (int i = 0; i < 2; ++i) {
      const __m512i w = _mm512_load_si512(codes + (kb + i) * (kNt * 4));
      lows = _mm512_add_epi8(lows, _mm512_and_si512(w, mask));
      all[i] = _mm512_dpbusd_epi32(all[i], w, ones);
    }
  }
  const __m512i low = _mm512_dpbusd_epi32(_mm512_setzero_si512(), lows, ones);
  const __m512i high = _mm512_srli_epi32(_mm512_sub_epi32(_mm512_add_epi32(all[0], all[1]), low), 4);
  return _mm512_add_epi32(low, high);
}

void prepare_vnni(const TileRun& run, int64_t k_tile, bool offset, std::byte* prepared) {
  const TileLayout& layout = *run.layout;
  const std::byte* tile = run.tiles + k_tile * layout.tile_bytes;
  auto* group = reinterpret_cast<Int8Group*>(prepared);
  const int blocks = layout.tile_group / kBlock;
  // What follows the codes of the next tile; `pass` fetches those.
  for (int64_t i = layout.scale_offset; i < layout.tile_bytes; i += 64) prefetch_line(tile + layout.tile_bytes + i);
  for (int g = 0; g < layout.groups_per_tile(); ++g, ++group) {
    __mmask16 equal = 0xFFFF;
    const int64_t first = static_cast<int64_t>(g) * kNt;
    __m512i first_zero = _mm512_setzero_si512();
    for (int v = 0; v < kInt8Vectors; ++v) {
      const __m512 scale = load_16_bf16(tile + layout.scale_offset + (first + v * 16) * 2);
      const __m512i z = int8_zeros(layout, tile, first + v * 16, scale, group->rest + v * 16);
      if (v == 0) first_zero = _mm512_broadcastd_epi32(_mm512_castsi512_si128(z));
      equal &= _mm512_cmpeq_epi32_mask(z, first_zero);
      _mm512_store_ps(group->scale + v * 16, scale);
      __m512i start;
      if (offset) {
        const __m512i sum = sum_codes_w4(tile + g * blocks * (kNt * 4) + v * 64, blocks);
        const __m512i all = _mm512_sub_epi32(sum, _mm512_mullo_epi32(z, _mm512_set1_epi32(layout.tile_group)));
        start = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(all, 7));
        _mm512_store_si512(group->zeros + v * 16, _mm512_mullo_epi32(z, _mm512_set1_epi32(0x01010101)));
      } else {
        start = _mm512_and_si512(_mm512_sub_epi32(_mm512_setzero_si512(), z), _mm512_set1_epi32(0xFFFF));
      }
      _mm512_store_si512(group->start + v * 16, start);
    }
    group->uniform = equal == 0xFFFF;
    group->zero = _mm_cvtsi128_si32(_mm512_castsi512_si128(first_zero));
  }
}

template <int kBits, bool kOffset, int kRowsHere, int kAtOnce>
inline void int8_group_vnni(const std::byte* codes, const std::byte* later, const Int8Group& group, int blocks,
                            const uint32_t* x, const float* x_scales, const int32_t* x_sums, bool minima, float* acc) {
  constexpr int64_t kBytes = kBits * 16;  // codes of 8 input by 16 output channels
  constexpr int64_t kRowBytes = kInt8Vectors * kBytes;
  const __m512i mask = _mm512_set1_epi8(15);
  for (int v0 = 0; v0 < kInt8Vectors; v0 += kAtOnce) {
    Sums16 c[kRowsHere][kAtOnce];
    if (kOffset) {
#pragma GCC unroll 16
      for (int r = 0; r < kRowsHere; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < kAtOnce; ++v) c[r][v] = (Sums16)_mm512_load_si512(group.start + (v0 + v) * 16);
      }
    } else if (group.uniform != 0) {
#pragma GCC unroll 16
      for (int r = 0; r < kRowsHere; ++r) {
        const auto start = (Sums16)_mm512_set1_epi32(-group.zero * x_sums[r]);
#pragma GCC unroll 16
        for (int v = 0; v < kAtOnce; ++v) c[r][v] = start;
      }
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < kRowsHere; ++r) {
        const __m512i sum = _mm512_set1_epi32(x_sums[r]);
#pragma GCC unroll 16
        for (int v = 0; v < kAtOnce; ++v) {
          c[r][v] = (Sums16)_mm512_madd_epi16(_mm512_load_si512(group.start + (v0 + v) * 16), sum);
        }
      }
    }
    const std::byte* at = codes + v0 * kBytes;
    const uint32_t* from = x;
    const auto multiply = [&](const __m512i(&w)[kAtOnce]) {
#pragma GCC unroll 16
      for (int r = 0; r < kRowsHere; ++r) {
        const __m512i a = _mm512_set1_epi32(static_cast<int>(from[r]));
#pragma GCC unroll 16
        for (int v = 0; v < kAtOnce; ++v) {
          const auto sum = (__m512i)c[r][v];
          c[r][v] = (Sums16)(kOffset ? _mm512_dpbusd_epi32(sum, a, w[v]) : _mm512_dpbusd_epi32(sum, w[v], a));
        }
      }
      from += kRowsHere;
    };
    for (int kb = 0; kb < blocks; ++kb, at += kRowBytes) {
      __m512i low[kAtOnce];
      __m512i high[kAtOnce];
      if constexpr (kBits == 4) {
#pragma GCC unroll 16
        for (int v = 0; v < kAtOnce; ++v) {
          prefetch_line(later);
          later += 64;
          low[v] = _mm512_and_si512(_mm512_load_si512(at + v * 64), mask);
          if (kOffset) low[v] = _mm512_sub_epi8(low[v], _mm512_load_si512(group.zeros + (v0 + v) * 16));
        }
        multiply(low);
#pragma GCC unroll 16
        for (int v = 0; v < kAtOnce; ++v) {
          high[v] = _mm512_and_si512(_mm512_srli_epi16(_mm512_load_si512(at + v * 64), 4), mask);
          if (kOffset) high[v] = _mm512_sub_epi8(high[v], _mm512_load_si512(group.zeros + (v0 + v) * 16));
        }
        multiply(high);
      } else {
#pragma GCC unroll 16
        for (int v = 0; v < kAtOnce; ++v) {
          const CodesW8 w(at + v * kBytes);
          prefetch_line(later);
          prefetch_line(later + 64);
          later += 128;
          low[v] = w.low;
          high[v] = w.high;
        }
        multiply(low);
        multiply(high);
      }
    }
#pragma GCC unroll 16
    for (int v = 0; v < kAtOnce; ++v) {
      const __m512 scale = _mm512_load_ps(group.scale + (v0 + v) * 16);
#pragma GCC unroll 16
      for (int r = 0; r < kRowsHere; ++r) {
        float* to = acc + r * kNt + (v0 + v) * 16;
        const __m512 x_scale = _mm512_set1_ps(x_scales[r]);
        __m512 sum = _mm512_loadu_ps(to);
        if (minima) {
          const __m512 x_sum = _mm512_mul_ps(x_scale, _mm512_set1_ps(static_cast<float>(x_sums[r])));
          sum = _mm512_fmadd_ps(_mm512_load_ps(group.rest + (v0 + v) * 16), x_sum, sum);
        }
        _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)c[r][v]), _mm512_mul_ps(scale, x_scale), sum));
      }
    }
  }
}

template <int kBits, bool kOffset, int kRowsHere>
void int8_tile_vnni(const TileRun& run, int64_t k_tile, const std::byte* prepared, const Int8Rows& x, float* acc) {
  constexpr int kAtOnce = kRowsHere <= 6 ? 4 : 2;
  const TileLayout& layout = *run.layout;
  const std::byte* tile = run.tiles + k_tile * layout.tile_bytes;
  const auto* group = reinterpret_cast<const Int8Group*>(prepared);
  const int blocks = layout.tile_group / kBlock;
  const int64_t group_bytes = int64_t{layout.tile_group} * kNt * kBits / 8;
  const int groups = layout.groups_per_tile();
  const uint32_t* words = x.words + k_tile * x.tile_stride;
  const float* scales = x.scales + k_tile * groups * kRowsHere;
  const int32_t* sums = x.sums + k_tile * groups * kRowsHere;
  for (int g = 0; g < groups; ++g) {
    const std::byte* codes = tile + g * group_bytes;
    int8_group_vnni<kBits, kOffset, kRowsHere, kAtOnce>(
        codes, codes + layout.tile_bytes, group[g], blocks, words + g * (layout.tile_group / 4) * kRowsHere,
        scales + g * kRowsHere, sums + g * kRowsHere, layout.zero == ZeroKind::m16, acc);
  }
}

// Calls fn with std::integral_constant of `rows`, 1 to kVnniRows.
template <int kRowsHere = kVnniRows, typename Fn>
inline void with_int8_rows(int rows, Fn&& fn) {
  if constexpr (kRowsHere == 1) {
    fn(std::integral_constant<int, 1>{});
  } else if (rows == kRowsHere) {
    fn(std::integral_constant<int, kRowsHere>{});
  } else {
    with_int8_rows<kRowsHere - 1>(rows, fn);
  }
}

void pass_vnni(const TileRun& run, int64_t k_tile, bool offset, const std::byte* prepared, const Int8Rows& x,
               float* acc) {
  with_int8_rows(x.rows, [&](auto n) {
    if (run.layout->bits == 8) {
      int8_tile_vnni<8, false, n()>(run, k_tile, prepared, x, acc);
    } else if (offset) {
      int8_tile_vnni<4, true, n()>(run, k_tile, prepared, x, acc);
    } else {
      int8_tile_vnni<4, false, n()>(run, k_tile, prepared, x, acc);
    }
  });
}

}  // namespace
}  // namespace tilefuse
