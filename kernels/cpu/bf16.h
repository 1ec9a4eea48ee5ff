// Conversions among float16, bfloat16 and float32, on bit patterns: no instruction set, no floating-point mode (flush
// to zero, say) changes them.
#pragma once

#include <bit>
#include <cstdint>

namespace tilefuse {

inline constexpr uint32_t kFloatExponent = 0x7f800000u;  // all ones: Inf or NaN

[[nodiscard]] inline float bf16_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Round to nearest, ties to even. NaN is not handled: a NaN whose low bits alone are set becomes Inf.
[[nodiscard]] inline uint16_t float_bits_to_bf16(uint32_t bits) {
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

[[nodiscard]] inline uint16_t float_to_bf16(float value) { return float_bits_to_bf16(std::bit_cast<uint32_t>(value)); }

// Exact. Inf and NaN keep an exponent of all ones.
[[nodiscard]] inline uint32_t half_to_float_bits(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return sign | kFloatExponent | ((magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return sign | ((magnitude << 13) + ((127u - 15u) << 23));
  if (magnitude == 0) return sign;
  // Denormal, magnitude * 2^-24: its leading one becomes the implicit bit.
  const auto top = static_cast<uint32_t>(std::bit_width(magnitude)) - 1u;
  return sign | ((top + 127u - 24u) << 23) | ((magnitude << (23u - top)) & 0x7fffffu);
}

}  // namespace tilefuse
