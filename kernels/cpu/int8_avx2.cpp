// compute="int8" on AVX2. VPMADDUBSW adds two products of unsigned by signed bytes and saturates at 16 bits: codes go
// in as nibbles, at most 15, so that eight such sums (8 * 2 * 15 * 127 = 30480) still fit. Compiled without
// contraction.
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "int8_rows.h"
#include "matmul_driver.h"

namespace tilefuse {
namespace {

constexpr int kInt8Vectors = kNt / 8;  // vectors of 32-bit lanes that hold the 64 output channels
constexpr int kAvx2Rows = 4;

bool no_offset(const TileLayout&, int64_t) { return false; }

void prepare(const TileRun& run, int64_t k_tile, bool, std::byte* prepared) {
  const TileLayout& layout = *run.layout;
  const std::byte* tile = run.tiles + k_tile * layout.tile_bytes;
  auto* group = reinterpret_cast<Int8Group*>(prepared);
  for (int g = 0; g < layout.groups_per_tile(); ++g, ++group) {
    for (int n = 0; n < kNt; ++n) {
      const Int8Affine affine = int8_affine(layout, tile, static_cast<int64_t>(g) * kNt + n);
      group->scale[n] = affine.scale;
      group->times_x[n] = -affine.zero;
      group->rest[n] = affine.rest;
    }
  }
}

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Sums of 16 bits, two a lane, added in 32.
inline __m256i widen(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }

// sums[r]: the group's sums of code times x for 8 output channels, from 32-bit lanes of 8 nibbles.
template <int kRowsHere>
inline void dots_w4(const std::byte* codes, int blocks, const uint32_t* x, __m256i (&sums)[kRowsHere]) {
  const __m256i mask = _mm256_set1_epi8(15);
  for (int kb = 0; kb < blocks; kb += 4) {
    __m256i words[kRowsHere];
    for (auto& word : words) word = _mm256_setzero_si256();
    for (int i = kb; i < kb + 4; ++i) {
      const __m256i w = load(codes + i * (kNt * 4));
      const __m256i low = _mm256_and_si256(w, mask);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(w, 4), mask);
      const uint32_t* from = x + i * (2 * kRowsHere);
      for (int r = 0; r < kRowsHere; ++r) {
        const __m256i even = _mm256_maddubs_epi16(low, _mm256_set1_epi32(static_cast<int>(from[r])));
        const __m256i odd = _mm256_maddubs_epi16(high, _mm256_set1_epi32(static_cast<int>(from[kRowsHere + r])));
        words[r] = _mm256_add_epi16(words[r], _mm256_add_epi16(even, odd));
      }
    }
    for (int r = 0; r < kRowsHere; ++r) sums[r] = _mm256_add_epi32(sums[r], widen(words[r]));
  }
}

// From 64-bit lanes of 8 codes: two vectors of them.
template <int kRowsHere>
inline void dots_w8(const std::byte* codes, int blocks, const uint32_t* x, __m256i (&sums)[kRowsHere]) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i halves[2][kRowsHere];
  for (int h = 0; h < 2; ++h) {
    for (__m256i& half : halves[h]) half = _mm256_setzero_si256();
    for (int kb = 0; kb < blocks; kb += 4) {
      __m256i lows[kRowsHere];
      __m256i highs[kRowsHere];
      for (int r = 0; r < kRowsHere; ++r) lows[r] = highs[r] = _mm256_setzero_si256();
      for (int i = kb; i < kb + 4; ++i) {
        const __m256i w = load(codes + i * (kNt * 8) + h * 32);
        const __m256i low = _mm256_and_si256(w, mask);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(w, 4), mask);
        const uint32_t* from = x + i * (2 * kRowsHere);
        for (int r = 0; r < kRowsHere; ++r) {
          const uint64_t both = from[r] | static_cast<uint64_t>(from[kRowsHere + r]) << 32;
          const __m256i a = _mm256_set1_epi64x(static_cast<int64_t>(both));
          lows[r] = _mm256_add_epi16(lows[r], _mm256_maddubs_epi16(low, a));
          highs[r] = _mm256_add_epi16(highs[r], _mm256_maddubs_epi16(high, a));
        }
      }
      for (int r = 0; r < kRowsHere; ++r) {
        const __m256i sum = _mm256_add_epi32(widen(lows[r]), _mm256_slli_epi32(widen(highs[r]), 4));
        halves[h][r] = _mm256_add_epi32(halves[h][r], sum);
      }
    }
  }
  for (int r = 0; r < kRowsHere; ++r) {
    const __m256i pairs = _mm256_hadd_epi32(halves[0][r], halves[1][r]);
    sums[r] = _mm256_add_epi32(sums[r], _mm256_permute4x64_epi64(pairs, 0xD8));
  }
}

template <int kRowsHere>
void tile_avx2(const TileRun& run, int64_t k_tile, const std::byte* prepared, const Int8Rows& x, float* acc) {
  const TileLayout& layout = *run.layout;
  const std::byte* tile = run.tiles + k_tile * layout.tile_bytes;
  const auto* group = reinterpret_cast<const Int8Group*>(prepared);
  const int blocks = layout.tile_group / kBlock;
  const int groups = layout.groups_per_tile();
  for (int g = 0; g < groups; ++g, ++group) {
    const uint32_t* words = x.words + k_tile * x.tile_stride + g * (layout.tile_group / 4) * kRowsHere;
    const float* x_scales = x.scales + (k_tile * groups + g) * kRowsHere;
    const int32_t* x_sums = x.sums + (k_tile * groups + g) * kRowsHere;
    const std::byte* codes = tile + int64_t{g} * blocks * kNt * layout.bits;
    for (int v = 0; v < kInt8Vectors; ++v) {
      __m256i sums[kRowsHere];
      for (int r = 0; r < kRowsHere; ++r) {
        sums[r] = _mm256_mullo_epi32(load(group->times_x + v * 8), _mm256_set1_epi32(x_sums[r]));
      }
      if (layout.bits == 4) {
        dots_w4<kRowsHere>(codes + v * 32, blocks, words, sums);
      } else {
        dots_w8<kRowsHere>(codes + v * 64, blocks, words, sums);
      }
      const __m256 scale = _mm256_load_ps(group->scale + v * 8);
      for (int r = 0; r < kRowsHere; ++r) {
        float* to = acc + r * kNt + v * 8;
        const __m256 x_scale = _mm256_set1_ps(x_scales[r]);
        __m256 sum = _mm256_loadu_ps(to);
        if (layout.zero == ZeroKind::m16) {
          const __m256 x_sum = _mm256_mul_ps(x_scale, _mm256_set1_ps(static_cast<float>(x_sums[r])));
          sum = _mm256_fmadd_ps(_mm256_load_ps(group->rest + v * 8), x_sum, sum);
        }
        _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r]), _mm256_mul_ps(scale, x_scale), sum));
      }
    }
  }
}

void pass(const TileRun& run, int64_t k_tile, bool, const std::byte* prepared, const Int8Rows& x, float* acc) {
  static_assert(kAvx2Rows == 4);
  switch (x.rows) {
    case 1:
      return tile_avx2<1>(run, k_tile, prepared, x, acc);
    case 2:
      return tile_avx2<2>(run, k_tile, prepared, x, acc);
    case 3:
      return tile_avx2<3>(run, k_tile, prepared, x, acc);
    default:
      return tile_avx2<4>(run, k_tile, prepared, x, acc);
  }
}

}  // namespace

const Int8Kernels& int8_kernels_avx2() {
  static constexpr Int8Kernels kernels = {
      .max_rows = kAvx2Rows,
      .offset = no_offset,
      .quantise = quantise_int8,
      .prepare = prepare,
      .pass = pass,
      .store_row = store_row,
  };
  return kernels;
}

}  // namespace tilefuse
