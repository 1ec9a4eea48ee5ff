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

// 2^(i / 32).
alignas(64) constexpr float kPowers[32] = {
    0x1p0F,        0x1.059b0ep0F, 0x1.0b5586p0F, 0x1.11301ep0F, 0x1.172b84p0F, 0x1.1d4874p0F, 0x1.2387a6p0F,
    0x1.29e9ep0F,  0x1.306fep0F,  0x1.371a74p0F, 0x1.3dea64p0F, 0x1.44e086p0F, 0x1.4bfdaep0F, 0x1.5342b6p0F,
    0x1.5ab07ep0F, 0x1.6247ecp0F, 0x1.6a09e6p0F, 0x1.71f75ep0F, 0x1.7a1148p0F, 0x1.82589ap0F, 0x1.8ace54p0F,
    0x1.93737cp0F, 0x1.9c4918p0F, 0x1.a5503cp0F, 0x1.ae89fap0F, 0x1.b7f77p0F,  0x1.c199bep0F, 0x1.cb720ep0F,
    0x1.d5818ep0F, 0x1.dfc974p0F, 0x1.ea4afap0F, 0x1.f50766p0F,
};

// 2^x, x <= 0 or a little above: x = n + f, n a multiple of 1/32, of whose power the fraction is looked up and the
// whole part left to VSCALEFPS; 2^f by the parabola that is nearest for |f| <= 1/64 among those exact at 0. 2^-inf = 0:
// so VSCALEFPS makes it, even of the NaN that f then is.
class Exp2 {
 public:
  Exp2() : low_(_mm512_load_ps(kPowers)), high_(_mm512_load_ps(kPowers + 16)) {}

  __m512 operator()(__m512 x) const {
    const __m512 round = _mm512_set1_ps(12582912.0F / 32);
    const __m512 shifted = _mm512_add_ps(x, round);
    const __m512 n = _mm512_sub_ps(shifted, round);
    const __m512 f = _mm512_sub_ps(x, n);
    const __m512 power = _mm512_permutex2var_ps(low_, _mm512_castps_si512(shifted), high_);
    const __m512 slope = _mm512_fmadd_ps(f, _mm512_set1_ps(0.24022651F), _mm512_set1_ps(0.69315734F));
    return _mm512_scalef_ps(_mm512_fmadd_ps(_mm512_mul_ps(slope, f), power, power), n);
  }

 private:
  __m512 low_;
  __m512 high_;
};

inline __m512 largest_of(const float* scores, int vectors) {
  __m512 m = _mm512_load_ps(scores);
  for (int v = 1; v < vectors; ++v) m = _mm512_max_ps(m, _mm512_load_ps(scores + v * 16));
  return m;
}

// The probabilities of one row and block.
template <int kVectors>
inline void exponentials(const Exp2& exp2, const float* scores, __m512 multiplier, __m512 offset,
                         const float* value_scales, __m512 (&sums)[2], uint16_t* p) {
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; v += 2) {
    __m512 x[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      if (v + i >= kVectors) {
        x[i] = _mm512_setzero_ps();
        continue;
      }
      x[i] = exp2(_mm512_fmadd_ps(_mm512_load_ps(scores + (v + i) * 16), multiplier, offset));
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
  const Exp2 exp2;
  const __m512 worth = exp2(_mm512_sub_ps(before, base));
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
          exponentials<4>(exp2, s, multiplier, offset, scales, sums, to);
          break;
        case 3:
          exponentials<3>(exp2, s, multiplier, offset, scales, sums, to);
          break;
        case 2:
          exponentials<2>(exp2, s, multiplier, offset, scales, sums, to);
          break;
        case 1:
          exponentials<1>(exp2, s, multiplier, offset, scales, sums, to);
          break;
        default:
          break;
      }
    }
    _mm512_store_ps(state.sums[r], _mm512_add_ps(sums[0], sums[1]));
  }
}

// --- packing ---

// to[i][r] = from(r)[i], rows and words counted in 16s.
template <typename From>
inline void transpose_tile(From&& from, int rows, int64_t words, uint32_t* to, int64_t to_stride, int to_rows,
                           __m512i flip) {
  for (int64_t i = 0; i < words; i += 16) {
    const int64_t left = std::min<int64_t>(16, words - i);
    const auto in = static_cast<__mmask16>((1U << left) - 1);
    const auto out = static_cast<__mmask16>((1U << to_rows) - 1);
    __m512i v[16];
    for (int r = 0; r < 16; ++r) {
      v[r] = r < rows ? _mm512_xor_si512(_mm512_maskz_loadu_epi32(in, from(r) + i * 4), flip) : flip;
    }
    transpose_16x16(v);
    if (left == 16) {
      for (int j = 0; j < 16; ++j) _mm512_mask_storeu_epi32(to + (i + j) * to_stride, out, v[j]);
    } else {
      for (int j = 0; j < left; ++j) _mm512_mask_storeu_epi32(to + (i + j) * to_stride, out, v[j]);
    }
  }
}

void pack_rows16_avx512(const uint16_t* const* from, int rows, int64_t d, void* to) {
  transpose_tile([&](int r) { return reinterpret_cast<const std::byte*>(from[r]); }, rows, d / 2,
                 static_cast<uint32_t*>(to), kBlockRows, kBlockRows, _mm512_setzero_si512());
}

constexpr __mmask16 kRowLanes = (1U << kBlockRows) - 1;

// Pair of channels i of packed rows, one row to a lane.
inline __m512i row_pairs(const uint32_t* rows16, int64_t i) {
  return _mm512_maskz_loadu_epi32(kRowLanes, rows16 + i * kBlockRows);
}

// Codes without a division for each. In units of 2^-15, u = x fl(1 / scale) + 0.5 + 2 units, rounded once, is within
// one unit of fl(x / scale) + 0.5 + 2 units: for quotients up to 127.2 the three roundings are at most 2^-16 (u's),
// 2^-17 (the reciprocal's) and 2^-18 (the quotient's). So where the fraction of u is 4 units or more, no half lies
// between, and its whole part is the code; other rows, a few in a hundred, divide. A scale that is NaN, or has no
// finite reciprocal, makes u Inf or NaN, whose fraction reads as 0.
void pack_rows8_avx512(const uint16_t* const* from, const void* rows16, int rows, int64_t d, RowCodes& to) {
  const auto* q = static_cast<const uint32_t*>(rows16);
  auto* codes = reinterpret_cast<uint32_t*>(to.codes);
  const auto lanes = static_cast<__mmask16>((1U << rows) - 1);
  const __m512 inverse =
      _mm512_div_ps(_mm512_set1_ps(1.0F), _mm512_mask_loadu_ps(_mm512_set1_ps(1.0F), lanes, to.scales));
  const __m512 bias = _mm512_set1_ps(384.5F + 2 * 0x1p-15F);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  const __m512i fraction = _mm512_set1_epi32(0x7fff);
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i least = fraction;
  __m512i sums = _mm512_setzero_si512();
  for (int64_t i = 0; i < d / 4; ++i) {
    const __m512i pairs[2] = {row_pairs(q, 2 * i), row_pairs(q, 2 * i + 1)};
    __m512i u[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const __m512i x = c % 2 == 0 ? _mm512_slli_epi32(pairs[c / 2], 16) : _mm512_and_si512(pairs[c / 2], high);
      u[c] = _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(x), inverse, bias));
      least = _mm512_min_epu32(least, _mm512_and_si512(u[c], fraction));
    }
    // Bits 15 to 22 of each: bytes 0 to 3.
    __m512i word = _mm512_srli_epi32(u[0], 15);
    word = _mm512_mask_mov_epi8(word, 0x2222222222222222U, _mm512_srli_epi32(u[1], 7));
    word = _mm512_mask_mov_epi8(word, 0x4444444444444444U, _mm512_slli_epi32(u[2], 1));
    word = _mm512_mask_mov_epi8(word, 0x8888888888888888U, _mm512_slli_epi32(u[3], 9));
    // Codes plus 128, so far: u is 128 above 256.
    word = _mm512_xor_si512(word, _mm512_set1_epi8(static_cast<char>(-kKeyCodeBias)));
    add_dot_u8_s8(sums, ones, word);
    _mm512_mask_storeu_epi32(codes + i * kBlockRows, kRowLanes, word);
  }
  alignas(64) int32_t starts[16];
  _mm512_store_si512(starts, _mm512_mullo_epi32(sums, _mm512_set1_epi32(-kKeyCodeBias)));
  std::copy_n(starts, rows, to.starts);
  uint32_t unsure = _mm512_mask_cmplt_epu32_mask(lanes, least, _mm512_set1_epi32(4));
  for (; unsure != 0; unsure &= unsure - 1) {
    const int r = __builtin_ctz(unsure);
    int8_t own[kMaxChannels];
    quantise_rows(from + r, 1, d, to.scales + r, own, to.starts + r);
    for (int64_t i = 0; i < d / 4; ++i) codes[i * kBlockRows + r] = load_word(own + i * 4);
  }
}

template <int kMeans>
inline void biases_of(const uint32_t* q, const std::byte* const* means, int64_t pairs, float (*to)[kMaxBlockRows]) {
  __m512 sums[kMeans];
#pragma GCC unroll 8
  for (int m = 0; m < kMeans; ++m) sums[m] = _mm512_setzero_ps();
  for (int64_t i = 0; i < pairs; ++i) {
    const __m512i rows = row_pairs(q, i);
#pragma GCC unroll 8
    for (int m = 0; m < kMeans; ++m) {
      add_dot(sums[m], rows, broadcast_word(reinterpret_cast<const uint32_t*>(means[m]) + i));
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kMeans; ++m) _mm512_storeu_ps(to[m], sums[m]);
}

void biases_avx512(const void* rows16, int /*rows*/, const std::byte* const* means, int64_t count, int64_t d,
                   float (*to)[kMaxBlockRows]) {
  const auto* q = static_cast<const uint32_t*>(rows16);
  constexpr int kMeans = 8;
  for (int64_t i = 0; i < count; i += kMeans) {
    const std::byte* some[kMeans];
    for (int64_t m = 0; m < kMeans; ++m) some[m] = means[std::min(i + m, count - 1)];
    biases_of<kMeans>(q, some, d / 2, to + i);
  }
}

inline void pack_keys(const void* from, int64_t row_bytes, std::byte* to, __m512i flip) {
  for (int j = 0; j < kKeyBlock; j += 16) {
    transpose_tile([&](int r) { return static_cast<const std::byte*>(from) + (j + r) * row_bytes; }, 16, row_bytes / 4,
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
    .biases = biases_avx512,
    .softmax = softmax_avx512,
    .values = values_avx512,
    .store_row = store_row_any,
};

}  // namespace
}  // namespace tilefuse
