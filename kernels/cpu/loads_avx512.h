// Loads that the AVX-512 kernels share.
#pragma once

#include <immintrin.h>

#include <cstddef>

namespace tilefuse {
namespace {

inline void prefetch(const std::byte* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// 16 bfloat16 values as floats.
inline __m512 load_bf16(const std::byte* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

}  // namespace
}  // namespace tilefuse
