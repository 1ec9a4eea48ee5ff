// The kernels on AVX512_BF16: few rows fused with exact weights (fused_bf16.h), many by way of panels of weights
// dequantised to bfloat16 pairs. Included by two translation units: the real one, and one that models the two BF16
// instructions (TILEFUSE_MODEL_BF16).
//
// The panel is uint32 [4][64 count][16]: for each vector of 16 output channels the pairs of input channels, those of a
// block of 8 being (j, j + 4), j = 0..3, which is how shifting a lane of 8 nibbles by 4 j leaves them (bits 0..3 and
// 16..19).
#pragma once

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "activations_bf16.h"
#include "bf16_dot.h"
#include "fused_bf16.h"
#include "fused_digits.h"
#include "results_avx512.h"

namespace tilefuse {
namespace {

// Eight output channels' scale and offset, each in two neighbouring lanes: w = q * scale + offset.
struct PairAffine {
  __m512 scale;
  __m512 offset;
};

// The 64 output channels of one group as eight vectors of eight channels, twice each.
inline void load_pair_affine(const TileLayout& layout, const std::byte* tile, int group, PairAffine (&out)[8]) {
  const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const auto load_twice = [&](const std::byte* p) {
    const __m256i raw = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i wide = _mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(raw));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  };
  const std::byte* scales = tile + layout.scale_offset + static_cast<int64_t>(group) * kNt * 2;
  const std::byte* zeros = tile + layout.zero_offset;
  for (int nb = 0; nb < 8; ++nb) {
    out[nb].scale = load_twice(scales + nb * 16);
    if (layout.zero == ZeroKind::z8) {
      const std::byte* at = zeros + static_cast<int64_t>(group) * kNt + nb * 8;
      const __m256i z = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
      const __m512 wide = _mm512_cvtepi32_ps(_mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(z)));
      // z s has at most 16 significant bits: exact, so the single rounding of w is that of the pack below.
      out[nb].offset = _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), wide), out[nb].scale);
    } else {
      out[nb].offset = load_twice(zeros + (static_cast<int64_t>(group) * kNt + nb * 8) * 2);
    }
  }
}

// An integer in bits [at, at + bits) of each lane as a float, exactly: 2^(23 - at) has a last place of 2^-at. No shift
// or permutation is needed, which share a port.
template <int at, int bits>
inline __m512 float_of_field(__m512i lanes) {
  static_assert(at + bits <= 23);
  const __m512i field = _mm512_set1_epi32(((1 << bits) - 1) << at);
  const __m512i power = _mm512_set1_epi32((127 + 23 - at) << 23);
  constexpr int kFirstAndSecondOrThird = 0xEA;
  return _mm512_sub_ps(_mm512_castsi512_ps(_mm512_ternarylogic_epi32(lanes, field, power, kFirstAndSecondOrThird)),
                       _mm512_castsi512_ps(power));
}

// Pairs j of 16 output channels; lanes: those of their first and second half.
template <int at, int bits>
inline void dequantise_pairs(const __m512i (&lanes)[2], const PairAffine* affine, uint32_t* to) {
  __m512 w[2];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    w[h] = _mm512_fmadd_ps(float_of_field<at, bits>(lanes[h]), affine[h].scale, affine[h].offset);
  }
  _mm512_store_si512(to, pack_bf16(w[0], w[1]));
}

inline void dequantise_block_row_w4(const std::byte* codes, const PairAffine (&affine)[8], int64_t pairs,
                                    uint32_t* panel) {
  const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512i odd_half = _mm512_set1_epi64(int64_t{16} << 32);
  for (int v = 0; v < kVectors; ++v) {
    __m512i lanes[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + v * 64 + h * 32));
      // Even lanes have nibble j at bit 4 j, odd lanes nibble j + 4: a pair, once packed.
      lanes[h] = _mm512_srlv_epi32(_mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(raw)), odd_half);
    }
    uint32_t* to = panel + v * pairs * 16;
    dequantise_pairs<0, 4>(lanes, affine + 2 * v, to);
    dequantise_pairs<4, 4>(lanes, affine + 2 * v, to + 16);
    dequantise_pairs<8, 4>(lanes, affine + 2 * v, to + 32);
    dequantise_pairs<12, 4>(lanes, affine + 2 * v, to + 48);
  }
}

inline void dequantise_block_row_w8(const std::byte* codes, const PairAffine (&affine)[8], int64_t pairs,
                                    uint32_t* panel) {
  // A 64-bit lane holds 8 input channels of one output channel, so byte j of its two halves is the pair (j, j + 4).
  for (int v = 0; v < kVectors; ++v) {
    const __m512i low[2] = {_mm512_loadu_si512(codes + v * 128), _mm512_loadu_si512(codes + v * 128 + 64)};
    const __m512i high[2] = {_mm512_srli_epi32(low[0], 16), _mm512_srli_epi32(low[1], 16)};
    uint32_t* to = panel + v * pairs * 16;
    dequantise_pairs<0, 8>(low, affine + 2 * v, to);
    dequantise_pairs<8, 8>(low, affine + 2 * v, to + 16);
    dequantise_pairs<0, 8>(high, affine + 2 * v, to + 32);
    dequantise_pairs<8, 8>(high, affine + 2 * v, to + 48);
  }
}

void dequantise_bf16(const TileRun& run, int64_t first, int count, void* panel_out) {
  const TileLayout& layout = *run.layout;
  auto* panel = static_cast<uint32_t*>(panel_out);
  const int blocks = layout.tile_group / kBlock;
  const int64_t pairs = int64_t{count} * kKt / 2;
  for (int t = 0; t < count; ++t) {
    const std::byte* tile = run.tiles + (first + t) * layout.tile_bytes;
    for (int g = 0; g < layout.groups_per_tile(); ++g) {
      prefetch_scales(layout, tile, g);
      PairAffine affine[8];
      load_pair_affine(layout, tile, g, affine);
      for (int kb = g * blocks; kb < (g + 1) * blocks; ++kb, panel += 4 * 16) {
        const int64_t row_bytes = int64_t{kNt} * layout.bits;
        for (int64_t i = 0; i < row_bytes; i += 64)
          prefetch(tile + kTilesAhead * layout.tile_bytes + kb * row_bytes + i);
        if (layout.bits == 4) {
          dequantise_block_row_w4(tile + kb * (kNt * 4), affine, pairs, panel);
        } else {
          dequantise_block_row_w8(tile + kb * (kNt * 8), affine, pairs, panel);
        }
      }
    }
  }
}

// acc += x * panel, the weights already scaled.
template <int kRowsHere>
void panel_pass_n(const void* panel_in, int64_t first, int count, int64_t channels, const PassRows& x, float* acc) {
  constexpr int kAtOnce = kRowsHere <= 3 ? 4 : kRowsHere <= 14 ? 2 : 1;
  const int64_t pairs = int64_t{count} * kKt / 2;
  for (int v0 = 0; v0 < kVectors; v0 += kAtOnce) {
    const uint32_t* panel = static_cast<const uint32_t*>(panel_in) + v0 * pairs * 16;
    float* to = acc + v0 * 16;
    __m512 c[kRowsHere][kAtOnce];
    for (int r = 0; r < kRowsHere; ++r) {
      for (int v = 0; v < kAtOnce; ++v) c[r][v] = _mm512_loadu_ps(to + r * kNt + v * 16);
    }
    for (int64_t t = first; t < first + count; ++t) {
      const uint32_t* from = x.words + t * x.tile_stride;
      const int64_t blocks = std::min<int64_t>(kKt / kBlock, (channels - (t - first) * kKt + kBlock - 1) / kBlock);
      for (int64_t i = 0; i < blocks * (kBlock / 2); ++i, panel += 16, from += kRowsHere) {
        __m512i w[kAtOnce];
        for (int v = 0; v < kAtOnce; ++v) w[v] = _mm512_load_si512(panel + v * pairs * 16);
        prefetch(reinterpret_cast<const std::byte*>(from + kRowsHere * (kKt / 2)));  // the next pass's
        for (int r = 0; r < kRowsHere; ++r) {
          const __m512i a = _mm512_set1_epi32(static_cast<int>(from[r]));
          for (int v = 0; v < kAtOnce; ++v) c[r][v] = dot_bf16(c[r][v], a, w[v]);
        }
      }
    }
    for (int r = 0; r < kRowsHere; ++r) {
      for (int v = 0; v < kAtOnce; ++v) _mm512_storeu_ps(to + r * kNt + v * 16, c[r][v]);
    }
  }
}

// Calls fn with std::integral_constant of `rows`, 1 to kMaxPassRows.
template <int kRowsHere = kMaxPassRows, typename Fn>
inline void with_rows(int rows, Fn&& fn) {
  if constexpr (kRowsHere == 1) {
    fn(std::integral_constant<int, 1>{});
  } else if (rows == kRowsHere) {
    fn(std::integral_constant<int, kRowsHere>{});
  } else {
    with_rows<kRowsHere - 1>(rows, fn);
  }
}

void panel_pass_bf16(const void* panel, int64_t first, int count, int64_t channels, const PassRows& x, float* acc) {
  with_rows(x.rows, [&](auto n) { panel_pass_n<n()>(panel, first, count, channels, x, acc); });
}

void fused_bf16(const TileRun& run, int64_t k_tile, const PassRows& x, float* acc) {
  if (run.layout->bits == 4) {
    with_rows(x.rows, [&](auto n) { fused_pass_n<UnpackW4, n()>(run, k_tile, x, acc); });
  } else {
    with_rows(x.rows, [&](auto n) { fused_pass_n<UnpackW8, n()>(run, k_tile, x, acc); });
  }
}

// Crossovers measured on Zen 4. A fused kernel unpacks, and adds up groups, for each pass again; a panel is written
// once, at the cost of ten rows or so.
int64_t fused_rows_bf16(const TileLayout& layout) {
  if (layout.bits == 8) return layout.tile_group == 32 ? 24 : 40;
  return layout.tile_group == 32 ? 32 : layout.tile_group == 64 ? 64 : 112;
}

constexpr PassKernels kBf16Passes = {
    .write_pass = write_pass_bf16,
    .fused = fused_bf16,
    .fused_rows = fused_rows_bf16,
    .dequantise = dequantise_bf16,
    .panel_pass = panel_pass_bf16,
    .store_row = store_row_avx512,
};

// Likewise.
int digit_rows_bf16(const TileLayout& layout) {
  if (layout.bits == 4) return 2;
  return layout.tile_group == kKt ? 8 : 4;
}

constexpr FewRowsKernels kFewRowsBf16 = few_rows_vnni(digit_rows_bf16);

constexpr MatmulKernels kBf16Kernels = {
    .fused_w4_f32 = nullptr,
    .fused_rows_w4 = 0,
    .few = &kFewRowsBf16,
    .dequantise = nullptr,
    .panel_rows = nullptr,
    .passes = &kBf16Passes,
};

}  // namespace
}  // namespace tilefuse
