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

// The codes of 8 input by 64 output channels, in 16-byte vectors that every CPU has. Two views of it, each Word[8][8]:
// by rows, [input channel][n block], a word holding the codes of 8 consecutive output channels, lowest first; and
// packed, [n block][output channel], a word holding those of 8 consecutive input channels.
template <int Bits>
struct CodeGrid {
  using T = Word<Bits>;
  using Vector __attribute__((vector_size(16))) = T;
  static constexpr int kLanes = 16 / sizeof(T);
  static constexpr int kPerRow = kNBlocks / kLanes;
  static constexpr size_t kRowBytes = kNBlocks * sizeof(T);

  Vector v[kBlock * kPerRow];

  [[nodiscard]] uint8_t* row(int i) { return reinterpret_cast<uint8_t*>(v) + static_cast<size_t>(i) * kRowBytes; }

  // By rows -> packed, and back: transposes the codes within each n block, then the blocks' words. In an AutoAWQ word
  // nibble i holds output channel (0, 2, 4, 6, 1, 3, 5, 7)[i]; once the codes are transposed, that is an order of rows.
  void rows_to_packed(bool awq = false) {
    transpose_codes();
    if (awq) {
      CodeGrid from = *this;
      constexpr int kNibble[kBlock] = {0, 4, 1, 5, 2, 6, 3, 7};
      for (int j = 0; j < kBlock; ++j) std::memcpy(row(j), from.row(kNibble[j]), kRowBytes);
    }
    transpose_words();
  }
  void packed_to_rows() {
    transpose_words();
    transpose_codes();
  }

 private:
  // Code j of word [i][lane] changes place with code i of word [j][lane].
  void transpose_codes() {
    constexpr T kAll = static_cast<T>(~T{0});
    constexpr T kHalf = kAll >> (4 * Bits);                                    // 0x0000ffff for 4 bits
    constexpr T kQuarter = static_cast<T>(kAll / ((T{1} << (2 * Bits)) + 1));  // 0x00ff00ff
    constexpr T kEighth = static_cast<T>(kAll / ((T{1} << Bits) + 1));         // 0x0f0f0f0f
    for (int i = 0; i < 4; ++i) swap_rows<4 * Bits>(i, i + 4, kHalf);
    for (int i : {0, 1, 4, 5}) swap_rows<2 * Bits>(i, i + 2, kQuarter);
    for (int i : {0, 2, 4, 6}) swap_rows<Bits>(i, i + 1, kEighth);
  }

  // Swaps the bits `mask << Shift` of row a with the bits `mask` of row b.
  template <int Shift>
  void swap_rows(int a, int b, T mask) {
    for (int i = 0; i < kPerRow; ++i) {
      Vector& x = v[a * kPerRow + i];
      Vector& y = v[b * kPerRow + i];
      const Vector t = ((x >> Shift) ^ y) & mask;
      y ^= t;
      x ^= t << Shift;
    }
  }

  // Word [i][j] changes place with word [j][i]. Interleaving the halves of the 64 words rotates the 6 bits of every
  // index by one; three times swap i and j.
  void transpose_words() {
    constexpr int kHalf = kBlock * kPerRow / 2;
    for (int round = 0; round < 3; ++round) {
      Vector from[2 * kHalf];
      std::memcpy(from, v, sizeof(v));
      for (int i = 0; i < kHalf; ++i) {
        if constexpr (Bits == 4) {
          v[2 * i] = __builtin_shufflevector(from[i], from[i + kHalf], 0, 4, 1, 5);
          v[2 * i + 1] = __builtin_shufflevector(from[i], from[i + kHalf], 2, 6, 3, 7);
        } else {
          v[2 * i] = __builtin_shufflevector(from[i], from[i + kHalf], 0, 2);
          v[2 * i + 1] = __builtin_shufflevector(from[i], from[i + kHalf], 1, 3);
        }
      }
    }
  }
};

// Tiles of a layer, all partly real at least: n_tiles side by side, in k_tiles rows, the first at input channel k0 and
// output channel n0.
struct Patch {
  int64_t k0;
  int64_t n0;
  int k_tiles;
  int n_tiles;
};

// The shape of patches that the source's order is read fastest in.
struct PatchShape {
  int64_t k_tiles;
  int64_t n_tiles;
};

inline constexpr int kMostPatchTiles = 256;

[[nodiscard]] PatchShape best_patch(const PackSource& source);

// Reads the codes of a patch to tiles[row * n_tiles + column]. Codes outside K x N are of no meaning. Returns whether
// every code fits `Bits` (only CodeOrder::kn can hold one that does not).
template <int Bits>
bool read_code_patch(const TileLayout& layout, const PackSource& source, const Patch& patch, Word<Bits>* const* tiles);

// Writes 8 rows of 64 codes, one a byte, from the words of one block row.
template <int Bits>
inline void write_code_rows(const uint8_t* words, uint8_t (&rows)[kBlock][kNt]) {
  CodeGrid<Bits> grid;
  std::memcpy(grid.v, words, sizeof(grid.v));
  grid.packed_to_rows();
  for (int i = 0; i < kBlock; ++i) {
    const uint8_t* row = grid.row(i);
    if constexpr (Bits == 4) {
      for (int n = 0; n < kNt / 2; ++n) {
        rows[i][2 * n] = row[n] & 15;
        rows[i][2 * n + 1] = row[n] >> 4;
      }
    } else {
      std::memcpy(rows[i], row, kNt);
    }
  }
}

}  // namespace tilefuse
