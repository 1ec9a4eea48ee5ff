// Where things are in a packed tile of weights (docs/packed-format.md). `src/tilefuse/layout.py` is the definition; the
// host build exports these numbers and a test compares the two.
#pragma once

#include <stdint.h>

namespace tilefuse {

inline constexpr unsigned kKt = 128;   // input channels in a tile
inline constexpr unsigned kNt = 64;    // output channels in a tile
inline constexpr unsigned kBlock = 8;  // rows and columns of a code block
inline constexpr unsigned kKBlocks = kKt / kBlock;
inline constexpr unsigned kNBlocks = kNt / kBlock;

// A tile of `Bits`-bit codes with `Group` input channels to a scale; beside the scales, uint8 zero points or, with
// `Minima`, bfloat16 minima. Offsets and sizes are bytes.
template <unsigned Bits, unsigned Group, bool Minima = false>
struct PackedTile {
  static_assert(Bits == 4 || Bits == 8, "codes have 4 or 8 bits");
  static_assert(Group == 32 || Group == 64 || Group == 128, "a tile's group is 32, 64 or 128");

  static constexpr unsigned groups = kKt / Group;
  static constexpr unsigned k_blocks_per_group = Group / kBlock;
  static constexpr unsigned block_bytes = kBlock * kBlock * Bits / 8;  // 8 output x 8 input channels, k fastest
  static constexpr unsigned code_bytes = kKt * kNt * Bits / 8;
  static constexpr unsigned scale_offset = code_bytes;  // bfloat16 [groups][kNt]
  static constexpr unsigned zero_offset = scale_offset + 2 * groups * kNt;
  static constexpr unsigned zero_bytes = Minima ? 2 : 1;  // of one zero point; [groups][kNt]
  static constexpr unsigned tile_bytes = (zero_offset + zero_bytes * groups * kNt + 63) / 64 * 64;

  static constexpr unsigned block_offset(unsigned k_block, unsigned n_block) {
    return (k_block * kNBlocks + n_block) * block_bytes;
  }
};

// The same place for unquantised weights: bfloat16, in the same block order, and nothing else.
struct UnquantizedTile {
  static constexpr unsigned block_bytes = kBlock * kBlock * 2;
  static constexpr unsigned tile_bytes = kKt * kNt * 2;
  static constexpr unsigned block_offset(unsigned k_block, unsigned n_block) {
    return (k_block * kNBlocks + n_block) * block_bytes;
  }
};

}  // namespace tilefuse
