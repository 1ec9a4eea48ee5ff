// One group of a k tile, decoded once for all passes over it, and the rule by which a group of activations is
// quantised.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bf16.h"
#include "tile_layout.h"

namespace tilefuse {
namespace {

struct alignas(64) Int8Group {
  float scale[kNt];
  // What sums start from: `start`, the same for all rows, plus `times_x` times the sum of x. AVX2 has no `start`; on
  // VNNI times_x is a signed 16-bit number in the low half, 0 in the high one.
  int32_t start[kNt];
  int32_t times_x[kNt];
  float rest[kNt];  // m + z s; only with minima
  int32_t zero;     // where one zero point serves the whole group
  int32_t uniform;  // whether it does
  int32_t shared;   // whether sums of all rows start from `start` alone
};

// How a group is quantised whose largest magnitude has these bits: q = x up inverse, each product rounded to float, to
// the nearest integer, ties to even. `up` keeps `inverse` finite where the group is all but zero.
struct Int8Rule {
  float up;
  float inverse;
  float scale;
};

TILEFUSE_ALWAYS_INLINE Int8Rule int8_rule(uint32_t largest_bits) {
  if (largest_bits >= kFloatExponent) return {1.0F, 0.0F, __builtin_bit_cast(float, 0x7FC00000U)};
  if (largest_bits == 0) return {1.0F, 0.0F, 0.0F};
  const auto largest = __builtin_bit_cast(float, largest_bits);
  const float up = largest < 0x1p-60F ? 0x1p64F : 1.0F;
  return {up, 127.0F / (largest * up), largest / 127.0F};
}

// Scale and zero point of one output channel in a group and, with minima, what the zero point leaves of them.
struct Int8Affine {
  float scale;
  int16_t zero;
  float rest;
};

TILEFUSE_ALWAYS_INLINE Int8Affine int8_affine(const TileLayout& layout, const std::byte* tile, int64_t at) {
  uint16_t bits;
  std::memcpy(&bits, tile + layout.scale_offset + at * 2, sizeof(bits));
  Int8Affine out = {.scale = bf16_to_float(bits), .zero = 0, .rest = 0.0F};
  if (layout.zero == ZeroKind::z8) {
    out.zero = static_cast<int16_t>(tile[layout.zero_offset + at]);
    return out;
  }
  std::memcpy(&bits, tile + layout.zero_offset + at * 2, sizeof(bits));
  const float m = bf16_to_float(bits);
  const auto limit = static_cast<float>((1 << layout.bits) - 1);
  const float exact = (0.0F - m) / out.scale;
  const float inside = exact < limit ? exact : limit;  // 0 / 0 becomes a bound
  const float clipped = inside > 0.0F ? inside : 0.0F;
  const auto z = static_cast<int32_t>(__builtin_bit_cast(uint32_t, clipped + 0x1.8p23F) - 0x4B400000U);
  out.zero = static_cast<int16_t>(z);
  out.rest = m + static_cast<float>(z) * out.scale;
  return out;
}

}  // namespace
}  // namespace tilefuse
