// The float kernels, written once over a SIMD type V and instantiated by the translation unit of each instruction set.
// V provides: kLanes; F (floats) and I (32-bit integers); load_f, store_f, load_i, load_u8 (kLanes bytes, widened),
// set1, to_float (of non-negative int lanes), fma, nibble_to_float<j> (bits 4j..4j+3 of every lane).
//
// Weights stay exact here, (q - z) s in float: they are not rounded to bfloat16.
#pragma once

#include <algorithm>
#include <cstring>

#include "bf16.h"
#include "matmul_kernels.h"

namespace tilefuse {
namespace {

// Scales and offsets of one group as floats: w = q * scale + offset.
struct GroupAffine {
  alignas(64) float scale[kNt];
  alignas(64) float offset[kNt];
};

inline void load_affine(const TileLayout& layout, const std::byte* tile, int group, GroupAffine& out) {
  const std::byte* scales = tile + layout.scale_offset + static_cast<int64_t>(group) * kNt * 2;
  uint16_t raw[kNt];
  std::memcpy(raw, scales, sizeof(raw));
  for (int n = 0; n < kNt; ++n) out.scale[n] = bf16_to_float(raw[n]);
  if (layout.zero == ZeroKind::z8) {
    const std::byte* zeros = tile + layout.zero_offset + static_cast<int64_t>(group) * kNt;
    uint8_t z[kNt];
    std::memcpy(z, zeros, sizeof(z));
    for (int n = 0; n < kNt; ++n) out.offset[n] = -static_cast<float>(z[n]) * out.scale[n];
  } else {
    const std::byte* mins = tile + layout.zero_offset + static_cast<int64_t>(group) * kNt * 2;
    std::memcpy(raw, mins, sizeof(raw));
    for (int n = 0; n < kNt; ++n) out.offset[n] = bf16_to_float(raw[n]);
  }
}

// z and m + z s (kMaxFoldedZero) in place of a minimum m.
inline void fold_minimum(float scale, float& zero, float& offset) {
  constexpr float kMagic = 0x1.8p23F;  // adding it rounds to the nearest integer
  const float exact = scale == 0.0F ? 0.0F : -offset / scale;
  zero = std::clamp(exact, -kMaxFoldedZero, kMaxFoldedZero) + kMagic - kMagic;
  offset += zero * scale;
}

// 8x8 bytes, transposed: out[c][r] = in[r][c].
inline void transpose_8x8_bytes(const std::byte* in, uint8_t* out, int64_t out_stride) {
  using V16 = uint8_t __attribute__((vector_size(16)));
  V16 a[4];
  std::memcpy(a, in, sizeof(a));
  // Three rounds of interleaving the first half with the second: each moves one bit of the row number below the
  // column's.
  for (int round = 0; round < 3; ++round) {
    V16 b[4];
    for (int i = 0; i < 2; ++i) {
      b[2 * i] = __builtin_shufflevector(a[i], a[i + 2], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      b[2 * i + 1] =
          __builtin_shufflevector(a[i], a[i + 2], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    std::memcpy(a, b, sizeof(a));
  }
  uint8_t flat[64];
  std::memcpy(flat, a, sizeof(flat));
  for (int c = 0; c < 8; ++c) std::memcpy(out + c * out_stride, flat + 8 * c, 8);
}

template <class V, int kNibble>
inline void dequantise_w4_row(const std::byte* block_row, const GroupAffine& affine, float* row) {
  for (int n = 0; n < kNt; n += V::kLanes) {
    const auto q = V::template nibble_to_float<kNibble>(V::load_i(block_row + 4 * n));
    V::store_f(row + n, V::fma(q, V::load_f(affine.scale + n), V::load_f(affine.offset + n)));
  }
}

// A SIMD type that can transpose bytes by itself provides dequantise_w8_block_row.
template <class V>
inline void dequantise_w8_block_row(const std::byte* codes, const GroupAffine& affine, float* panel) {
  if constexpr (requires { V::dequantise_w8_block_row(codes, affine, panel); }) {
    V::dequantise_w8_block_row(codes, affine, panel);
  } else {
    alignas(64) uint8_t rows[kBlock][kNt];
    for (int nb = 0; nb < kNt / kBlock; ++nb) transpose_8x8_bytes(codes + nb * 64, &rows[0][nb * 8], kNt);
    for (int j = 0; j < kBlock; ++j) {
      for (int n = 0; n < kNt; n += V::kLanes) {
        const auto q = V::to_float(V::load_u8(&rows[j][n]));
        V::store_f(panel + j * kNt + n, V::fma(q, V::load_f(affine.scale + n), V::load_f(affine.offset + n)));
      }
    }
  }
}

// The panel: float [128 count][64], input channels in natural order.
template <class V>
void dequantise_f32(const TileRun& run, int64_t first, int count, void* panel_out) {
  const TileLayout& layout = *run.layout;
  auto* panel = static_cast<float*>(panel_out);
  for (int t = 0; t < count; ++t) {
    const std::byte* tile = run.tiles + (first + t) * layout.tile_bytes;
    GroupAffine affine;
    for (int kb = 0; kb < kKt / kBlock; ++kb, panel += kBlock * kNt) {
      if (kb * kBlock % layout.tile_group == 0) load_affine(layout, tile, kb * kBlock / layout.tile_group, affine);
      if (layout.bits == 4) {
        const std::byte* codes = tile + kb * (kNt * 4);
        dequantise_w4_row<V, 0>(codes, affine, panel);
        dequantise_w4_row<V, 1>(codes, affine, panel + kNt);
        dequantise_w4_row<V, 2>(codes, affine, panel + 2 * kNt);
        dequantise_w4_row<V, 3>(codes, affine, panel + 3 * kNt);
        dequantise_w4_row<V, 4>(codes, affine, panel + 4 * kNt);
        dequantise_w4_row<V, 5>(codes, affine, panel + 5 * kNt);
        dequantise_w4_row<V, 6>(codes, affine, panel + 6 * kNt);
        dequantise_w4_row<V, 7>(codes, affine, panel + 7 * kNt);
      } else {
        dequantise_w8_block_row<V>(tile + kb * (kNt * 8), affine, panel);
      }
    }
  }
}

// One block of registers: kRowsHere rows by kVectors vectors of output channels, over all of k.
template <class V, int kRowsHere, int kVectors>
inline void panel_block_f32(const float* panel, int64_t k, const float* x, int64_t x_stride, float* acc, bool first) {
  typename V::F c[kRowsHere][kVectors];
  for (int r = 0; r < kRowsHere; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      c[r][v] = first ? V::set1(0.0F) : V::load_f(acc + r * kNt + v * V::kLanes);
    }
  }
  for (int64_t i = 0; i < k; ++i) {
    typename V::F b[kVectors];
    for (int v = 0; v < kVectors; ++v) b[v] = V::load_f(panel + i * kNt + v * V::kLanes);
    for (int r = 0; r < kRowsHere; ++r) {
      const auto a = V::set1(x[r * x_stride + i]);
      for (int v = 0; v < kVectors; ++v) c[r][v] = V::fma(a, b[v], c[r][v]);
    }
  }
  for (int r = 0; r < kRowsHere; ++r) {
    for (int v = 0; v < kVectors; ++v) V::store_f(acc + r * kNt + v * V::kLanes, c[r][v]);
  }
}

template <class V, int kRowsHere>
inline void panel_rows_f32_n(const float* panel, int64_t k, const float* x, int64_t x_stride, float* acc, bool first) {
  // V::kPanelVectors columns of vectors at a time: as many accumulators as the register file holds.
  for (int n = 0; n < kNt; n += V::kPanelVectors * V::kLanes) {
    panel_block_f32<V, kRowsHere, V::kPanelVectors>(panel + n, k, x, x_stride, acc + n, first);
  }
}

template <class V>
void panel_rows_f32(const void* panel_in, int64_t k, const void* x_in, int64_t x_stride, int rows, float* acc,
                    bool first) {
  const auto* panel = static_cast<const float*>(panel_in);
  const auto* x = static_cast<const float*>(x_in);
  switch (rows) {
    case 1:
      return panel_rows_f32_n<V, 1>(panel, k, x, x_stride, acc, first);
    case 2:
      return panel_rows_f32_n<V, 2>(panel, k, x, x_stride, acc, first);
    case 3:
      return panel_rows_f32_n<V, 3>(panel, k, x, x_stride, acc, first);
    case 4:
      return panel_rows_f32_n<V, 4>(panel, k, x, x_stride, acc, first);
    case 5:
      return panel_rows_f32_n<V, 5>(panel, k, x, x_stride, acc, first);
    default:
      return panel_rows_f32_n<V, 6>(panel, k, x, x_stride, acc, first);
  }
}

// 4-bit codes against kRowsHere rows without a panel: sum (q - z) x per group in registers, then the group's scale;
// with minima, an integer z too (fold_minimum), and then the rest of m times sum x. (Folding z as m is folded would
// save a subtraction a weight, but then weights of zero would not give an exact zero.)
template <class V, int kRowsHere>
inline void fused_w4_group(const TileLayout& layout, const std::byte* tile, int group, const float* x, int64_t x_stride,
                           float* acc) {
  constexpr int kChunk = V::kFusedVectors;
  const int blocks = layout.tile_group / kBlock;
  const std::byte* codes = tile + group * blocks * (kNt * 4);
  GroupAffine affine;
  load_affine(layout, tile, group, affine);
  alignas(64) float zeros[kNt] = {};
  float x_sum[kRowsHere] = {};
  if (layout.zero == ZeroKind::z8) {
    uint8_t z[kNt];
    std::memcpy(z, tile + layout.zero_offset + group * kNt, sizeof(z));
    for (int n = 0; n < kNt; ++n) zeros[n] = static_cast<float>(z[n]);
  } else {
    for (int n = 0; n < kNt; ++n) fold_minimum(affine.scale[n], zeros[n], affine.offset[n]);
    for (int r = 0; r < kRowsHere; ++r) {
      for (int i = 0; i < layout.tile_group; ++i) x_sum[r] += x[r * x_stride + i];
    }
  }
  for (int n = 0; n < kNt; n += kChunk * V::kLanes) {
    typename V::F c[kRowsHere][kChunk];
    typename V::F z[kChunk];
    for (int v = 0; v < kChunk; ++v) z[v] = V::load_f(zeros + n + v * V::kLanes);
    for (int r = 0; r < kRowsHere; ++r) {
      for (int v = 0; v < kChunk; ++v) c[r][v] = V::set1(0.0F);
    }
    for (int kb = 0; kb < blocks; ++kb) {
      typename V::I w[kChunk];
      for (int v = 0; v < kChunk; ++v) w[v] = V::load_i(codes + kb * (kNt * 4) + 4 * (n + v * V::kLanes));
      const auto step = [&]<int kNibble>() {
        for (int v = 0; v < kChunk; ++v) {
          const typename V::F q = V::template nibble_to_float<kNibble>(w[v]) - z[v];
          for (int r = 0; r < kRowsHere; ++r) {
            c[r][v] = V::fma(V::set1(x[r * x_stride + kb * kBlock + kNibble]), q, c[r][v]);
          }
        }
      };
      step.template operator()<0>();
      step.template operator()<1>();
      step.template operator()<2>();
      step.template operator()<3>();
      step.template operator()<4>();
      step.template operator()<5>();
      step.template operator()<6>();
      step.template operator()<7>();
    }
    for (int r = 0; r < kRowsHere; ++r) {
      for (int v = 0; v < kChunk; ++v) {
        const int at = n + v * V::kLanes;
        auto sum = V::load_f(acc + r * kNt + at);
        if (layout.zero == ZeroKind::m16) sum = V::fma(V::load_f(affine.offset + at), V::set1(x_sum[r]), sum);
        V::store_f(acc + r * kNt + at, V::fma(V::load_f(affine.scale + at), c[r][v], sum));
      }
    }
  }
}

template <class V>
void fused_w4_f32(const TileRun& run, const float* x, int64_t x_stride, int rows, float* acc) {
  const TileLayout& layout = *run.layout;
  std::memset(acc, 0, sizeof(float) * static_cast<size_t>(rows) * kNt);
  for (int64_t kt = 0; kt < layout.k_tiles_used(); ++kt) {
    const std::byte* tile = run.tiles + kt * layout.tile_bytes;
    for (int g = 0; g < layout.groups_per_tile(); ++g) {
      const float* xg = x + kt * kKt + g * layout.tile_group;
      int r = 0;
      for (; r + 2 <= rows; r += 2) fused_w4_group<V, 2>(layout, tile, g, xg + r * x_stride, x_stride, acc + r * kNt);
      if (r < rows) fused_w4_group<V, 1>(layout, tile, g, xg + r * x_stride, x_stride, acc + r * kNt);
    }
  }
}

}  // namespace
}  // namespace tilefuse
