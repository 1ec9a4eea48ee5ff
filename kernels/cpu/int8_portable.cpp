// compute="int8" on any CPU. Compiled without contraction: each rounding is as written.
#include <cstring>

#include "int8_rows.h"
#include "matmul_driver.h"

namespace tilefuse {
namespace {

// One k tile: weights without their scales, input channels in the order of Int8Rows' bytes.
struct PreparedTile {
  int16_t weights[kKt][kNt];  // q - z
};
static_assert(sizeof(PreparedTile) <= kInt8PreparedBytes);

bool no_offset(const TileLayout&, int64_t) { return false; }

void prepare(const TileRun& run, int64_t k_tile, bool, std::byte* prepared) {
  const TileLayout& layout = *run.layout;
  const std::byte* tile = run.tiles + k_tile * layout.tile_bytes;
  auto& out = *reinterpret_cast<PreparedTile*>(prepared);
  for (int kb = 0; kb < kKt / kBlock; ++kb) {
    const int64_t first = static_cast<int64_t>(kb * kBlock / layout.tile_group) * kNt;
    for (int n = 0; n < kNt; ++n) {
      const std::byte* codes = tile + (kb * kNt + n) * layout.bits;
      const int zero = int8_affine(layout, tile, first + n).zero;
      for (int i = 0; i < kBlock; ++i) {
        const int q = layout.bits == 8 ? std::to_integer<int>(codes[i])
                                       : (std::to_integer<int>(codes[i / 2]) >> (i % 2 * 4)) & 15;
        out.weights[kb * kBlock + int8_place(layout.bits, i)][n] = static_cast<int16_t>(q - zero);
      }
    }
  }
}

void pass(const TileRun& run, int64_t k_tile, bool, const std::byte* prepared, const Int8Rows& x, float* acc) {
  const TileLayout& layout = *run.layout;
  const std::byte* tile = run.tiles + k_tile * layout.tile_bytes;
  const auto& weights = reinterpret_cast<const PreparedTile*>(prepared)->weights;
  const uint32_t* words = x.words + k_tile * x.tile_stride;
  for (int g = 0; g < layout.groups_per_tile(); ++g) {
    Int8Affine affine[kNt];
    for (int n = 0; n < kNt; ++n) affine[n] = int8_affine(layout, tile, static_cast<int64_t>(g) * kNt + n);
    for (int r = 0; r < x.rows; ++r) {
      int32_t sums[kNt] = {};
      for (int k = g * layout.tile_group; k < (g + 1) * layout.tile_group; ++k) {
        const auto value = static_cast<int8_t>(words[k / 4 * x.rows + r] >> (k % 4 * 8));
        for (int n = 0; n < kNt; ++n) sums[n] += int32_t{value} * int32_t{weights[k][n]};
      }
      const int64_t at = (k_tile * layout.groups_per_tile() + g) * x.rows + r;
      float* to = acc + r * kNt;
      if (layout.zero == ZeroKind::m16) {
        const float x_sum = x.scales[at] * static_cast<float>(x.sums[at]);
        for (int n = 0; n < kNt; ++n) to[n] += affine[n].rest * x_sum;
      }
      for (int n = 0; n < kNt; ++n) to[n] += static_cast<float>(sums[n]) * (affine[n].scale * x.scales[at]);
    }
  }
}

}  // namespace

const Int8Kernels& int8_kernels_portable() {
  static constexpr Int8Kernels kernels = {
      .max_rows = 8,
      .offset = no_offset,
      .quantise = quantise_int8,
      .prepare = prepare,
      .pass = pass,
      .store_row = store_row,
  };
  return kernels;
}

}  // namespace tilefuse
