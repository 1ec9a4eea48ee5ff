// AVX2: 16-bit products by FMA on widened bfloat16, codes by VPMADDUBSW.
//
// VPMADDUBSW multiplies unsigned bytes by signed ones and saturates sums of two at 16 bits, so queries enter as their
// magnitudes (at most 127) and their signs move to the keys: q k = |q| k for q >= 0, and |q| (-k - 1) + |q| for q < 0.
// -k - 1 is k with all bits flipped, as taking 128 from a stored key is flipping its top bit: one XOR does both. Sums
// of two are within 2 * 127 * 128 = 32512. The |q| of negative codes add up to a constant of the row.
#include <immintrin.h>

#include <limits>

#include "attention/packing.h"

namespace tilefuse {
namespace {

constexpr int kBlockRows = 10;
constexpr int kRows16 = 5;  // rows of a register block: with two vectors of keys, 10 of 16 registers
constexpr int kRows8 = 2;   // with four vectors of keys

#define TILEFUSE_UNROLL _Pragma("GCC unroll 16")

// Keeps `x` in a register at this point: left alone, GCC 12 moves work of several rows together, and spills.
inline void pin(__m256i& x) { asm volatile("" : "+x"(x)); }
inline void pin(__m256& x) { asm volatile("" : "+x"(x)); }

// The two bfloat16 of each 32-bit word.
inline __m256 low_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 high_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000U))));
}

inline __m256i load_words(const void* from) { return _mm256_load_si256(static_cast<const __m256i*>(from)); }

// sums[r][i] += left[r] * (pairs[i], low then high); right operands of rows `stride` floats apart.
template <int kR>
inline void add_pair(const std::byte* pairs, const float* low, const float* high, int64_t stride,
                     __m256 (&sums)[kR][2]) {
  const __m256i words[2] = {load_words(pairs), load_words(pairs + 32)};
  const __m256 first[2] = {low_of(words[0]), low_of(words[1])};
  TILEFUSE_UNROLL for (int r = 0; r < kR; ++r) {
    const __m256 factor = _mm256_broadcast_ss(low + r * stride);
    TILEFUSE_UNROLL for (int i = 0; i < 2; ++i) sums[r][i] = _mm256_fmadd_ps(first[i], factor, sums[r][i]);
    TILEFUSE_UNROLL for (int i = 0; i < 2; ++i) pin(sums[r][i]);
  }
  const __m256 second[2] = {high_of(words[0]), high_of(words[1])};
  TILEFUSE_UNROLL for (int r = 0; r < kR; ++r) {
    const __m256 factor = _mm256_broadcast_ss(high + r * stride);
    TILEFUSE_UNROLL for (int i = 0; i < 2; ++i) sums[r][i] = _mm256_fmadd_ps(second[i], factor, sums[r][i]);
    TILEFUSE_UNROLL for (int i = 0; i < 2; ++i) pin(sums[r][i]);
  }
}

// Calls fn.template operator()<n>(first) for register blocks of up to kMost of `rows` rows.
template <int kMost, typename Fn>
inline void in_blocks(int rows, Fn&& fn) {
  int at = 0;
  for (; at + kMost <= rows; at += kMost) fn.template operator()<kMost>(at);
  const int rest = rows - at;
  if constexpr (kMost > 1) {
    if (rest == 1) fn.template operator()<1>(at);
  }
  if constexpr (kMost > 2) {
    if (rest == 2) fn.template operator()<2>(at);
  }
  if constexpr (kMost > 3) {
    if (rest == 3) fn.template operator()<3>(at);
  }
  if constexpr (kMost > 4) {
    if (rest == 4) fn.template operator()<4>(at);
  }
}

// float [register blocks][d][rows of the block].
void pack_rows16(const uint16_t* const* from, int rows, int64_t d, void* to) {
  auto* out = static_cast<float*>(to);
  for (int at = 0; at < rows; at += kRows16) {
    const int count = std::min(kRows16, rows - at);
    for (int64_t c = 0; c < d; ++c) {
      for (int r = 0; r < count; ++r) *out++ = bf16_to_float(from[at + r][c]);
    }
  }
}

// [register blocks][d / 4][rows of the block]: four magnitudes and what to XOR the keys with.
void pack_rows8(const uint16_t* const* from, const void* /*rows16*/, int rows, int64_t d, RowCodes& to) {
  int8_t codes[kBlockRows * kMaxChannels];
  quantise_rows(from, rows, d, to.scales, codes, to.starts);
  auto* out = reinterpret_cast<uint8_t*>(to.codes);
  for (int at = 0; at < rows; at += kRows8) {
    const int count = std::min(kRows8, rows - at);
    for (int64_t c = 0; c < d; c += 4) {
      for (int r = 0; r < count; ++r, out += 8) {
        const int8_t* code = codes + (at + r) * d + c;
        for (int i = 0; i < 4; ++i) {
          const bool negative = code[i] < 0;
          out[i] = static_cast<uint8_t>(negative ? -code[i] : code[i]);
          out[4 + i] = static_cast<uint8_t>(negative ? 0x7f : 0x80);
        }
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    to.starts[r] = 0;
    for (int64_t c = 0; c < d; ++c) to.starts[r] -= std::min<int>(codes[r * d + c], 0);
  }
}

void scores16(const void* rows16, int rows, const std::byte* k16, int64_t d, int keys, float* scores) {
  in_blocks<kRows16>(rows, [&]<int kR>(int at) {
    const float* q = static_cast<const float*>(rows16) + at * d;
    for (int j = 0; j < keys; j += 16) {
      __m256 sums[kR][2];
      TILEFUSE_UNROLL for (int r = 0; r < kR; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
      const std::byte* k = k16 + j * 4;
      for (int64_t c = 0; c < d; c += 2, k += kKeyBlock * 4) add_pair<kR>(k, q + c * kR, q + (c + 1) * kR, 1, sums);
      TILEFUSE_UNROLL for (int r = 0; r < kR; ++r) {
        float* to = scores + (at + r) * kChunkKeys + j;
        _mm256_storeu_ps(to, sums[r][0]);
        _mm256_storeu_ps(to + 8, sums[r][1]);
      }
    }
  });
}

template <int kR>
inline void add_codes(const std::byte* k8, const int32_t* q, __m256i ones, __m256i (&sums)[kR][4]) {
  __m256i k[4];
  TILEFUSE_UNROLL for (int i = 0; i < 4; ++i) k[i] = load_words(k8 + 32 * i);
  TILEFUSE_UNROLL for (int r = 0; r < kR; ++r) {
    const __m256i magnitudes = _mm256_set1_epi32(q[2 * r]);
    const __m256i flips = _mm256_set1_epi32(q[2 * r + 1]);
    __m256i x[4];
    TILEFUSE_UNROLL for (int i = 0; i < 4; ++i) x[i] = _mm256_xor_si256(k[i], flips);
    TILEFUSE_UNROLL for (int i = 0; i < 4; ++i) x[i] = _mm256_maddubs_epi16(magnitudes, x[i]);
    TILEFUSE_UNROLL for (int i = 0; i < 4; ++i) x[i] = _mm256_madd_epi16(x[i], ones);
    TILEFUSE_UNROLL for (int i = 0; i < 4; ++i) sums[r][i] = _mm256_add_epi32(sums[r][i], x[i]);
    TILEFUSE_UNROLL for (int i = 0; i < 4; ++i) pin(sums[r][i]);
  }
}

void scores8(const RowCodes& codes, int rows, const std::byte* k8, int64_t d, int keys, float* scores) {
  __m256i ones = _mm256_set1_epi16(1);
  pin(ones);
  in_blocks<kRows8>(rows, [&]<int kR>(int at) {
    const auto* first = reinterpret_cast<const int32_t*>(codes.codes + at * d * 2);
    for (int j = 0; j < keys; j += 32) {  // beyond `keys` there is room in both
      __m256i sums[kR][4];
      TILEFUSE_UNROLL for (int r = 0; r < kR; ++r) {
        TILEFUSE_UNROLL for (int i = 0; i < 4; ++i) sums[r][i] = _mm256_set1_epi32(codes.starts[at + r]);
      }
      const std::byte* k = k8 + j * 4;
      const int32_t* q = first;
      for (int64_t c = 0; c < d; c += 8, k += kKeyBlock * 8, q += 4 * kR) {
        add_codes<kR>(k, q, ones, sums);
        add_codes<kR>(k + kKeyBlock * 4, q + 2 * kR, ones, sums);
      }
      TILEFUSE_UNROLL for (int r = 0; r < kR; ++r) {
        float* to = scores + (at + r) * kChunkKeys + j;
        TILEFUSE_UNROLL for (int i = 0; i < 4; ++i) _mm256_storeu_ps(to + 8 * i, _mm256_cvtepi32_ps(sums[r][i]));
      }
    }
  });
}

// 2^x for x <= 0 (a little above is fine), within 2 units in the last place; 0 below 2^-126.5; NaN stays NaN (MAXPS
// gives its second operand for it). The polynomial is the portable level's. Step by step for kN vectors, so that
// several of their chains of 40 cycles run at a time.
template <int kN>
inline void exp2_near(__m256 (&x)[kN]) {
  const __m256 round = _mm256_set1_ps(12582912.0F);
  __m256 p[kN];
  __m256i power[kN];
  TILEFUSE_UNROLL for (int i = 0; i < kN; ++i) x[i] = _mm256_max_ps(_mm256_set1_ps(-127.0F), x[i]);
  TILEFUSE_UNROLL for (int i = 0; i < kN; ++i) {
    const __m256 rounded = _mm256_add_ps(x[i], round);
    // `round` has nothing but zeros in the bits that the shift keeps: what is left is the integer, to which 127 is
    // added; of -127 comes a power of 0.
    power[i] = _mm256_slli_epi32(_mm256_castps_si256(rounded), 23);
    p[i] = _mm256_sub_ps(rounded, round);
  }
  TILEFUSE_UNROLL for (int i = 0; i < kN; ++i) x[i] = _mm256_sub_ps(x[i], p[i]);
  constexpr float kTerms[] = {0x1.3cea88p-7F, 0x1.c6b752p-5F, 0x1.ebf9bcp-3F, 0x1.62e42ap-1F, 1.0F};
  TILEFUSE_UNROLL for (int i = 0; i < kN; ++i) p[i] = _mm256_set1_ps(0x1.5bba0ep-10F);
  TILEFUSE_UNROLL for (const float term : kTerms) {
    TILEFUSE_UNROLL for (int i = 0; i < kN; ++i) p[i] = _mm256_fmadd_ps(p[i], x[i], _mm256_set1_ps(term));
    TILEFUSE_UNROLL for (int i = 0; i < kN; ++i) pin(p[i]);
  }
  TILEFUSE_UNROLL for (int i = 0; i < kN; ++i) {
    power[i] = _mm256_add_epi32(power[i], _mm256_set1_epi32(127 << 23));
    x[i] = _mm256_mul_ps(p[i], _mm256_castsi256_ps(power[i]));
  }
}

// To nearest, ties to even. Not for NaN, which the row's sum keeps.
inline __m256i bf16_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}

inline float largest_lane(__m256 x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

// kN vectors of one row's weights, from scores at key j.
template <int kN>
inline void weights(const float* s, __m256 multiplier, __m256 offset, const float* value_scales, int j,
                    __m256 (&sums)[2], uint16_t* to) {
  __m256 x[kN];
  TILEFUSE_UNROLL for (int i = 0; i < kN; ++i) x[i] = _mm256_fmadd_ps(_mm256_loadu_ps(s + 8 * i), multiplier, offset);
  exp2_near(x);
  TILEFUSE_UNROLL for (int i = 0; i < kN; ++i) sums[i % 2] = _mm256_add_ps(sums[i % 2], x[i]);
  if (value_scales != nullptr) {
    TILEFUSE_UNROLL for (int i = 0; i < kN; ++i) x[i] = _mm256_mul_ps(x[i], _mm256_loadu_ps(value_scales + j + 8 * i));
  }
  TILEFUSE_UNROLL for (int i = 0; i < kN; i += 2) {
    const __m256i both = _mm256_packus_epi32(bf16_bits(x[i]), bf16_bits(x[i + 1]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * i), _mm256_permute4x64_epi64(both, 0xd8));
  }
}

void softmax_row(const float* scores, const Chunk& chunk, int r, RowState& state, float& rescale, uint16_t* p) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  // Multipliers are positive: the maximum of exponents is the exponent of the maximum. A NaN is dropped here, and back
  // in the exponents.
  __m256 most = _mm256_set1_ps(state.max[r]);
  for (int b = 0; b < chunk.blocks; ++b) {
    const float* s = scores + b * kKeyBlock;
    __m256 raw[2] = {_mm256_set1_ps(kNone), _mm256_set1_ps(kNone)};
    for (int j = 0; j < chunk.keys[b]; j += 16) {
      raw[0] = _mm256_max_ps(_mm256_loadu_ps(s + j), raw[0]);
      raw[1] = _mm256_max_ps(_mm256_loadu_ps(s + j + 8), raw[1]);
    }
    if (chunk.keys[b] == 0) continue;
    most = _mm256_max_ps(_mm256_fmadd_ps(_mm256_max_ps(raw[0], raw[1]), _mm256_set1_ps(chunk.multiplier[b][r]),
                                         _mm256_set1_ps(chunk.offset[b][r])),
                         most);
  }
  const float largest = largest_lane(most);
  const float base = largest == kNone ? 0.0F : largest;
  __m256 change[1] = {_mm256_set1_ps(state.max[r] - base)};
  exp2_near(change);
  rescale = _mm256_cvtss_f32(change[0]);
  state.max[r] = largest;
  __m256 sums[2] = {_mm256_mul_ps(_mm256_load_ps(state.sums[r]), change[0]),
                    _mm256_mul_ps(_mm256_load_ps(state.sums[r] + 8), change[0])};
  for (int b = 0; b < chunk.blocks; ++b) {
    const float* s = scores + b * kKeyBlock;
    const float* value_scales = chunk.v_scales[b];
    uint16_t* to = p + b * kKeyBlock;
    const __m256 multiplier = _mm256_set1_ps(chunk.multiplier[b][r]);
    const __m256 offset = _mm256_set1_ps(chunk.offset[b][r] - base);
    int j = 0;
    for (; j + 32 <= chunk.keys[b]; j += 32) weights<4>(s + j, multiplier, offset, value_scales, j, sums, to + j);
    if (j < chunk.keys[b]) weights<2>(s + j, multiplier, offset, value_scales, j, sums, to + j);
  }
  _mm256_store_ps(state.sums[r], sums[0]);
  _mm256_store_ps(state.sums[r] + 8, sums[1]);
}

void softmax(const float* scores, int rows, const Chunk& chunk, RowState& state, float* rescale, uint16_t* p) {
  for (int r = 0; r < rows; ++r) {
    softmax_row(scores + r * kChunkKeys, chunk, r, state, rescale[r], p + r * kChunkKeys);
  }
}

void values(const uint16_t* p, int rows, const Chunk& chunk, int64_t padded_dv, const float* rescale, float* out) {
  alignas(32) float wide[kBlockRows * kChunkKeys];
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < chunk.blocks * kKeyBlock; j += 8) {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + r * kChunkKeys + j));
      _mm256_store_si256(reinterpret_cast<__m256i*>(wide + r * kChunkKeys + j),
                         _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
  }
  for (int64_t c = 0; c < padded_dv; c += 16) {
    in_blocks<kRows16>(rows, [&]<int kR>(int at) {
      __m256 sums[kR][2];
      TILEFUSE_UNROLL for (int r = 0; r < kR; ++r) {
        const float* from = out + (at + r) * padded_dv + c;
        TILEFUSE_UNROLL for (int i = 0; i < 2; ++i) {
          sums[r][i] = rescale == nullptr
                           ? _mm256_setzero_ps()
                           : _mm256_mul_ps(_mm256_loadu_ps(from + 8 * i), _mm256_set1_ps(rescale[at + r]));
        }
      }
      for (int b = 0; b < chunk.blocks; ++b) {
        const std::byte* v = chunk.v16[b] + c * 4;
        const float* weights = wide + at * kChunkKeys + b * kKeyBlock;
        for (int j = 0; j < chunk.keys[b]; j += 2, v += padded_dv * 4) {
          add_pair<kR>(v, weights + j, weights + j + 1, kChunkKeys, sums);
        }
      }
      TILEFUSE_UNROLL for (int r = 0; r < kR; ++r) {
        float* to = out + (at + r) * padded_dv + c;
        _mm256_storeu_ps(to, sums[r][0]);
        _mm256_storeu_ps(to + 8, sums[r][1]);
      }
    });
  }
}

#undef TILEFUSE_UNROLL

}  // namespace

const AttentionKernels& attention_kernels_avx2() {
  static constexpr AttentionKernels kernels = {
      .rows = kBlockRows,
      .row16_bytes = kBlockRows * 4,
      .row8_bytes = kBlockRows * 2,
      .load_row = load_row_any,
      .pack_rows16 = pack_rows16,
      .pack_rows8 = pack_rows8,
      .largest = largest_any,
      .pack_keys16 = pack_keys16_any,
      .mean_of_keys = mean_of_keys_any,
      .pack_keys8 = pack_keys8_any,
      .pack_values16 = pack_values16_any,
      .widen_values = widen_values_any,
      .scores16 = scores16,
      .scores8 = scores8,
      .biases = nullptr,
      .softmax = softmax,
      .values = values,
      .store_row = store_row_any,
  };
  return kernels;
}

}  // namespace tilefuse
