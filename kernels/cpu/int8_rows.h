// Quantises activations (Int8Rows) on any CPU.
#pragma once

#include <algorithm>
#include <cstring>

#include "bf16.h"
#include "int8_group.h"
#include "int8_kernels.h"
#include "tile_of_row.h"

namespace tilefuse {
namespace {

// Place of input channel i of a block among the bytes of its two words.
TILEFUSE_ALWAYS_INLINE int int8_place(int bits, int i) { return bits == 4 ? i % 2 * 4 + i / 2 : i; }

inline void quantise_int8(const MatmulArgs& args, int64_t row0, int64_t first, int64_t count, bool offset,
                          const Int8Rows& x) {
  const int group = args.layout.tile_group;
  const int groups = args.layout.groups_per_tile();
  alignas(64) std::byte piece[kKt * 4];
  for (int64_t t = first; t < first + count; ++t) {
    for (int r = 0; r < x.rows; ++r) {
      const std::byte* from = tile_of_row(args, row0 + r, t * kKt, piece);
      uint32_t bits[kKt];
      if (args.x_dtype == Dtype::f32) {
        std::memcpy(bits, from, sizeof(bits));
      } else {
        uint16_t halves[kKt];
        std::memcpy(halves, from, sizeof(halves));
        if (args.x_dtype == Dtype::bf16) {
          for (int i = 0; i < kKt; ++i) bits[i] = static_cast<uint32_t>(halves[i]) << 16;
        } else {
          for (int i = 0; i < kKt; ++i) bits[i] = half_to_float_bits(halves[i]);
        }
      }
      for (int g = 0; g < groups; ++g) {
        uint32_t largest = 0;
        for (int i = 0; i < group; ++i) largest = std::max(largest, bits[g * group + i] & 0x7FFFFFFFU);
        const Int8Rule rule = int8_rule(largest);
        int8_t q[kKt];
        int32_t sum = 0;
        for (int i = 0; i < group; ++i) {
          const float scaled = __builtin_bit_cast(float, bits[g * group + i]) * rule.up * rule.inverse;
          // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the significand.
          const auto value = static_cast<int8_t>(__builtin_bit_cast(uint32_t, scaled + 0x1.8p23F));
          q[i / kBlock * kBlock + int8_place(args.layout.bits, i % kBlock)] = value;
          sum += value;
        }
        const int64_t at = (t * groups + g) * x.rows + r;
        x.scales[at] = rule.scale;
        x.sums[at] = sum;
        for (int i = 0; i < group / 4; ++i) {
          uint32_t word;
          std::memcpy(&word, q + i * 4, sizeof(word));
          if (offset) word ^= 0x80808080U;
          x.words[t * x.tile_stride + (g * (group / 4) + i) * x.rows + r] = word;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tilefuse
