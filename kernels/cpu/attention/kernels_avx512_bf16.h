// Attention on AVX-512 with BF16 and VNNI. Included by two translation units: the real one, and one that models the
// BF16 instructions (TILEFUSE_MODEL_BF16).
//
// Products are taken a row block and two vectors of keys (or channels) at a time: 24 sums of 32 registers, each vector
// from the L2 cache serving 12 rows.
#pragma once

#include <immintrin.h>

#include <limits>
#include <type_traits>

#include "attention/packing.h"
#include "bf16_dot.h"
#include "transpose_avx512.h"

namespace tilefuse {
namespace {

constexpr int kBlockRows = 12;
constexpr int kWide = 2;  // vectors of a full row block's tile

// GCC 12 copies the sums around the intrinsics, and then spills them.
inline void add_dot(__m512& sum, __m512i a, __m512i b) {
#ifdef TILEFUSE_MODEL_BF16
  sum = dot_bf16(sum, a, b);
#else
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#endif
}

inline void add_dot_u8_s8(__m512i& sum, __m512i u8, __m512i s8) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u8), "v"(s8));
}

inline __m512i broadcast_word(const uint32_t* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }

// --- scores ---

template <int kRows, int kVectors>
inline void tile16(const uint32_t* q, const uint32_t* k, int64_t pairs, float* scores) {
  __m512 sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_setzero_ps();
  }
  for (int64_t i = 0; i < pairs; ++i, q += kBlockRows, k += kKeyBlock) {
    __m512i keys[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) keys[v] = _mm512_load_si512(k + v * 16);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const __m512i a = broadcast_word(q + r);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) add_dot(sums[r][v], a, keys[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) _mm512_store_ps(scores + r * kChunkKeys + v * 16, sums[r][v]);
  }
}

template <int kRows, int kVectors>
inline void tile8(const uint32_t* q, const int32_t* starts, const uint32_t* k, int64_t quads, float* scores) {
  __m512i sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_set1_epi32(starts[r]);
  }
  for (int64_t i = 0; i < quads; ++i, q += kBlockRows, k += kKeyBlock) {
    __m512i keys[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) keys[v] = _mm512_load_si512(k + v * 16);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const __m512i a = broadcast_word(q + r);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) add_dot_u8_s8(sums[r][v], keys[v], a);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      _mm512_store_ps(scores + r * kChunkKeys + v * 16, _mm512_cvtepi32_ps(sums[r][v]));
    }
  }
}

// Calls fn with std::integral_constant of `rows`, 1 to kBlockRows.
template <int kRows = kBlockRows, typename Fn>
inline void with_rows(int rows, Fn&& fn) {
  if constexpr (kRows == 1) {
    fn(std::integral_constant<int, 1>{});
  } else if (rows == kRows) {
    fn(std::integral_constant<int, kRows>{});
  } else {
    with_rows<kRows - 1>(rows, fn);
  }
}

// Few rows take more vectors at a time, to have as many sums as the latency of an instruction asks for.
template <int kRows>
inline constexpr int kVectorsFor = kRows <= 6 ? 4 : kWide;

// Calls fn(first, count) over `vectors` of them, count a std::integral_constant of kMost or a power of two below.
template <int kMost, typename Fn>
inline void for_vectors(int vectors, Fn&& fn) {
  int at = 0;
  for (; at + kMost <= vectors; at += kMost) fn(at, std::integral_constant<int, kMost>{});
  if constexpr (kMost > 2) {
    if (at + 2 <= vectors) {
      fn(at, std::integral_constant<int, 2>{});
      at += 2;
    }
  }
  if (at < vectors) fn(at, std::integral_constant<int, 1>{});
}

void scores16_avx512(const void* rows16, int rows, const std::byte* k16, int64_t d, int keys, float* scores) {
  const auto* q = static_cast<const uint32_t*>(rows16);
  const auto* k = reinterpret_cast<const uint32_t*>(k16);
  with_rows(rows, [&](auto n) {
    for_vectors<kVectorsFor<n()>>(
        keys / 16, [&](int at, auto count) { tile16<n(), count()>(q, k + at * 16, d / 2, scores + at * 16); });
  });
}

void scores8_avx512(const RowCodes& codes, int rows, const std::byte* k8, int64_t d, int keys, float* scores) {
  const auto* q = reinterpret_cast<const uint32_t*>(codes.codes);
  const auto* k = reinterpret_cast<const uint32_t*>(k8);
  with_rows(rows, [&](auto n) {
    for_vectors<kVectorsFor<n()>>(keys / 16, [&](int at, auto count) {
      tile8<n(), count()>(q, codes.starts, k + at * 16, d / 4, scores + at * 16);
    });
  });
}

// --- probabilities times values ---

template <int kRows, int kVectors>
inline void tile_values(const uint32_t* p, const Chunk& chunk, int64_t c, int64_t padded_dv, const float* rescale,
                        float* out) {
  __m512 sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = rescale == nullptr
                       ? _mm512_setzero_ps()
                       : _mm512_mul_ps(_mm512_load_ps(out + r * padded_dv + c + v * 16), _mm512_set1_ps(rescale[r]));
    }
  }
  for (int b = 0; b < chunk.blocks; ++b) {
    const auto* from = reinterpret_cast<const uint32_t*>(chunk.v16[b]) + c;
    const uint32_t* weights = p + b * (kKeyBlock / 2);
    for (int i = 0; i < chunk.keys[b] / 2; ++i, from += padded_dv, ++weights) {
      __m512i values[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) values[v] = _mm512_load_si512(from + v * 16);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const __m512i a = broadcast_word(weights + r * (kChunkKeys / 2));
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) add_dot(sums[r][v], a, values[v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) _mm512_store_ps(out + r * padded_dv + c + v * 16, sums[r][v]);
  }
}

void values_avx512(const uint16_t* p, int rows, const Chunk& chunk, int64_t padded_dv, const float* rescale,
                   float* out) {
  const auto* words = reinterpret_cast<const uint32_t*>(p);
  with_rows(rows, [&](auto n) {
    for_vectors<kVectorsFor<n()>>(static_cast<int>(padded_dv / 16), [&](int at, auto count) {
      tile_values<n(), count()>(words, chunk, at * 16, padded_dv, rescale, out);
    });
  });
}

// --- softmax ---

// 2^x, x <= 0 or a little above, within about 2 units in the last place; 2^-inf = 0. Minimax polynomial of 2^f,
// |f| <= 1/2, that is exact at 0.
inline __m512 exp2_near(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(0x1.5bba0ep-10F);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.3cea88p-7F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c6b752p-5F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ebf9bcp-3F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e42ap-1F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0F));
  return _mm512_scalef_ps(p, _mm512_sub_ps(x, f));
}

inline __m512 largest_of(const float* scores, int vectors) {
  __m512 m = _mm512_load_ps(scores);
  for (int v = 1; v < vectors; ++v) m = _mm512_max_ps(m, _mm512_load_ps(scores + v * 16));
  return m;
}

// The probabilities of one row and block.
template <int kVectors>
inline void exponentials(const float* scores, __m512 multiplier, __m512 offset, const float* value_scales,
                         __m512 (&sums)[2], uint16_t* p) {
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; v += 2) {
    __m512 x[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      if (v + i >= kVectors) {
        x[i] = _mm512_setzero_ps();
        continue;
      }
      x[i] = exp2_near(_mm512_fmadd_ps(_mm512_load_ps(scores + (v + i) * 16), multiplier, offset));
      sums[i] = _mm512_add_ps(sums[i], x[i]);
      if (value_scales != nullptr) x[i] = _mm512_mul_ps(x[i], _mm512_loadu_ps(value_scales + (v + i) * 16));
    }
    _mm512_store_si512(p + v * 16, pack_bf16(x[0], x[1]));
  }
}

void softmax_avx512(const float* scores, int rows, const Chunk& chunk, RowState& state, float* rescale, uint16_t* p) {
  const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  alignas(64) float largest[16] = {};
  for (int r = 0; r < rows; ++r) {
    __m512 m = lowest;
    for (int b = 0; b < chunk.blocks; ++b) {
      if (chunk.keys[b] == 0) continue;
      const float* s = scores + r * kChunkKeys + b * kKeyBlock;
      const __m512 raw = chunk.keys[b] == kKeyBlock ? largest_of(s, 4) : largest_of(s, chunk.keys[b] / 16);
      m = _mm512_max_ps(
          m, _mm512_fmadd_ps(raw, _mm512_set1_ps(chunk.multiplier[b][r]), _mm512_set1_ps(chunk.offset[b][r])));
    }
    largest[r] = _mm512_reduce_max_ps(m);
  }
  const __mmask16 lanes = static_cast<__mmask16>((1U << rows) - 1);
  const __m512 before = _mm512_maskz_loadu_ps(lanes, state.max);
  const __m512 after = _mm512_max_ps(before, _mm512_load_ps(largest));
  const __m512 base = _mm512_mask_mov_ps(after, _mm512_cmp_ps_mask(after, lowest, _CMP_EQ_OQ), _mm512_setzero_ps());
  _mm512_mask_storeu_ps(state.max, lanes, after);
  const __m512 worth = exp2_near(_mm512_sub_ps(before, base));
  _mm512_mask_storeu_ps(rescale, lanes, worth);
  _mm512_store_ps(largest, base);
  for (int r = 0; r < rows; ++r) {
    __m512 sums[2] = {_mm512_mul_ps(_mm512_load_ps(state.sums[r]), _mm512_set1_ps(rescale[r])), _mm512_setzero_ps()};
    for (int b = 0; b < chunk.blocks; ++b) {
      const float* s = scores + r * kChunkKeys + b * kKeyBlock;
      uint16_t* to = p + r * kChunkKeys + b * kKeyBlock;
      const __m512 multiplier = _mm512_set1_ps(chunk.multiplier[b][r]);
      const __m512 offset = _mm512_set1_ps(chunk.offset[b][r] - largest[r]);
      const float* scales = chunk.v_scales[b];
      switch (chunk.keys[b] / 16) {
        case 4:
          exponentials<4>(s, multiplier, offset, scales, sums, to);
          break;
        case 3:
          exponentials<3>(s, multiplier, offset, scales, sums, to);
          break;
        case 2:
          exponentials<2>(s, multiplier, offset, scales, sums, to);
          break;
        case 1:
          exponentials<1>(s, multiplier, offset, scales, sums, to);
          break;
        default:
          break;
      }
    }
    _mm512_store_ps(state.sums[r], _mm512_add_ps(sums[0], sums[1]));
  }
}

// --- packing ---

// to[i][r] = from[r][i], rows and words counted in 16s.
inline void transpose_tile(const std::byte* from, int rows, int64_t row_bytes, int64_t words, uint32_t* to,
                           int64_t to_stride, int to_rows, __m512i flip) {
  for (int64_t i = 0; i < words; i += 16) {
    const int64_t left = std::min<int64_t>(16, words - i);
    const auto in = static_cast<__mmask16>((1U << left) - 1);
    const auto out = static_cast<__mmask16>((1U << to_rows) - 1);
    __m512i v[16];
    for (int r = 0; r < 16; ++r) {
      v[r] = r < rows ? _mm512_xor_si512(_mm512_maskz_loadu_epi32(in, from + r * row_bytes + i * 4), flip) : flip;
    }
    transpose_16x16(v);
    if (left == 16) {
      for (int j = 0; j < 16; ++j) _mm512_mask_storeu_epi32(to + (i + j) * to_stride, out, v[j]);
    } else {
      for (int j = 0; j < left; ++j) _mm512_mask_storeu_epi32(to + (i + j) * to_stride, out, v[j]);
    }
  }
}

void pack_rows16_avx512(const uint16_t* from, int rows, int64_t d, void* to) {
  transpose_tile(reinterpret_cast<const std::byte*>(from), rows, d * 2, d / 2, static_cast<uint32_t*>(to), kBlockRows,
                 kBlockRows, _mm512_setzero_si512());
}

void pack_rows8_avx512(const uint16_t* from, int rows, int64_t d, RowCodes& to) {
  int8_t codes[kBlockRows * kMaxChannels];
  quantise_rows(from, rows, d, to.scales, codes, to.starts);
  transpose_tile(reinterpret_cast<const std::byte*>(codes), rows, d, d / 4, reinterpret_cast<uint32_t*>(to.codes),
                 kBlockRows, kBlockRows, _mm512_setzero_si512());
}

inline void pack_keys(const void* from, int64_t row_bytes, std::byte* to, __m512i flip) {
  for (int j = 0; j < kKeyBlock; j += 16) {
    transpose_tile(static_cast<const std::byte*>(from) + j * row_bytes, 16, row_bytes, row_bytes / 4,
                   reinterpret_cast<uint32_t*>(to) + j, kKeyBlock, 16, flip);
  }
}

void pack_keys16_avx512(const uint16_t* from, int64_t d, std::byte* to) {
  pack_keys(from, d * 2, to, _mm512_setzero_si512());
}

float pack_keys8_avx512(const uint16_t* from, int keys, int64_t d, const uint16_t* mean, std::byte* to) {
  int8_t codes[kKeyBlock * kMaxChannels];
  const float scale = quantise_keys(from, keys, d, mean, codes);
  pack_keys(codes, d, to, _mm512_set1_epi8(static_cast<char>(-kKeyCodeBias)));
  return scale;
}

constexpr AttentionKernels kAvx512Kernels = {
    .rows = kBlockRows,
    .row16_bytes = kBlockRows * 2,
    .row8_bytes = kBlockRows,
    .load_row = load_row_any,
    .pack_rows16 = pack_rows16_avx512,
    .pack_rows8 = pack_rows8_avx512,
    .largest = largest_any,
    .pack_keys16 = pack_keys16_avx512,
    .mean_of_keys = mean_of_keys_any,
    .pack_keys8 = pack_keys8_avx512,
    .pack_values16 = pack_values16_any,
    .widen_values = widen_values_any,
    .scores16 = scores16_avx512,
    .scores8 = scores8_avx512,
    .softmax = softmax_avx512,
    .values = values_avx512,
    .store_row = store_row_any,
};

}  // namespace
}  // namespace tilefuse
