// Fused matmul for few rows on AVX512_VNNI: codes times the activations' digits (digits_vnni.h), in exact integers.
//
// Per group and output channel: D_i = sum q d_i and S_i = sum d_i are 32-bit integers (|D_i - z S_i| is at most
// (255 + kMaxFoldedZero) 128 * 128 < 2^24, so converting it to float is exact too), and sum (q - z) x = scale_x * sum_i
// 256^i (D_i - z S_i): zero points cancel without rounding. The lowest digits are multiplied only where there are any.
// What the digits can't hold (DigitRest) is added one input channel at a time.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "bf16.h"
#include "digits_vnni.h"
#include "loads_avx512.h"
#include "matmul_kernels.h"
#include "prefetch.h"
#include "vnni_dot.h"

namespace tilefuse {
namespace {

constexpr int kVectors = kNt / 16;  // vectors of 32-bit lanes that hold the 64 output channels

// Tiles are read in the order of memory, which hardware prefetchers follow better by themselves: on Zen 4 asking for
// the codes of a later tile cost a tenth to a third of the speed. But with several groups, what follows the codes is
// asked for at once, before the first of it is used: the arithmetic in between is longer than the window in which a
// core looks for loads.
TILEFUSE_ALWAYS_INLINE void prefetch_tail(const TileLayout& layout, const std::byte* tile) {
  for (int64_t at = layout.scale_offset; at < layout.tile_bytes; at += 64) prefetch(tile + at);
}

// Where the next run doesn't follow this one in memory, hardware prefetchers start anew, which costs as much as some 20
// KiB: the lines of a part of a tile there are asked for as this one's are read. Only into the L2 cache: on Zen 4
// asking for the L1 cache gained nothing. Runs of more than kShortRun tiles are read faster without.
constexpr int64_t kShortRun = 8;

// The codes of an output tile drive the digits out of the L1 cache, and what waits for digits can't look ahead for
// codes.
constexpr int64_t kDigitsAhead = 2 * kKt;

// Kernels that read a tile in another order, or more slowly than memory delivers it, prefetch the tile kTilesAhead of
// theirs, each line as its counterpart is read. Hardware prefetchers stop at each 4 KiB page, a tile is about that.
constexpr int64_t kTilesAhead = 2;

// Some rows do so twice, first into the L2 cache and then, soon before use, into the L1 cache, of which a tile is a
// large part. Measured on Zen 4, three and four rows are a tenth to a half faster than with the L1 cache alone.
TILEFUSE_ALWAYS_INLINE void prefetch_twice(const std::byte* p, const TileLayout& layout) {
  prefetch(p + layout.tile_bytes / 2);
  prefetch_l2(p + 3 * layout.tile_bytes);
}

// What follows the codes, scales and zero points, of one group of that tile.
TILEFUSE_ALWAYS_INLINE void prefetch_scales(const TileLayout& layout, const std::byte* tile, int group) {
  const std::byte* ahead = tile + kTilesAhead * layout.tile_bytes;
  const int64_t zero_bytes = layout.zero == ZeroKind::z8 ? kNt : 2 * kNt;
  for (int64_t i = 0; i < 2 * kNt; i += 64) prefetch(ahead + layout.scale_offset + group * (2 * kNt) + i);
  for (int64_t i = 0; i < zero_bytes; i += 64) prefetch(ahead + layout.zero_offset + group * zero_bytes + i);
}

// D_i of one group: [kDigits][64 output channels].
struct alignas(64) GroupDots {
  int32_t d[kDigits][kNt];
};

inline __m512i four_digits(const int8_t* p) {
  int32_t v;
  std::memcpy(&v, p, sizeof(v));
  return _mm512_set1_epi32(v);
}

inline __m512i eight_digits(const int8_t* p) {
  int64_t v;
  std::memcpy(&v, p, sizeof(v));
  return _mm512_set1_epi64(v);
}

// One digit of a row in all blocks of a group, and where its dot products go.
struct DigitPlane {
  const int8_t* digits;
  int64_t stride;  // from block to block
  int32_t* to;     // [64 output channels]
};

inline DigitPlane high_plane(const int8_t* high, int digit, GroupDots* out) {
  return {.digits = high + (digit - 1) * kBlock, .stride = kHighBytes, .to = out->d[digit]};
}

inline DigitPlane low_plane(const int8_t* low, GroupDots* out) {
  return {.digits = low, .stride = kLowBytes, .to = out->d[0]};
}

// 4-bit codes of one block: a 32-bit lane holds 8 consecutive input channels of one output channel; its low nibbles are
// channels 0 2 4 6, its high ones 1 3 5 7.
inline __m512i nibbles(__m512i codes, int half) {
  return _mm512_and_si512(half == 0 ? codes : _mm512_srli_epi16(codes, 4), _mm512_set1_epi8(15));
}

template <int kPlanes>
inline void dots_w4(const std::byte* codes, int blocks, DigitPlane (&&x)[kPlanes]) {
  Sums16 d[kPlanes][kVectors] = {};
  for (int kb = 0; kb < blocks; ++kb, codes += kNt * 4) {
    __m512i q[2][kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const __m512i w = _mm512_load_si512(codes + v * 64);
      q[0][v] = nibbles(w, 0);
      q[1][v] = nibbles(w, 1);
    }
#pragma GCC unroll 8
    for (int p = 0; p < kPlanes; ++p) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m512i digits = four_digits(x[p].digits + half * 4);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) d[p][v] = dot_u8_s8(d[p][v], q[half][v], digits);
      }
      x[p].digits += x[p].stride;
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPlanes; ++p) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) _mm512_store_si512(x[p].to + v * 16, (__m512i)d[p][v]);
  }
}

// The lowest digit, in some parts of a group.
inline void low_dots_w4(const std::byte* codes, uint32_t parts, const int8_t* low, GroupDots* out) {
  Sums16 d0[kVectors] = {};
  for (; parts != 0; parts &= parts - 1) {
    const int part = __builtin_ctz(parts);
    const __m512i digits = four_digits(low + part * 4);
    const __m128i shift = _mm_cvtsi32_si128(part % 2 * 4);
    const std::byte* at = codes + part / 2 * (kNt * 4);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      d0[v] = dot_u8_s8(d0[v], nibbles(_mm512_srl_epi16(_mm512_load_si512(at + v * 64), shift), 0), digits);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) _mm512_store_si512(out->d[0] + v * 16, (__m512i)d0[v]);
}

// 8-bit codes: 8 consecutive input channels of one output channel are two neighbouring 32-bit lanes, whose partial sums
// are added when the group is done.
constexpr int kPairVectors = 2 * kVectors;

TILEFUSE_ALWAYS_INLINE __m512i join_pairs(__m512i a, __m512i b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return _mm512_add_epi32(_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b));
}

TILEFUSE_ALWAYS_INLINE void store_pair_sums(const Sums16 (&sums)[kPairVectors], int32_t* to) {
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    _mm512_store_si512(to + v * 16, join_pairs((__m512i)sums[2 * v], (__m512i)sums[2 * v + 1]));
  }
}

// The digits that are always multiplied.
inline void dots_w8(const std::byte* codes, int blocks, const int8_t* high, GroupDots* out) {
  Sums16 d1[kPairVectors] = {};
  Sums16 d2[kPairVectors] = {};
  for (int kb = 0; kb < blocks; ++kb, codes += kNt * 8, high += kHighBytes) {
    const __m512i x1 = eight_digits(high);
    const __m512i x2 = eight_digits(high + kBlock);
#pragma GCC unroll 8
    for (int v = 0; v < kPairVectors; ++v) {
      prefetch_l2(codes + v * 64 + kCodesAhead);
      const __m512i q = _mm512_load_si512(codes + v * 64);
      d1[v] = dot_u8_s8(d1[v], q, x1);
      d2[v] = dot_u8_s8(d2[v], q, x2);
    }
  }
  store_pair_sums(d1, out->d[1]);
  store_pair_sums(d2, out->d[2]);
}

// The lowest digit, in some blocks of a group.
inline void low_dots_w8(const std::byte* codes, uint32_t parts, const int8_t* low, GroupDots* out) {
  Sums16 d0[kPairVectors] = {};
  for (; parts != 0; parts &= parts - 1) {
    const int part = __builtin_ctz(parts);
    const __m512i x0 = eight_digits(low + part * kLowBytes);
#pragma GCC unroll 8
    for (int v = 0; v < kPairVectors; ++v) {
      d0[v] = dot_u8_s8(d0[v], _mm512_load_si512(codes + part * (kNt * 8) + v * 64), x0);
    }
  }
  store_pair_sums(d0, out->d[0]);
}

// Rows of 8-bit layers that are multiplied together at most: sums of two digits and two vectors leave registers for
// codes.
constexpr int kRowsTogether = 6;

// The digits that are always multiplied, of several rows, `stride` bytes apart: two vectors of codes at a time, for all
// rows, from the L1 cache.
template <int kRowsHere>
inline void rows_dots_w8(const TileLayout& layout, const std::byte* codes, int blocks, const int8_t* high,
                         int64_t stride, GroupDots* out, int64_t out_stride) {
  const std::byte* later = codes;
  for (int v = 0; v < kVectors; ++v) {
    Sums16 d[kRowsHere][2][2] = {};
    const std::byte* from = codes + v * 128;
    const int8_t* x = high;
    for (int kb = 0; kb < blocks; ++kb, from += kNt * 8, x += kHighBytes, later += 128) {
      prefetch_twice(later, layout);
      prefetch_twice(later + 64, layout);
      const __m512i q[2] = {_mm512_load_si512(from), _mm512_load_si512(from + 64)};
#pragma GCC unroll 8
      for (int r = 0; r < kRowsHere; ++r) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          const __m512i digits = eight_digits(x + r * stride + i * kBlock);
          d[r][i][0] = dot_u8_s8(d[r][i][0], q[0], digits);
          d[r][i][1] = dot_u8_s8(d[r][i][1], q[1], digits);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRowsHere; ++r) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m512i sum = join_pairs((__m512i)d[r][i][0], (__m512i)d[r][i][1]);
        _mm512_store_si512(out[r * out_stride].d[1 + i] + v * 16, sum);
      }
    }
  }
}

// Adds a group's contribution to acc[0..63]. dots.d[0] may be unset where x has no lowest digits.
inline void finish_group(const TileLayout& layout, const std::byte* tile, int group, const GroupDots& dots,
                         const DigitGroup& x, float* acc) {
  const std::byte* scales = tile + layout.scale_offset + static_cast<int64_t>(group) * kNt * 2;
  const std::byte* zeros = tile + layout.zero_offset;
  const __m512 x_scales = _mm512_set1_ps(x.scale);
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
      sum = _mm512_fmadd_ps(_mm512_fmadd_ps(z, scale, m), _mm512_set1_ps(x.x_sum), sum);
    }
    // Exact: below 2^24.
    const auto less_zeros = [&](int i) {
      const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots.d[i] + v * 16));
      return _mm512_fnmadd_ps(z, _mm512_set1_ps(x.sums[i]), dot);
    };
    const __m512 lowest = x.low_parts == 0 ? _mm512_setzero_ps() : less_zeros(0);
    __m512 dot = _mm512_fmadd_ps(less_zeros(1), _mm512_set1_ps(256.0F), lowest);
    dot = _mm512_fmadd_ps(less_zeros(2), _mm512_set1_ps(65536.0F), dot);
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

// Of 4-bit codes: unpacking them again for the lowest digit of a half block costs as much as multiplying a block's.
inline bool worth_looking_up(uint32_t parts, int blocks) { return __builtin_popcount(parts) <= blocks; }

// The dot products of one group with some rows.
template <int kRowsHere>
inline void group_digits(const TileLayout& layout, const std::byte* codes, const DigitRow<DigitGroup>& x,
                         int64_t row_bytes, int64_t group, GroupDots* out, int64_t out_stride) {
  const int blocks = layout.tile_group / kBlock;
  const int8_t* high = x.high + group * layout.tile_group * 2;
  const int8_t* low = x.low + group * layout.tile_group;
  const auto parts_of = [&](int row) {
    const auto* at = reinterpret_cast<const std::byte*>(x.groups + group) + row * row_bytes;
    return reinterpret_cast<const DigitGroup*>(at)->low_parts;
  };
  for (int r = 0; r < kRowsHere; ++r) {
    const auto* ahead = reinterpret_cast<const std::byte*>(high) + r * row_bytes + kDigitsAhead;
    for (int i = 0; i < layout.tile_group * 2; i += 64) prefetch(ahead + i);
  }
  if (layout.bits == 8) {
    if (kRowsHere > 2) rows_dots_w8<kRowsHere>(layout, codes, blocks, high, row_bytes, out, out_stride);
    for (int r = 0; r < kRowsHere; ++r, high += row_bytes, low += row_bytes, out += out_stride) {
      if (kRowsHere <= 2) dots_w8(codes, blocks, high, out);
      if (const uint32_t parts = parts_of(r); parts != 0) low_dots_w8(codes, parts, low, out);
    }
    return;
  }
  if (kRowsHere == 2 && worth_looking_up(parts_of(0), blocks) && worth_looking_up(parts_of(1), blocks)) {
    GroupDots* second = out + out_stride;
    dots_w4(codes, blocks,
            {high_plane(high, 1, out), high_plane(high, 2, out), high_plane(high + row_bytes, 1, second),
             high_plane(high + row_bytes, 2, second)});
    if (const uint32_t parts = parts_of(0); parts != 0) low_dots_w4(codes, parts, low, out);
    if (const uint32_t parts = parts_of(1); parts != 0) low_dots_w4(codes, parts, low + row_bytes, second);
    return;
  }
  for (int r = 0; r < kRowsHere; ++r, high += row_bytes, low += row_bytes, out += out_stride) {
    const uint32_t parts = parts_of(r);
    if (!worth_looking_up(parts, blocks)) {
      dots_w4(codes, blocks, {high_plane(high, 1, out), high_plane(high, 2, out), low_plane(low, out)});
      continue;
    }
    dots_w4(codes, blocks, {high_plane(high, 1, out), high_plane(high, 2, out)});
    if (parts != 0) low_dots_w4(codes, parts, low, out);
  }
}

// All groups' sums of a tile first, then its scales: in the order of memory, which is what hardware prefetchers follow.
template <int kRowsHere>
inline void tile_digits(const TileLayout& layout, const std::byte* tile, const std::byte* next,
                        const DigitRow<DigitGroup>& x, int64_t row_bytes, int64_t k_tile, float* acc) {
  constexpr int kMaxGroups = kKt / 32;
  const int64_t first = k_tile * layout.groups_per_tile();
  const int groups = layout.groups_used(k_tile);
  GroupDots dots[kRowsHere][kMaxGroups];
  for (int g = 0; g < groups; ++g) {
    const std::byte* codes = tile + int64_t{g} * layout.tile_group * (kNt / kBlock) * layout.bits;
    if (next != nullptr) prefetch_part(next, layout.tile_bytes, g, groups);
    group_digits<kRowsHere>(layout, codes, x, row_bytes, first + g, &dots[0][g], kMaxGroups);
  }
  if (groups > 1) prefetch_tail(layout, tile);
  for (int g = 0; g < groups; ++g) {
    for (int r = 0; r < kRowsHere; ++r) {
      const auto* of_row = reinterpret_cast<const std::byte*>(x.groups + first + g) + r * row_bytes;
      finish_group(layout, tile, g, dots[r][g], *reinterpret_cast<const DigitGroup*>(of_row), acc + r * kNt);
    }
  }
}

// Calls fn with std::integral_constant of `rows`, 1 to kRowsTogether.
template <int kRowsHere = kRowsTogether, typename Fn>
inline void with_digit_rows(int rows, Fn&& fn) {
  if constexpr (kRowsHere == 1) {
    fn(std::integral_constant<int, 1>{});
  } else if (rows == kRowsHere) {
    fn(std::integral_constant<int, kRowsHere>{});
  } else {
    with_digit_rows<kRowsHere - 1>(rows, fn);
  }
}

void fused_digits_vnni(const TileRun& run, const std::byte* digits, int rows, float* acc) {
  const TileLayout& layout = *run.layout;
  const DigitMemory<DigitGroup> at(layout);
  std::memset(acc, 0, sizeof(float) * static_cast<size_t>(rows) * kNt);
  const bool jumps = run.next != nullptr && layout.k_tiles_used() <= kShortRun &&
                     run.next != run.tiles + layout.k_tiles_used() * layout.tile_bytes;
  const int together = layout.bits == 4 ? 2 : kRowsTogether;
  const int parts = (rows + together - 1) / together;
  const DigitRest* rest[kMaxFewRows];
  for (int r = 0; r < rows; ++r) rest[r] = DigitRow<DigitGroup>(at, digits, r).rests;
  for (int64_t kt = 0; kt < layout.k_tiles_used(); ++kt) {
    const std::byte* tile = run.tiles + kt * layout.tile_bytes;
    const std::byte* next = jumps ? run.next + kt * layout.tile_bytes : nullptr;
    for (int part = 0; part < parts; ++part) {
      const int first = part * rows / parts;
      with_digit_rows((part + 1) * rows / parts - first, [&](auto n) {
        tile_digits<n()>(layout, tile, next, {at, digits, first}, at.row_bytes, kt, acc + first * kNt);
      });
    }
    for (int r = 0; r < rows; ++r) {
      for (; rest[r]->k < (kt + 1) * kKt; ++rest[r]) {
        add_rest(layout, tile, static_cast<int>(rest[r]->k - kt * kKt), rest[r]->value, acc + r * kNt);
      }
    }
  }
}

constexpr FewRowsKernels few_rows_vnni(int (*max_rows)(const TileLayout&)) {
  return {
      .max_rows = max_rows,
      .row_bytes = [](const TileLayout& layout) { return DigitMemory<DigitGroup>(layout).row_bytes; },
      .scratch_bytes = [](const TileLayout&) { return int64_t{64}; },
      .write = write_digits_vnni,
      .fused = fused_digits_vnni,
  };
}

}  // namespace
}  // namespace tilefuse
