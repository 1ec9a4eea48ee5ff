// The packed tile format on the C++ side. `src/tilefuse/layout.py` is its only definition: the numbers that depend on a
// layer arrive from there, and the constants below are checked against it by tests/test_layout.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace tilefuse {

inline constexpr int kKt = 128;   // input channels in a tile
inline constexpr int kNt = 64;    // output channels in a tile
inline constexpr int kBlock = 8;  // rows and columns of a code block
inline constexpr int kRows = 4;   // compute rows that share the reduction of a GEMV
inline constexpr size_t kAlignment = 64;

enum class ZeroKind : int { z8 = 0, m16 = 1 };

// Sizes of one packed layer, computed by layout.py.
struct TileLayout {
  int64_t k = 0;         // real input channels
  int64_t n = 0;         // real output channels
  int bits = 4;          // 4 or 8
  int tile_group = kKt;  // input channels that share a scale in a tile: 32, 64 or 128
  ZeroKind zero = ZeroKind::z8;
  int columns = 8;
  int64_t k_tiles = 0;  // stored, padding included
  int64_t tiles_per_column = 0;
  int64_t tile_bytes = 0;
  int64_t scale_offset = 0;  // within a tile
  int64_t zero_offset = 0;   // within a tile

  [[nodiscard]] int64_t k_tiles_used() const { return (k + kKt - 1) / kKt; }
  [[nodiscard]] int64_t n_tiles_used() const { return (n + kNt - 1) / kNt; }
  [[nodiscard]] int64_t n_tiles() const { return tiles_per_column * columns; }
  [[nodiscard]] int groups_per_tile() const { return kKt / tile_group; }
  // Of those of a k tile, the ones that begin before K: the others are padding.
  [[nodiscard]] int groups_used(int64_t k_tile) const {
    return static_cast<int>(std::min<int64_t>(groups_per_tile(), (k - k_tile * kKt + tile_group - 1) / tile_group));
  }
  [[nodiscard]] int64_t nbytes() const { return n_tiles() * k_tiles * tile_bytes; }

  // Byte offset of the tile: order [column][output tile div columns][k tile].
  [[nodiscard]] int64_t tile_offset(int64_t n_tile, int64_t k_tile) const {
    const int64_t column = n_tile % columns;
    const int64_t slot = n_tile / columns;
    return ((column * tiles_per_column + slot) * k_tiles + k_tile) * tile_bytes;
  }
};

}  // namespace tilefuse
