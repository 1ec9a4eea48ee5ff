// Matmul on AVX512_BF16 without panels, with exact weights. Codes less their zero points are integers of at most 8
// significant bits, which bfloat16 holds exactly; VDPBF16PS sums them times the activations over a group, and the
// group's scale is applied to the float sum. A weight of zero contributes an exact zero.
//
// Error, as a fraction of |x| @ |W|: at most (g + 1 + K / g) 2^-24, g the group size: a group's sum, its scale, and the
// sum over groups. Minima: w = (q - z) s + (m + z s), z the integer next to -m / s among those that the integers' range
// allows. Either a code comes near to cancelling m, and then |m + z s| is at most s / 2, or the two terms have one
// sign: together they are at most 3 |w|, and the bound is (3 g + 4 + K / g) 2^-24.
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

// The zero points of 16 output channels as integers up to kLargest and, with minima, what they leave of them.
template <int kLargest>
inline __m512i load_zeros(const TileLayout& layout, const std::byte* tile, int64_t at, __m512& rest) {
  const std::byte* zeros = tile + layout.zero_offset;
  if (layout.zero == ZeroKind::z8) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + at)));
  }
  const __m512 m = load_bf16(zeros + at * 2);
  const __m512 scale = load_bf16(tile + layout.scale_offset + at * 2);
  // The order of operands makes 0 / 0 a bound.
  const __m512 exact = _mm512_div_ps(_mm512_sub_ps(_mm512_setzero_ps(), m), scale);
  const __m512i z =
      _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(exact, _mm512_set1_ps(kLargest)), _mm512_setzero_ps()));
  rest = _mm512_fmadd_ps(_mm512_cvtepi32_ps(z), scale, m);
  return z;
}

// How to unpack codes of 8 input by 16 output channels. pair<j>: the weights of input channels j and j + 4 as bfloat16
// pairs, without their scale.
struct UnpackW4 {
  static constexpr int kBytes = 64;
  static constexpr int kLargestZero = 16;
  using Zeros = __m512i;  // each four times in its 32-bit lane

  static Zeros zeros(__m512i z) {
    return _mm512_shuffle_epi8(
        z, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12)));
  }

  __m512i even, odd;  // bytes q - z of input channels 0 2 4 6, 1 3 5 7

  UnpackW4(const std::byte* codes, Zeros z) {
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i words = _mm512_load_si512(codes);
    even = _mm512_sub_epi8(_mm512_and_si512(words, mask), z);
    odd = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(words, 4), mask), z);
  }

  template <int j>
  [[nodiscard]] __m512i pair() const {
    const __m512i bytes = j % 2 == 0 ? even : odd;
    // A permutation of 16-bit words reads the low five bits of each index.
    return _mm512_permutexvar_epi16(j < 2 ? bytes : _mm512_srli_epi16(bytes, 8), _mm512_load_si512(kIntegerTable.bf16));
  }
};

struct UnpackW8 {
  static constexpr int kBytes = 128;
  static constexpr int kLargestZero = 256;
  using Zeros = __m512;  // 2^23 + z

  static __m512i magic() { return _mm512_set1_epi32(0x4B000000); }  // 2^23, whose last place is 1
  static Zeros zeros(__m512i z) { return _mm512_castsi512_ps(_mm512_add_epi32(z, magic())); }

  __m512i low, high;  // bytes q of input channels 0..3, 4..7
  Zeros zero;

  UnpackW8(const std::byte* codes, Zeros z) : zero(z) {
    const __m512i first = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i second = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const __m512i a = _mm512_load_si512(codes);
    const __m512i b = _mm512_load_si512(codes + 64);
    low = _mm512_permutex2var_epi32(a, first, b);
    high = _mm512_permutex2var_epi32(a, second, b);
  }

  template <int j>
  [[nodiscard]] __m512i pair() const {
    // Byte j of each lane moves into the last place of 2^23; less 2^23 + z it is q - z, exactly, with zeros in the low
    // half: the high halves of two such floats are a pair.
    const __m512i byte = _mm512_broadcast_i32x4(_mm_setr_epi32(j, j + 4, j + 8, j + 12));
    const __m512i half = _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 0, 0, 6, 7, 0, 0, 10, 11, 0, 0, 14, 15, 0, 0));
    constexpr __mmask64 kByte0 = 0x1111111111111111U;
    constexpr __mmask64 kBytes01 = 0x3333333333333333U;
    const auto exact = [&](__m512i bytes) {
      return _mm512_castps_si512(
          _mm512_sub_ps(_mm512_castsi512_ps(_mm512_mask_shuffle_epi8(magic(), kByte0, bytes, byte)), zero));
    };
    return _mm512_mask_shuffle_epi8(exact(high), kBytes01, exact(low), half);
  }
};

// A group's sums c, times its scale, onto acc; v0: the first of kAtOnce vectors of output channels.
template <int kRowsHere, int kAtOnce>
inline void add_group(const TileLayout& layout, const std::byte* tile, int64_t first_channel,
                      const __m512 (&c)[kRowsHere][kAtOnce], const __m512 (&rest)[kAtOnce], const float* sums,
                      float* acc) {
  for (int v = 0; v < kAtOnce; ++v) {
    const __m512 scale = load_bf16(tile + layout.scale_offset + (first_channel + v * 16) * 2);
    for (int r = 0; r < kRowsHere; ++r) {
      float* to = acc + r * kNt + v * 16;
      __m512 sum = _mm512_loadu_ps(to);
      if (sums != nullptr) sum = _mm512_fmadd_ps(rest[v], _mm512_set1_ps(sums[r]), sum);
      _mm512_storeu_ps(to, _mm512_fmadd_ps(c[r][v], scale, sum));
    }
  }
}

// One group of kRowsHere rows, kAtOnce vectors of 16 output channels at a time.
template <class Unpack, int kRowsHere, int kAtOnce>
inline void fused_group_bf16(const TileLayout& layout, const std::byte* tile, int group, const uint32_t* x,
                             const float* sums, float* acc) {
  constexpr int64_t kRowBytes = kVectors * Unpack::kBytes;
  const int64_t ahead = kAtOnce > 1 ? 0 : kTilesAhead * layout.tile_bytes;
  const int blocks = layout.tile_group / kBlock;
  for (int v0 = 0; v0 < kVectors; v0 += kAtOnce) {
    const int64_t first = static_cast<int64_t>(group) * kNt + v0 * 16;
    __m512 c[kRowsHere][kAtOnce];
    __m512 rest[kAtOnce];
    typename Unpack::Zeros zeros[kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) {
      zeros[v] = Unpack::zeros(load_zeros<Unpack::kLargestZero>(layout, tile, first + v * 16, rest[v]));
      for (int r = 0; r < kRowsHere; ++r) c[r][v] = _mm512_setzero_ps();
    }
    const std::byte* codes = tile + group * blocks * kRowBytes + v0 * Unpack::kBytes;
    // In the order of memory, unlike the reads.
    const std::byte* later = tile + ahead + (group * kVectors + v0) * blocks * Unpack::kBytes;
    const uint32_t* from = x;
    for (int kb = 0; kb < blocks; ++kb, codes += kRowBytes, from += 4 * kRowsHere) {
      const auto multiply = [&]<int j>(const auto&... unpacked) {
        const __m512i w[kAtOnce] = {unpacked.template pair<j>()...};
        for (int r = 0; r < kRowsHere; ++r) {
          const __m512i a = _mm512_set1_epi32(static_cast<int>(from[j * kRowsHere + r]));
          for (int v = 0; v < kAtOnce; ++v) c[r][v] = dot_bf16(c[r][v], a, w[v]);
        }
      };
      const auto all_pairs = [&](const auto&... unpacked) {
        multiply.template operator()<0>(unpacked...);
        multiply.template operator()<1>(unpacked...);
        multiply.template operator()<2>(unpacked...);
        multiply.template operator()<3>(unpacked...);
      };
      if constexpr (kRowsHere <= 4) {
        for (int64_t i = 0; i < 16 * kRowsHere; i += 64) prefetch(reinterpret_cast<const std::byte*>(from) + 512 + i);
      }
      const auto at = [&](int v) {
        for (int i = 0; i < Unpack::kBytes; i += 64, later += 64) {
          if constexpr (kAtOnce > 1) {
            prefetch_twice(later, layout);
          } else {
            prefetch(later);
          }
        }
        return Unpack(codes + v * Unpack::kBytes, zeros[v]);
      };
      if constexpr (kAtOnce == 1) all_pairs(at(0));
      if constexpr (kAtOnce == 2) all_pairs(at(0), at(1));
      if constexpr (kAtOnce == 4) all_pairs(at(0), at(1), at(2), at(3));
    }
    add_group<kRowsHere, kAtOnce>(layout, tile, first, c, rest, sums, acc + v0 * 16);
  }
}

template <class Unpack, int kRowsHere>
void fused_pass_n(const TileRun& run, int64_t k_tile, const PassRows& x, float* acc) {
  // As many accumulators as hide VDPBF16PS's latency, as few as leave registers for unpacked weights.
  constexpr int kAtOnce = kRowsHere <= 3 ? 4 : kRowsHere <= 10 ? 2 : 1;
  const TileLayout& layout = *run.layout;
  const std::byte* tile = run.tiles + k_tile * layout.tile_bytes;
  const int groups = layout.groups_per_tile();
  const uint32_t* words = x.words + k_tile * x.tile_stride;
  for (int g = 0; g < layout.groups_used(k_tile); ++g, words += layout.tile_group / 2 * kRowsHere) {
    prefetch_scales(layout, tile, g);
    const float* sums = x.sums == nullptr ? nullptr : x.sums + (k_tile * groups + g) * kRowsHere;
    fused_group_bf16<Unpack, kRowsHere, kAtOnce>(layout, tile, g, words, sums, acc);
  }
}

}  // namespace
}  // namespace tilefuse
