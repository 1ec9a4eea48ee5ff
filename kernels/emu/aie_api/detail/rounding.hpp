// Rounding in each of the core's modes.
//
// Model: `floor` goes to negative infinity for both signs, in bfloat16 as in bfp16 (where mantissas are two's
// complement). The hardware documentation calls the mode truncation and does not say which way a negative bfloat16
// goes.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>

#include "count.hpp"
#include "types.hpp"

namespace aie::detail {

// Calls f with the mode as a compile-time constant, so that loops inside vectorise.
template <typename F>
inline void with_rounding_mode(F&& f) {
  using enum rounding_mode;
  switch (count::core.rounding) {
#define TF_EMU_CASE(mode) \
  case mode:              \
    return f(std::integral_constant<rounding_mode, mode>{})
    TF_EMU_CASE(floor);
    TF_EMU_CASE(ceil);
    TF_EMU_CASE(symmetric_floor);
    TF_EMU_CASE(symmetric_ceil);
    TF_EMU_CASE(negative_inf);
    TF_EMU_CASE(positive_inf);
    TF_EMU_CASE(symmetric_zero);
    TF_EMU_CASE(symmetric_inf);
    TF_EMU_CASE(conv_even);
    TF_EMU_CASE(conv_odd);
#undef TF_EMU_CASE
  }
}

// |x| < 2^51 -> integer. The remainder decides: it is exact, because x and its nearest integer share a unit.
template <rounding_mode Mode>
[[gnu::always_inline]] inline double round_to_integer(double x) {
  using enum rounding_mode;
  constexpr double shifter = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to nearest even at the unit
  const double nearest = (x + shifter) - shifter;
  const double rest = x - nearest;  // in [-1/2, 1/2]
  const double up = nearest + 1;
  const double down = nearest - 1;
  const double lower = rest < 0 ? down : nearest;
  const double upper = rest > 0 ? up : nearest;
  if constexpr (Mode == conv_even) return nearest;
  if constexpr (Mode == floor) return lower;
  if constexpr (Mode == ceil) return upper;
  if constexpr (Mode == symmetric_floor) return x < 0 ? upper : lower;
  if constexpr (Mode == symmetric_ceil) return x < 0 ? lower : upper;
  // Nearest: from even, a half-way case may have to move to the other neighbour.
  const double half_up = rest == 0.5 ? up : nearest;
  const double half_down = rest == -0.5 ? down : nearest;
  if constexpr (Mode == positive_inf) return half_up;
  if constexpr (Mode == negative_inf) return half_down;
  if constexpr (Mode == symmetric_inf) return x < 0 ? half_down : half_up;
  if constexpr (Mode == symmetric_zero) return x < 0 ? half_up : half_down;
  if constexpr (Mode == conv_odd) return rest == 0.5 ? up : half_down;
}

// fp32 bits -> bfloat16 bits. NaN stays NaN; a magnitude rounded up past the largest finite one is Inf.
template <rounding_mode Mode>
[[gnu::always_inline]] inline uint16_t round_to_bf16(uint32_t bits) {
  using enum rounding_mode;
  const uint32_t negative = bits >> 31;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t odd = (bits >> 16) & 1u;
  // Added to the magnitude before its lower half is cut off: ffff takes any remainder up, 8000 a half-way case, 7fff
  // not.
  uint32_t addend = 0;
  if constexpr (Mode == conv_even) addend = 0x7fffu + odd;
  if constexpr (Mode == conv_odd) addend = 0x8000u - odd;
  if constexpr (Mode == floor) addend = negative * 0xffffu;
  if constexpr (Mode == ceil) addend = (1u - negative) * 0xffffu;
  if constexpr (Mode == symmetric_floor) addend = 0;
  if constexpr (Mode == symmetric_ceil) addend = 0xffffu;
  if constexpr (Mode == positive_inf) addend = 0x8000u - negative;
  if constexpr (Mode == negative_inf) addend = 0x7fffu + negative;
  if constexpr (Mode == symmetric_inf) addend = 0x8000u;
  if constexpr (Mode == symmetric_zero) addend = 0x7fffu;
  const auto rounded = static_cast<uint16_t>(((magnitude + addend) >> 16) | (negative << 15));
  const auto quiet = static_cast<uint16_t>((bits >> 16) | 0x40u);
  return magnitude > 0x7f800000u ? quiet : rounded;
}

// Narrows n values in the core's mode. Out of line, like all that depends on the mode: ten loops in one.
[[gnu::noinline]] inline void narrow_to_bf16(const float* x, bfloat16* y, unsigned n) {
  with_rounding_mode([=](auto mode) {
    for (unsigned i = 0; i < n; ++i) y[i].bits = round_to_bf16<decltype(mode)::value>(std::bit_cast<uint32_t>(x[i]));
  });
}

}  // namespace aie::detail
