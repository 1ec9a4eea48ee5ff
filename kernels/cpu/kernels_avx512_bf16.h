// The kernels on AVX512_BF16: weights are dequantised to bfloat16 pairs and multiplied by VDPBF16PS. Included by two
// translation units: the real one, and one that models the two BF16 instructions (TILEFUSE_MODEL_BF16).
//
// The panel is uint32 [64 count][64]: the pairs of a block of 8 input channels are (j, j + 4), j = 0..3, which is how
// shifting a lane of 8 nibbles by 4 j leaves them (bits 0..3 and 16..19).
#pragma once

#include <immintrin.h>

#include <cstring>

#include "fused_digits.h"

namespace tilefuse {
namespace {

#ifdef TILEFUSE_MODEL_BF16

// VDPBF16PS: two products and sums, each rounded; low words after high ones, as its description orders them. (The
// instruction also flushes denormals; the model keeps them.)
inline __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)),
                        sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)),
                         sum);
}

inline __m512i bf16_bits(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
}

// VCVTNE2PS2BF16: words 0..15 from `low`, 16..31 from `high`.
inline __m512i pack_bf16(__m512 low, __m512 high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(bf16_bits(low))),
                            _mm512_cvtepi32_epi16(bf16_bits(high)), 1);
}

#else

inline __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

inline __m512i pack_bf16(__m512 low, __m512 high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)); }

#endif

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

inline void dequantise_block_row_w4(const std::byte* codes, const PairAffine (&affine)[8], uint32_t* panel) {
  const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int v = 0; v < kVectors; ++v) {
    __m512i lanes[2];
    for (int h = 0; h < 2; ++h) {
      const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + v * 64 + h * 32));
      lanes[h] = _mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(raw));
    }
    for (int j = 0; j < 4; ++j) {
      // Even lanes take nibble j, odd lanes nibble j + 4: a pair, once packed.
      const __m512i shift = _mm512_set1_epi64((static_cast<int64_t>(4 * j + 16) << 32) | (4 * j));
      __m512 w[2];
      for (int h = 0; h < 2; ++h) {
        const __m512 q = _mm512_permutexvar_ps(_mm512_srlv_epi32(lanes[h], shift), table);
        w[h] = _mm512_fmadd_ps(q, affine[2 * v + h].scale, affine[2 * v + h].offset);
      }
      _mm512_storeu_si512(panel + j * kNt + v * 16, pack_bf16(w[0], w[1]));
    }
  }
}

inline void dequantise_block_row_w8(const std::byte* codes, const PairAffine (&affine)[8], uint32_t* panel) {
  // A 64-bit lane holds 8 input channels of one output channel, so byte j of its two halves is the pair (j, j + 4).
  const __m512i byte_mask = _mm512_set1_epi32(255);
  for (int v = 0; v < kVectors; ++v) {
    const __m512i lanes[2] = {_mm512_loadu_si512(codes + v * 128), _mm512_loadu_si512(codes + v * 128 + 64)};
    for (int j = 0; j < 4; ++j) {
      __m512 w[2];
      for (int h = 0; h < 2; ++h) {
        const __m512i q = _mm512_and_si512(_mm512_srlv_epi32(lanes[h], _mm512_set1_epi32(8 * j)), byte_mask);
        w[h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(q), affine[2 * v + h].scale, affine[2 * v + h].offset);
      }
      _mm512_storeu_si512(panel + j * kNt + v * 16, pack_bf16(w[0], w[1]));
    }
  }
}

void dequantise_bf16(const TileRun& run, int64_t first, int count, void* panel_out) {
  const TileLayout& layout = *run.layout;
  auto* panel = static_cast<uint32_t*>(panel_out);
  const int blocks = layout.tile_group / kBlock;
  for (int t = 0; t < count; ++t) {
    const std::byte* tile = run.tiles + (first + t) * layout.tile_bytes;
    for (int g = 0; g < layout.groups_per_tile(); ++g) {
      PairAffine affine[8];
      load_pair_affine(layout, tile, g, affine);
      for (int kb = g * blocks; kb < (g + 1) * blocks; ++kb, panel += 4 * kNt) {
        if (layout.bits == 4) {
          dequantise_block_row_w4(tile + kb * (kNt * 4), affine, panel);
        } else {
          dequantise_block_row_w8(tile + kb * (kNt * 8), affine, panel);
        }
      }
    }
  }
}

template <int kRowsHere>
inline void panel_rows_bf16_n(const uint32_t* panel, int64_t pairs, const uint32_t* x, int64_t x_stride, float* acc,
                              bool first) {
  __m512 c[kRowsHere][kVectors];
  for (int r = 0; r < kRowsHere; ++r) {
    for (int v = 0; v < kVectors; ++v) c[r][v] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(acc + r * kNt + v * 16);
  }
  for (int64_t i = 0; i < pairs; ++i) {
    __m512i b[kVectors];
    for (int v = 0; v < kVectors; ++v) b[v] = _mm512_loadu_si512(panel + i * kNt + v * 16);
    for (int r = 0; r < kRowsHere; ++r) {
      const __m512i a = _mm512_set1_epi32(static_cast<int>(x[r * x_stride + i]));
      for (int v = 0; v < kVectors; ++v) c[r][v] = dot_bf16(c[r][v], a, b[v]);
    }
  }
  for (int r = 0; r < kRowsHere; ++r) {
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(acc + r * kNt + v * 16, c[r][v]);
  }
}

void panel_rows_bf16(const void* panel_in, int64_t k, const void* x_in, int64_t x_stride, int rows, float* acc,
                     bool first) {
  const auto* panel = static_cast<const uint32_t*>(panel_in);
  const auto* x = static_cast<const uint32_t*>(x_in);
  const int64_t pairs = k / 2;
  switch (rows) {
    case 1:
      return panel_rows_bf16_n<1>(panel, pairs, x, x_stride, acc, first);
    case 2:
      return panel_rows_bf16_n<2>(panel, pairs, x, x_stride, acc, first);
    case 3:
      return panel_rows_bf16_n<3>(panel, pairs, x, x_stride, acc, first);
    case 4:
      return panel_rows_bf16_n<4>(panel, pairs, x, x_stride, acc, first);
    case 5:
      return panel_rows_bf16_n<5>(panel, pairs, x, x_stride, acc, first);
    default:
      return panel_rows_bf16_n<6>(panel, pairs, x, x_stride, acc, first);
  }
}

constexpr MatmulKernels kBf16Kernels = {
    .fused_w4_f32 = nullptr,
    .fused_digits = fused_digits_vnni,
    .fused_rows = kMaxDigitRows,
    .panel_format = XFormat::bf16_pairs,
    .dequantise = dequantise_bf16,
    .panel_rows = panel_rows_bf16,
};

}  // namespace
}  // namespace tilefuse
