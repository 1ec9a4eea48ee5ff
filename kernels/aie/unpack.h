// From a packed tile's codes to 8-bit lanes that the multiplier takes.
//
// A block's bytes are 8 output channels x 8 input channels, the transposed operand of the 8x8x8 multiplication. As
// mantissas of bfp16 numbers with exponent 133 they are the integers themselves (mantissa * 2^(133 - 127) / 64).
#pragma once

#include <aie_api/aie.hpp>
#include <array>

#include "loops.h"
#include "packed_tile.h"

namespace tilefuse::gemm {

using Bytes = aie::vector<uint8, 64>;
using Codes = aie::vector<int8, 64>;  // one block
using CodePair = std::array<Codes, 2>;

TF_INLINE v8int8 exponents(int8 value) { return v8int8{value, value, value, value, value, value, value, value}; }

// Integers -128 to 127 as an operand of the multiplier.
TF_INLINE v64bfp16ebs8 as_operand(const Codes& codes) {
  return v64bfp16ebs8{codes.to_native(), exponents(static_cast<int8>(133))};
}

// What load_pair takes off every code, so that 8-bit codes fit a signed byte.
template <unsigned Bits>
inline constexpr int kCodeOffset = Bits == 8 ? 128 : 0;

// Codes, less kCodeOffset, of two blocks that follow one another; `midpoint` is midpoint<Bits>(), kept in a register.
template <unsigned Bits>
TF_INLINE CodePair load_pair(const uint8_t* w, const Codes& midpoint) {
  if constexpr (Bits == 4) {
    const aie::vector<uint8, 128> both = aie::load_v<64>(w).template cast_to<uint4>().unpack();
    return {both.template extract<64>(0).template cast_to<int8>(),
            both.template extract<64>(1).template cast_to<int8>()};
  } else {
    // Modulo 256, minus 128 is plus -128.
    return {aie::add(aie::load_v<64>(w).template cast_to<int8>(), midpoint),
            aie::add(aie::load_v<64>(w + 64).template cast_to<int8>(), midpoint)};
  }
}

template <unsigned Bits>
TF_INLINE Codes midpoint() {
  if constexpr (Bits == 8) return aie::broadcast<int8, 64>(int8(-128));
  return Codes();
}

// A byte for each of 64 output channels -> for each block of 8 of them, every byte 8 times in a row: what belongs to a
// channel, beside its 8 codes.
TF_INLINE std::array<Bytes, 8> repeat_8(const Bytes& channels) {
  const auto [a, b] = aie::interleave_zip(channels, channels, 1);
  const auto [a0, a1] = aie::interleave_zip(a, a, 2);
  const auto [b0, b1] = aie::interleave_zip(b, b, 2);
  const auto [v0, v1] = aie::interleave_zip(a0, a0, 4);
  const auto [v2, v3] = aie::interleave_zip(a1, a1, 4);
  const auto [v4, v5] = aie::interleave_zip(b0, b0, 4);
  const auto [v6, v7] = aie::interleave_zip(b1, b1, 4);
  return {v0, v1, v2, v3, v4, v5, v6, v7};
}

// The same for 16 output channels.
TF_INLINE CodePair repeat_8(const aie::vector<uint8, 16>& channels) {
  const auto [a, b] = aie::interleave_zip(channels, channels, 1);
  const auto twice = aie::concat(a, b);
  const auto [c, d] = aie::interleave_zip(twice, twice, 2);
  const auto four_times = aie::concat(c, d);
  const auto [v0, v1] = aie::interleave_zip(four_times, four_times, 4);
  return {v0.template cast_to<int8>(), v1.template cast_to<int8>()};
}

}  // namespace tilefuse::gemm
