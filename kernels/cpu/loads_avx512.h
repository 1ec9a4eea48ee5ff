// Loads that the AVX-512 kernels share.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace tilefuse {
namespace {

// How far ahead codes of 8 bits are asked for that are used once or twice: hardware prefetchers are slower. Only into
// the L2 cache: measured on Zen 4, the L1 cache at any distance costs a third of the speed; 8 KiB cost up to a half.
constexpr int64_t kCodesAhead = 2048;

// 16 bfloat16 values as floats.
inline __m512 load_bf16(const std::byte* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

}  // namespace
}  // namespace tilefuse
