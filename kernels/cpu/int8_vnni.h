// compute="int8" on AVX512_VNNI. VPDPBUSD multiplies unsigned by signed bytes.
//
// Few rows: codes, unpacked in registers, are the unsigned operand, and sums start from -z sum x. Many rows: w = q - z,
// laid out once a k tile for all passes, is the signed operand of x + 128, and sums start from -128 sum w, the same for
// all rows: zero points cost nothing per row. 8-bit codes have w = q - 128, to which zero points other than 128 add
// (128 - z) sum x.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "int8_group.h"
#include "int8_kernels.h"
#include "loads_avx512.h"
#include "prefetch.h"
#include "vnni_dot.h"

namespace tilefuse {
namespace {

constexpr int kInt8Vectors = kNt / 16;  // vectors of 32-bit lanes that hold the 64 output channels
constexpr int kVnniRows = 12;

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
  const __m512 m = load_bf16(zeros + at * 2);
  const __m512 limit = _mm512_set1_ps(static_cast<float>((1 << layout.bits) - 1));
  // The order of operands makes 0 / 0 a bound.
  const __m512 exact = _mm512_div_ps(_mm512_sub_ps(_mm512_setzero_ps(), m), scale);
  const __m512i z = _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(exact, limit), _mm512_setzero_ps()));
  _mm512_store_ps(rest, _mm512_fmadd_ps(_mm512_cvtepi32_ps(z), scale, m));
  return z;
}

// Few rows fetch later codes, measured: those of one row of 4 bits arrive by themselves; one or two rows of 8 bits are
// done with theirs before hardware prefetchers have brought the next (as in fused_digits.h); else two tiles ahead to L2
// (a fifth faster than one at 4 rows), but the next one to L1 where little is computed on many bytes.
template <int kBits, int kRowsHere>
constexpr bool kFetchesSoon = kBits == 8 && kRowsHere <= 2;
template <int kBits, int kRowsHere>
constexpr bool kFetchesFar = kBits == 4 || kRowsHere > 4;

template <int kBits, int kRowsHere>
TILEFUSE_ALWAYS_INLINE const std::byte* codes_later(const TileLayout& layout, const std::byte* codes) {
  if constexpr (kFetchesSoon<kBits, kRowsHere>) return codes + kCodesAhead;
  return codes + (kFetchesFar<kBits, kRowsHere> ? 2 : 1) * layout.tile_bytes;
}

template <int kBits, int kRowsHere>
TILEFUSE_ALWAYS_INLINE void prefetch_later(const std::byte* p) {
  if constexpr (kBits == 4 && kRowsHere == 1) return;
  if constexpr (kFetchesSoon<kBits, kRowsHere> || kFetchesFar<kBits, kRowsHere>) {
    prefetch_l2(p);
  } else {
    prefetch(p);
  }
}

// What passes over a k tile read.
struct PreparedVnni {
  Int8Group groups[kKt / 32];
  // Many rows: [pairs of vectors][k / 4][2][64], for 16 output channels the bytes of 4 input channels.
  std::byte panel[kInt8Vectors / 2][kKt / 4][2][64];
};
static_assert(sizeof(PreparedVnni) <= kInt8PreparedBytes);

// Lays 4-bit codes of a group out in a panel, less their zero points, and returns their sums. z is at most 15: four
// differences add up in a byte.
inline __m512i unpack_w4(const std::byte* codes, int blocks, __m512i z, std::byte* to) {
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i ones = _mm512_set1_epi8(1);
  const __m512i zeros = _mm512_mullo_epi32(z, _mm512_set1_epi32(0x01010101));
  Sums16 sum = {};
  for (int kb = 0; kb < blocks; kb += 2) {
    __m512i four = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512i w = _mm512_load_si512(codes + (kb + i) * (kNt * 4));
      const __m512i low = _mm512_sub_epi8(_mm512_and_si512(w, mask), zeros);
      const __m512i high = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(w, 4), mask), zeros);
      _mm512_store_si512(to + (kb + i) * 256, low);
      _mm512_store_si512(to + (kb + i) * 256 + 128, high);
      four = _mm512_add_epi8(four, _mm512_add_epi8(low, high));
    }
    sum = dot_u8_s8(sum, ones, four);
  }
  return (__m512i)sum;
}

// Likewise 8-bit codes, less 128.
inline __m512i unpack_w8(const std::byte* codes, int blocks, std::byte* to) {
  const __m512i sign = _mm512_set1_epi8(-128);
  const __m512i ones = _mm512_set1_epi8(1);
  Sums16 sums[2] = {};
  for (int kb = 0; kb < blocks; ++kb) {
    const CodesW8 w(codes + kb * (kNt * 8));
    const __m512i low = _mm512_xor_si512(w.low, sign);
    const __m512i high = _mm512_xor_si512(w.high, sign);
    _mm512_store_si512(to + kb * 256, low);
    _mm512_store_si512(to + kb * 256 + 128, high);
    sums[0] = dot_u8_s8(sums[0], ones, low);
    sums[1] = dot_u8_s8(sums[1], ones, high);
  }
  return (__m512i)(sums[0] + sums[1]);
}

void prepare_vnni(const TileRun& run, int64_t k_tile, bool many, std::byte* prepared) {
  const TileLayout& layout = *run.layout;
  const std::byte* tile = run.tiles + k_tile * layout.tile_bytes;
  auto& out = *reinterpret_cast<PreparedVnni*>(prepared);
  const int blocks = layout.tile_group / kBlock;
  // Hardware prefetchers stop at each 4 KiB page, a tile is about that: kernels prefetch tiles. Few rows: what follows
  // the codes; `pass` fetches those.
  for (int64_t i = many ? layout.tile_bytes : layout.scale_offset; i < layout.tile_bytes; i += 64)
    prefetch(tile + layout.tile_bytes + i);
  for (int g = 0; g < layout.groups_per_tile(); ++g) {
    Int8Group& group = out.groups[g];
    const std::byte* codes = tile + g * blocks * (kNt * layout.bits);
    const int64_t first = static_cast<int64_t>(g) * kNt;
    __mmask16 equal = 0xFFFF;
    __m512i first_zero = _mm512_setzero_si512();
    for (int v = 0; v < kInt8Vectors; ++v) {
      const __m512 scale = load_bf16(tile + layout.scale_offset + (first + v * 16) * 2);
      const __m512i z = int8_zeros(layout, tile, first + v * 16, scale, group.rest + v * 16);
      if (v == 0) first_zero = _mm512_broadcastd_epi32(_mm512_castsi512_si128(z));
      equal &= _mm512_cmpeq_epi32_mask(z, first_zero);
      _mm512_store_ps(group.scale + v * 16, scale);
      std::byte* panel = out.panel[v / 2][g * blocks * 2][v % 2];
      __m512i times_x = z;  // in the low half of each lane, nothing in the high one
      if (many) {
        const __m512i sum =
            layout.bits == 4 ? unpack_w4(codes + v * 64, blocks, z, panel) : unpack_w8(codes + v * 128, blocks, panel);
        const __m512i start = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sum, 7));
        _mm512_store_si512(group.start + v * 16, start);
        times_x = layout.bits == 4 ? _mm512_setzero_si512() : _mm512_sub_epi32(z, _mm512_set1_epi32(128));
      }
      times_x = _mm512_and_si512(_mm512_sub_epi32(_mm512_setzero_si512(), times_x), _mm512_set1_epi32(0xFFFF));
      _mm512_store_si512(group.times_x + v * 16, times_x);
    }
    group.zero = _mm_cvtsi128_si32(_mm512_castsi512_si128(first_zero));
    group.uniform = equal == 0xFFFF;
    group.shared = layout.bits == 4 || (equal == 0xFFFF && group.zero == 128);
  }
}

// What sums start from, few rows.
template <int kRowsHere, int kAtOnce>
TILEFUSE_ALWAYS_INLINE void start_few(const Int8Group& group, int v0, const int32_t* x_sums,
                                      Sums16 (&c)[kRowsHere][kAtOnce]) {
  const int32_t* times_x = group.times_x + v0 * 16;
  if (group.uniform != 0) {
#pragma GCC unroll 16
    for (int r = 0; r < kRowsHere; ++r) {
      const auto all = (Sums16)_mm512_set1_epi32(-group.zero * x_sums[r]);
#pragma GCC unroll 16
      for (int v = 0; v < kAtOnce; ++v) c[r][v] = all;
    }
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < kRowsHere; ++r) {
      const __m512i sum = _mm512_set1_epi32(x_sums[r]);
#pragma GCC unroll 16
      for (int v = 0; v < kAtOnce; ++v) {
        c[r][v] = (Sums16)_mm512_madd_epi16(_mm512_load_si512(times_x + v * 16), sum);
      }
    }
  }
}

// Likewise many rows.
template <int kRowsHere, int kAtOnce>
TILEFUSE_ALWAYS_INLINE void start_many(const Int8Group& group, int v0, const int32_t* x_sums,
                                       Sums16 (&c)[kRowsHere][kAtOnce]) {
  const int32_t* start = group.start + v0 * 16;
#pragma GCC unroll 16
  for (int r = 0; r < kRowsHere; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kAtOnce; ++v) c[r][v] = (Sums16)_mm512_load_si512(start + v * 16);
  }
  if (group.shared != 0) return;
  const int32_t* times_x = group.times_x + v0 * 16;
#pragma GCC unroll 16
  for (int r = 0; r < kRowsHere; ++r) {
    const __m512i sum = _mm512_set1_epi32(x_sums[r]);
#pragma GCC unroll 16
    for (int v = 0; v < kAtOnce; ++v) {
      c[r][v] += (Sums16)_mm512_madd_epi16(_mm512_load_si512(times_x + v * 16), sum);
    }
  }
}

// acc += c, scaled.
template <int kRowsHere, int kAtOnce>
TILEFUSE_ALWAYS_INLINE void add_group(const Int8Group& group, int v0, const Sums16 (&c)[kRowsHere][kAtOnce],
                                      const float* x_scales, float* acc) {
#pragma GCC unroll 16
  for (int v = 0; v < kAtOnce; ++v) {
    const __m512 scale = _mm512_load_ps(group.scale + (v0 + v) * 16);
#pragma GCC unroll 16
    for (int r = 0; r < kRowsHere; ++r) {
      float* to = acc + r * kNt + (v0 + v) * 16;
      const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[r]));
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)c[r][v]), both, _mm512_loadu_ps(to)));
    }
  }
}

// acc += what zero points leave of minima, times the sums of x.
void add_minima(const Int8Group& group, int rows, const float* x_scales, const int32_t* x_sums, float* acc) {
  for (int r = 0; r < rows; ++r) {
    const __m512 x_sum = _mm512_set1_ps(x_scales[r] * static_cast<float>(x_sums[r]));
    for (int n = 0; n < kNt; n += 16) {
      float* to = acc + r * kNt + n;
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_load_ps(group.rest + n), x_sum, _mm512_loadu_ps(to)));
    }
  }
}

// One group of few rows, codes unpacked in registers.
template <int kBits, int kRowsHere, int kAtOnce>
[[gnu::noinline]] void few_rows_group(const std::byte* codes, const std::byte* later, const Int8Group& group,
                                      int blocks, const uint32_t* x, const float* x_scales, const int32_t* x_sums,
                                      float* acc) {
  constexpr int64_t kBytes = kBits * 16;  // codes of 8 input by 16 output channels
  constexpr int64_t kRowBytes = kInt8Vectors * kBytes;
  const __m512i mask = _mm512_set1_epi8(15);
  for (int v0 = 0; v0 < kInt8Vectors; v0 += kAtOnce) {
    asm("" : "+r"(x_scales), "+r"(x_sums));  // as many_rows_group
    Sums16 c[kRowsHere][kAtOnce];
    start_few(group, v0, x_sums, c);
    const std::byte* at = codes + v0 * kBytes;
    const uint32_t* from = x;
    const auto multiply = [&](const __m512i(&w)[kAtOnce]) {
#pragma GCC unroll 16
      for (int r = 0; r < kRowsHere; ++r) {
        const __m512i a = _mm512_set1_epi32(static_cast<int>(from[r]));
#pragma GCC unroll 16
        for (int v = 0; v < kAtOnce; ++v) c[r][v] = dot_u8_s8(c[r][v], w[v], a);
      }
      from += kRowsHere;
    };
    for (int kb = 0; kb < blocks; ++kb, at += kRowBytes) {
      __m512i low[kAtOnce];
      __m512i high[kAtOnce];
      if constexpr (kBits == 4) {
#pragma GCC unroll 16
        for (int v = 0; v < kAtOnce; ++v) {
          prefetch_later<kBits, kRowsHere>(later);
          later += 64;
          low[v] = _mm512_and_si512(_mm512_load_si512(at + v * 64), mask);
        }
        multiply(low);
#pragma GCC unroll 16
        for (int v = 0; v < kAtOnce; ++v) {
          high[v] = _mm512_and_si512(_mm512_srli_epi16(_mm512_load_si512(at + v * 64), 4), mask);
        }
        multiply(high);
      } else {
#pragma GCC unroll 16
        for (int v = 0; v < kAtOnce; ++v) {
          const CodesW8 w(at + v * kBytes);
          prefetch_later<kBits, kRowsHere>(later);
          prefetch_later<kBits, kRowsHere>(later + 64);
          later += 128;
          low[v] = w.low;
          high[v] = w.high;
        }
        multiply(low);
        multiply(high);
      }
    }
    add_group(group, v0, c, x_scales, acc);
  }
}

// One group of a pass of many rows.
template <int kRowsHere>
[[gnu::noinline]] void many_rows_group(const PreparedVnni& prepared, int g, int steps, const uint32_t* x,
                                       const float* x_scales, const int32_t* x_sums, float* acc) {
  const Int8Group& group = prepared.groups[g];
  for (int v0 = 0; v0 < kInt8Vectors; v0 += 2) {
    // Or GCC broadcasts all rows' scales and sums once for all v0, to the stack.
    asm("" : "+r"(x_scales), "+r"(x_sums));
    Sums16 c[kRowsHere][2];
    start_many(group, v0, x_sums, c);
    const std::byte* at = prepared.panel[v0 / 2][g * steps][0];
    const uint32_t* from = x;
    for (int k = 0; k < steps; ++k, at += 128, from += kRowsHere) {
      const __m512i w[2] = {_mm512_load_si512(at), _mm512_load_si512(at + 64)};
#pragma GCC unroll 16
      for (int r = 0; r < kRowsHere; ++r) {
        const __m512i a = _mm512_set1_epi32(static_cast<int>(from[r]));
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) c[r][v] = dot_u8_s8(c[r][v], a, w[v]);
      }
    }
    add_group(group, v0, c, x_scales, acc);
  }
}

template <int kBits, bool kMany, int kRowsHere>
void int8_tile_vnni(const TileRun& run, int64_t k_tile, const PreparedVnni& prepared, const Int8Rows& x, float* acc) {
  const TileLayout& layout = *run.layout;
  const std::byte* tile = run.tiles + k_tile * layout.tile_bytes;
  const int steps = layout.tile_group / 4;
  const int64_t group_bytes = int64_t{layout.tile_group} * kNt * layout.bits / 8;
  const int groups = layout.groups_per_tile();
  for (int g = 0; g < layout.groups_used(k_tile); ++g) {
    const uint32_t* words = x.words + k_tile * x.tile_stride + g * steps * kRowsHere;
    const float* scales = x.scales + (k_tile * groups + g) * kRowsHere;
    const int32_t* sums = x.sums + (k_tile * groups + g) * kRowsHere;
    const std::byte* codes = tile + g * group_bytes;
    const std::byte* later = codes_later<kBits, kRowsHere>(layout, codes);
    if (layout.zero == ZeroKind::m16) add_minima(prepared.groups[g], kRowsHere, scales, sums, acc);
    if constexpr (kMany) {
      many_rows_group<kRowsHere>(prepared, g, steps, words, scales, sums, acc);
    } else {
      constexpr int kAtOnce = kRowsHere <= 6 ? 4 : 2;
      few_rows_group<kBits, kRowsHere, kAtOnce>(codes, later, prepared.groups[g], steps / 2, words, scales, sums, acc);
    }
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

void pass_vnni(const TileRun& run, int64_t k_tile, bool many, const std::byte* prepared, const Int8Rows& x,
               float* acc) {
  const auto& tile = *reinterpret_cast<const PreparedVnni*>(prepared);
  with_int8_rows(x.rows, [&](auto n) {
    if (many) {
      int8_tile_vnni<4, true, n()>(run, k_tile, tile, x, acc);
    } else if (run.layout->bits == 4) {
      int8_tile_vnni<4, false, n()>(run, k_tile, tile, x, acc);
    } else {
      int8_tile_vnni<8, false, n()>(run, k_tile, tile, x, acc);
    }
  });
}

}  // namespace
}  // namespace tilefuse
