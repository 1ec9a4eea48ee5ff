// Matmul on AVX512_BF16 without panels, with exact weights. Codes less their zero points are integers of 5 bits (4-bit
// codes), which bfloat16 holds exactly; VDPBF16PS sums them times the activations over a group, and the group's scale
// is applied to the float sum. A weight of zero contributes an exact zero.
//
// Error, as a fraction of |x| @ |W|: at most (g + 1 + K / g) 2^-24, g the group size: a group's sum, its scale, and the
// sum over groups. Minima: w = (q - z) s + (m + z s), z the integer next to -m / s in [0, 16]; within that range
// |(q - z) s| is at most 2 |w| and |m + z s| at most |w| or the whole of w, beyond it the two terms have one sign, so
// that the bound at most triples: (3 (g + 1) + K / g) 2^-24.
#pragma once

#include <immintrin.h>

#include "bf16.h"
#include "bf16_dot.h"
#include "fused_digits.h"
#include "matmul_kernels.h"

namespace tilefuse {
namespace {

// bfloat16 of a 5-bit two's complement integer.
inline constexpr struct IntegerTable {
  alignas(64) uint16_t bf16[32] = {};
  constexpr IntegerTable() {
    for (int i = 0; i < 32; ++i) {
      const auto value = static_cast<float>(i < 16 ? i : i - 32);
      bf16[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value) >> 16);
    }
  }
} kIntegerTable;

// Zero points of a group's 64 output channels as bytes, and, with minima, what they leave of them.
struct GroupZeros {
  __m512i z[kVectors];  // four times in each 32-bit lane
  __m512 rest[kVectors];
};

// The lowest byte of each 32-bit lane, four times.
inline __m512i four_times(__m512i lanes) {
  return _mm512_shuffle_epi8(lanes,
                             _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12)));
}

inline void load_zeros_w4(const TileLayout& layout, const std::byte* tile, int group, int v, GroupZeros& out) {
  const int64_t at = static_cast<int64_t>(group) * kNt + v * 16;
  const std::byte* zeros = tile + layout.zero_offset;
  if (layout.zero == ZeroKind::z8) {
    out.z[v] = four_times(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + at))));
    return;
  }
  const __m512 m = load_bf16(zeros + at * 2);
  const __m512 scale = load_bf16(tile + layout.scale_offset + at * 2);
  // The order of operands makes 0 / 0 a bound.
  const __m512 exact = _mm512_div_ps(_mm512_sub_ps(_mm512_setzero_ps(), m), scale);
  const __m512i z = _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(exact, _mm512_set1_ps(16.0F)), _mm512_setzero_ps()));
  out.z[v] = four_times(z);
  out.rest[v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(z), scale, m);
}

// One group of kRowsHere rows, kAtOnce vectors of 16 output channels at a time.
template <int kRowsHere, int kAtOnce>
inline void fused_group_w4_bf16(const TileLayout& layout, const std::byte* tile, int group, const uint32_t* x,
                                const float* sums, float* acc) {
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i table = _mm512_load_si512(kIntegerTable.bf16);
  const int blocks = layout.tile_group / kBlock;
  for (int v0 = 0; v0 < kVectors; v0 += kAtOnce) {
    __m512 c[kRowsHere][kAtOnce];
    GroupZeros zeros;
    for (int v = 0; v < kAtOnce; ++v) {
      load_zeros_w4(layout, tile, group, v0 + v, zeros);
      for (int r = 0; r < kRowsHere; ++r) c[r][v] = _mm512_setzero_ps();
    }
    const std::byte* codes = tile + group * blocks * (kNt * 4) + v0 * 64;
    const uint32_t* from = x;
    for (int kb = 0; kb < blocks; ++kb, codes += kNt * 4, from += 4 * kRowsHere) {
      __m512i w[4][kAtOnce];  // pair j: input channels j and j + 4
      for (int v = 0; v < kAtOnce; ++v) {
        const __m512i words = _mm512_load_si512(codes + v * 64);
        _mm_prefetch(reinterpret_cast<const char*>(codes + v * 64 + kPrefetchBytes), _MM_HINT_T0);
        const __m512i z = zeros.z[v0 + v];
        const __m512i even = _mm512_sub_epi8(_mm512_and_si512(words, mask), z);
        const __m512i odd = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(words, 4), mask), z);
        // A 16-bit word permutation reads the low five bits of each index.
        w[0][v] = _mm512_permutexvar_epi16(even, table);
        w[1][v] = _mm512_permutexvar_epi16(odd, table);
        w[2][v] = _mm512_permutexvar_epi16(_mm512_srli_epi16(even, 8), table);
        w[3][v] = _mm512_permutexvar_epi16(_mm512_srli_epi16(odd, 8), table);
      }
      for (int j = 0; j < 4; ++j) {
        for (int r = 0; r < kRowsHere; ++r) {
          const __m512i a = _mm512_set1_epi32(static_cast<int>(from[j * kRowsHere + r]));
          for (int v = 0; v < kAtOnce; ++v) c[r][v] = dot_bf16(c[r][v], a, w[j][v]);
        }
      }
    }
    for (int v = 0; v < kAtOnce; ++v) {
      const int64_t at = static_cast<int64_t>(group) * kNt + (v0 + v) * 16;
      const __m512 scale = load_bf16(tile + layout.scale_offset + at * 2);
      for (int r = 0; r < kRowsHere; ++r) {
        float* to = acc + r * kNt + (v0 + v) * 16;
        __m512 sum = _mm512_loadu_ps(to);
        if (sums != nullptr) sum = _mm512_fmadd_ps(zeros.rest[v0 + v], _mm512_set1_ps(sums[r]), sum);
        _mm512_storeu_ps(to, _mm512_fmadd_ps(c[r][v], scale, sum));
      }
    }
  }
}

template <int kRowsHere>
void fused_pass_w4_n(const TileRun& run, int64_t k_tile, const PassRows& x, float* acc) {
  // As many accumulators as hide VDPBF16PS's latency, as few as leave registers for unpacked weights.
  constexpr int kAtOnce = kRowsHere <= 3 ? 4 : kRowsHere <= 12 ? 2 : 1;
  const TileLayout& layout = *run.layout;
  const std::byte* tile = run.tiles + k_tile * layout.tile_bytes;
  const int groups = layout.groups_per_tile();
  const uint32_t* words = x.words + k_tile * x.tile_stride;
  for (int g = 0; g < groups; ++g, words += layout.tile_group / 2 * kRowsHere) {
    const float* sums = x.sums == nullptr ? nullptr : x.sums + (k_tile * groups + g) * kRowsHere;
    fused_group_w4_bf16<kRowsHere, kAtOnce>(layout, tile, g, words, sums, acc);
  }
}

}  // namespace
}  // namespace tilefuse
