// Conversions among float16, bfloat16 and float32, on bit patterns: no instruction set, no floating-point mode (flush
// to zero, say) changes them.
//
// Always inlined, for the reason in always_inline.h.
#pragma once

#include <cstdint>

#include "always_inline.h"

namespace tilefuse {

inline constexpr uint32_t kFloatExponent = 0x7f800000u;  // all ones: Inf or NaN

[[nodiscard]] TILEFUSE_ALWAYS_INLINE float bf16_to_float(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

// Round to nearest, ties to even. NaN is not handled: a NaN whose low bits alone are set becomes Inf.
[[nodiscard]] TILEFUSE_ALWAYS_INLINE uint16_t float_bits_to_bf16(uint32_t bits) {
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Round to nearest, ties to even; NaN stays NaN.
[[nodiscard]] TILEFUSE_ALWAYS_INLINE uint16_t float_to_bf16(float value) {
  const auto bits = __builtin_bit_cast(uint32_t, value);
  const auto quiet = static_cast<uint16_t>((bits >> 16) | 0x40u);
  return (bits & 0x7fffffffu) > kFloatExponent ? quiet : float_bits_to_bf16(bits);
}

// float -> nearest bfloat16, as a float.
[[nodiscard]] TILEFUSE_ALWAYS_INLINE float round_to_bf16(float value) { return bf16_to_float(float_to_bf16(value)); }

// Exact, and without a branch, so that loops over it vectorise. Inf and NaN keep an exponent of all ones.
[[nodiscard]] TILEFUSE_ALWAYS_INLINE uint32_t half_to_float_bits(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t moved = (magnitude << 13) + ((127u - 15u) << 23);
  // A denormal, m 2^-24, becomes 2^-14 + m 2^-24 with the smallest normal exponent; the subtraction is exact.
  const uint32_t smallest = (127u - 14u) << 23;
  const uint32_t denormal =
      __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, moved + (1u << 23)) - __builtin_bit_cast(float, smallest));
  const uint32_t special = moved + ((127u - 15u) << 23);
  const uint32_t bits = magnitude >= 0x7c00u ? special : magnitude < 0x0400u ? denormal : moved;
  return bits | static_cast<uint32_t>(half & 0x8000u) << 16;
}

[[nodiscard]] TILEFUSE_ALWAYS_INLINE float half_to_float(uint16_t half) {
  return __builtin_bit_cast(float, half_to_float_bits(half));
}

// Round to nearest, ties to even; NaN stays NaN.
[[nodiscard]] TILEFUSE_ALWAYS_INLINE uint16_t float_to_half(float value) {
  const auto bits = __builtin_bit_cast(uint32_t, value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > kFloatExponent) return static_cast<uint16_t>(sign | 0x7e00u);  // NaN
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);    // 65520 and above round to Inf
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 puts the unit of float16's denormals, 2^-24, in float's last place, so the addition
    // rounds.
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (__builtin_bit_cast(uint32_t, shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace tilefuse
