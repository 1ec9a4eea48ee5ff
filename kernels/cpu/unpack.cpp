#include <algorithm>
#include <cstring>

#include "bf16.h"
#include "code_blocks.h"
#include "pack.h"
#include "thread_pool.h"

namespace tilefuse {
namespace {

// Calls fn(tile, k0, n0, real_n) for each tile that holds a real code.
template <typename Fn>
void for_each_tile(const TileLayout& layout, const uint8_t* packed, Fn&& fn) {
  const int64_t k_tiles = layout.k_tiles_used();
  ThreadPool::instance().parallel_for(layout.n_tiles_used() * k_tiles, [&](int64_t item, int) {
    const int64_t n_tile = item / k_tiles;
    const int64_t k_tile = item % k_tiles;
    const int64_t n0 = n_tile * kNt;
    fn(packed + layout.tile_offset(n_tile, k_tile), k_tile * kKt, n0,
       static_cast<int>(std::min<int64_t>(kNt, layout.n - n0)));
  });
}

// Calls fn(k, codes) with the 64 codes of each real row of a tile; k is relative to the tile.
template <int Bits, typename Fn>
void for_each_code_row(const TileLayout& layout, const uint8_t* tile, int64_t k0, Fn&& fn) {
  const int real_k = static_cast<int>(std::min<int64_t>(kKt, layout.k - k0));
  for (int k = 0; k < real_k; k += kBlock) {
    uint8_t rows[kBlock][kNt];
    write_code_rows<Bits>(tile + k * kNt * Bits / 8, rows);
    for (int i = 0; i < std::min(kBlock, real_k - k); ++i) fn(k + i, rows[i]);
  }
}

template <int Bits>
void unpack_codes(const TileLayout& layout, const uint8_t* packed, const int32_t* perm, uint8_t* codes) {
  for_each_tile(layout, packed, [&](const uint8_t* tile, int64_t k0, int64_t n0, int real_n) {
    for_each_code_row<Bits>(layout, tile, k0, [&](int k, const uint8_t* row) {
      const int64_t target = perm != nullptr ? perm[k0 + k] : k0 + k;
      std::memcpy(codes + target * layout.n + n0, row, static_cast<size_t>(real_n));
    });
  });
}

template <int Bits>
void dequantize_codes(const TileLayout& layout, const uint8_t* packed, const int32_t* perm, uint16_t* out) {
  for_each_tile(layout, packed, [&](const uint8_t* tile, int64_t k0, int64_t n0, int real_n) {
    float scale[kNt];
    float shift[kNt];  // the zero point, or the minimum
    for_each_code_row<Bits>(layout, tile, k0, [&](int k, const uint8_t* row) {
      if (k % layout.tile_group == 0) {
        const int group = k / layout.tile_group;
        const uint8_t* scales = tile + layout.scale_offset + group * kNt * 2;
        const uint8_t* zeros = tile + layout.zero_offset;
        for (int n = 0; n < kNt; ++n) {
          uint16_t bits;
          std::memcpy(&bits, scales + 2 * n, sizeof(bits));
          scale[n] = bf16_to_float(bits);
          if (layout.zero == ZeroKind::z8) {
            shift[n] = zeros[group * kNt + n];
          } else {
            std::memcpy(&bits, zeros + (group * kNt + n) * 2, sizeof(bits));
            shift[n] = bf16_to_float(bits);
          }
        }
      }
      uint16_t values[kNt];
      if (layout.zero == ZeroKind::z8) {
        for (int n = 0; n < kNt; ++n) values[n] = float_to_bf16((static_cast<float>(row[n]) - shift[n]) * scale[n]);
      } else {
        for (int n = 0; n < kNt; ++n) values[n] = float_to_bf16(static_cast<float>(row[n]) * scale[n] + shift[n]);
      }
      const int64_t target = perm != nullptr ? perm[k0 + k] : k0 + k;
      std::memcpy(out + target * layout.n + n0, values, sizeof(uint16_t) * static_cast<size_t>(real_n));
    });
  });
}

}  // namespace

void unpack(const TileLayout& layout, const uint8_t* packed, int64_t group, const int32_t* perm,
            const UnpackTarget& target) {
  if (layout.bits == 4) {
    unpack_codes<4>(layout, packed, perm, target.codes);
  } else {
    unpack_codes<8>(layout, packed, perm, target.codes);
  }
  const int64_t groups = (layout.k + group - 1) / group;
  ThreadPool::instance().parallel_for(layout.n_tiles_used(), [&](int64_t n_tile, int) {
    const int64_t n0 = n_tile * kNt;
    const auto real_n = static_cast<size_t>(std::min<int64_t>(kNt, layout.n - n0));
    for (int64_t g = 0; g < groups; ++g) {
      // A source group is repeated in each tile group that it covers; the first one will do.
      const int64_t k = g * group;
      const uint8_t* tile = packed + layout.tile_offset(n_tile, k / kKt);
      const int64_t cell = k % kKt / layout.tile_group * kNt;
      std::memcpy(target.scales + g * layout.n + n0, tile + layout.scale_offset + 2 * cell, 2 * real_n);
      if (layout.zero == ZeroKind::z8) {
        std::memcpy(target.zeros + g * layout.n + n0, tile + layout.zero_offset + cell, real_n);
      } else {
        std::memcpy(target.mins + g * layout.n + n0, tile + layout.zero_offset + 2 * cell, 2 * real_n);
      }
    }
  });
}

void dequantize(const TileLayout& layout, const uint8_t* packed, const int32_t* perm, uint16_t* out) {
  if (layout.bits == 4) {
    dequantize_codes<4>(layout, packed, perm, out);
  } else {
    dequantize_codes<8>(layout, packed, perm, out);
  }
}

}  // namespace tilefuse
