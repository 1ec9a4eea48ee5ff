// Codes of one tile as the packed format holds them: for each run of 8 input channels and each output channel one word
// of 8 codes, lowest first. A word has 32 bits for 4-bit codes and 64 for 8-bit codes; a tile is Word[kKt / 8][kNt].
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "pack.h"
#include "tile_layout.h"

namespace tilefuse {

static_assert(std::endian::native == std::endian::little,
              "the packed format and every source format are little-endian");

template <int Bits>
using Word = std::conditional_t<Bits == 4, uint32_t, uint64_t>;

inline constexpr int kKBlocks = kKt / kBlock;
inline constexpr int kNBlocks = kNt / kBlock;

// Swaps the bits `mask << shift` of a with the bits `mask` of b.
template <typename T>
inline void swap_bits(T& a, T& b, int shift, T mask) {
  const T t = static_cast<T>(((a >> shift) ^ b) & mask);
  b ^= t;
  a ^= static_cast<T>(t << shift);
}

// An 8x8 transpose of digits (a digit is 1/8 of T), in each of the 8 lanes: digit j of rows[i][lane] changes place with
// digit i of rows[j][lane].
template <typename T>
inline void transpose_digits(T (&rows)[kBlock][kNBlocks]) {
  constexpr int kDigit = static_cast<int>(sizeof(T));  // bits
  constexpr T kAll = static_cast<T>(~T{0});
  constexpr T kHalf = kAll >> (4 * kDigit);                                    // 0x0000ffff for 32 bits
  constexpr T kQuarter = static_cast<T>(kAll / ((T{1} << (2 * kDigit)) + 1));  // 0x00ff00ff
  constexpr T kEighth = static_cast<T>(kAll / ((T{1} << kDigit) + 1));         // 0x0f0f0f0f
  for (int i = 0; i < 4; ++i) {
    for (int lane = 0; lane < kNBlocks; ++lane) swap_bits(rows[i][lane], rows[i + 4][lane], 4 * kDigit, kHalf);
  }
  for (int i : {0, 1, 4, 5}) {
    for (int lane = 0; lane < kNBlocks; ++lane) swap_bits(rows[i][lane], rows[i + 2][lane], 2 * kDigit, kQuarter);
  }
  for (int i : {0, 2, 4, 6}) {
    for (int lane = 0; lane < kNBlocks; ++lane) swap_bits(rows[i][lane], rows[i + 1][lane], kDigit, kEighth);
  }
}

// Eight codes of 4 bits, one a byte -> one a nibble; the high nibbles must be 0.
[[nodiscard]] inline uint32_t squeeze_nibbles(uint64_t bytes) {
  bytes = (bytes | (bytes >> 4)) & 0x00ff00ff00ff00ffu;
  bytes = (bytes | (bytes >> 8)) & 0x0000ffff0000ffffu;
  return static_cast<uint32_t>(bytes | (bytes >> 16));
}

// The inverse of squeeze_nibbles().
[[nodiscard]] inline uint64_t spread_nibbles(uint32_t nibbles) {
  uint64_t bytes = nibbles;
  bytes = (bytes | (bytes << 16)) & 0x0000ffff0000ffffu;
  bytes = (bytes | (bytes << 8)) & 0x00ff00ff00ff00ffu;
  return (bytes | (bytes << 4)) & 0x0f0f0f0f0f0f0f0fu;
}

// Reads the codes of the tile at input channel k0 and output channel n0, both real. Codes outside K x N are of no
// meaning. Returns whether every code fits `Bits` (only CodeOrder::kn can hold one that does not).
template <int Bits>
bool read_code_blocks(const TileLayout& layout, const PackSource& source, int64_t k0, int64_t n0, Word<Bits>* tile);

// Writes 8 rows of 64 codes, one a byte, from the words of one block row.
template <int Bits>
inline void write_code_rows(const uint8_t* words, uint8_t (&rows)[kBlock][kNt]) {
  uint64_t lanes[kBlock][kNBlocks];
  for (int lane = 0; lane < kNBlocks; ++lane) {
    for (int i = 0; i < kBlock; ++i) {
      Word<Bits> word;
      std::memcpy(&word, words + sizeof(word) * static_cast<size_t>(lane * kBlock + i), sizeof(word));
      if constexpr (Bits == 4) {
        lanes[i][lane] = spread_nibbles(word);
      } else {
        lanes[i][lane] = word;
      }
    }
  }
  transpose_digits(lanes);
  std::memcpy(rows, lanes, sizeof(lanes));
}

}  // namespace tilefuse
