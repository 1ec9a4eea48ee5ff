// Results of one output tile, from float sums to y's dtype.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "matmul.h"

namespace tilefuse {
namespace {

// bfloat16 in the low half of each lane, to nearest even; a NaN stays one. (VCVTNEPS2BF16 would flush denormals.)
inline __m256i narrow_to_bf16(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __m512i out = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(out, 16));
}

// Row `row` of output tile `n_tile`: acc[0..63] plus bias, rounded once.
void store_row_avx512(const MatmulArgs& args, int64_t row, int64_t n_tile, const float* acc) {
  const int64_t n0 = n_tile * kNt;
  for (int64_t i = 0; i < std::min<int64_t>(kNt, args.layout.n - n0); i += 16) {
    const auto lanes = static_cast<__mmask16>((1U << std::min<int64_t>(16, args.layout.n - n0 - i)) - 1);
    __m512 sums = _mm512_loadu_ps(acc + i);
    if (args.bias != nullptr) sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(lanes, args.bias + n0 + i));
    const int64_t at = row * args.y_stride + n0 + i;
    switch (args.y_dtype) {
      case Dtype::f32:
        _mm512_mask_storeu_ps(static_cast<float*>(args.y) + at, lanes, sums);
        break;
      case Dtype::bf16:
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(args.y) + at, lanes, narrow_to_bf16(sums));
        break;
      case Dtype::f16:
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(args.y) + at, lanes,
                                 _mm512_cvtps_ph(sums, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        break;
    }
  }
}

}  // namespace
}  // namespace tilefuse
