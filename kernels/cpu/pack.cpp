#include "pack.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cstring>
#include <limits>

#include "bf16.h"
#include "code_blocks.h"
#include "thread_pool.h"

namespace tilefuse {
namespace {

using IssueKind = PackIssue::Kind;

// The first issue of each kind over all threads.
class Issues {
 public:
  explicit Issues(int64_t channels) : channels_(channels) {
    for (auto& position : first_) position.store(kNone, std::memory_order_relaxed);
  }

  void note(IssueKind kind, int64_t row, int64_t channel) {
    std::atomic<int64_t>& first = first_[static_cast<size_t>(kind)];
    const int64_t position = row * channels_ + channel;
    int64_t seen = first.load(std::memory_order_relaxed);
    while (position < seen && !first.compare_exchange_weak(seen, position, std::memory_order_relaxed)) {
    }
  }

  [[nodiscard]] PackIssue result() const {
    for (const IssueKind kind : {IssueKind::scale, IssueKind::min, IssueKind::zero, IssueKind::code}) {
      const int64_t position = first_[static_cast<size_t>(kind)].load(std::memory_order_relaxed);
      if (position != kNone) return {kind, position / channels_, position % channels_};
    }
    return {};
  }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  int64_t channels_;
  std::array<std::atomic<int64_t>, 5> first_;
};

[[nodiscard]] bool finite_bf16(uint16_t bits) { return (bits & 0x7f80u) != 0x7f80u; }

// 64 source values of type T, of which `count` are real, the others 0.
template <typename T>
void gather(const void* data, int64_t first, int64_t stride, int count, T (&values)[kNt]) {
  const auto* bytes = static_cast<const uint8_t*>(data) + first * static_cast<int64_t>(sizeof(T));
  if (stride == 1 && count == kNt) {
    std::memcpy(values, bytes, sizeof(values));
    return;
  }
  std::fill(values, values + kNt, T{0});
  for (int n = 0; n < count; ++n)
    std::memcpy(&values[n], bytes + n * stride * static_cast<int64_t>(sizeof(T)), sizeof(T));
}

// Inf and NaN stay not finite: rounding could carry a NaN into a number.
[[nodiscard]] inline uint16_t round_scale(uint32_t bits) {
  const bool finite = (bits & kFloatExponent) != kFloatExponent;
  return finite ? float_bits_to_bf16(bits) : static_cast<uint16_t>(kFloatExponent >> 16);
}

// 64 values of one group as bfloat16, of which `count` are real; Inf where one overflows or is not finite.
void write_floats(const FloatGrid& grid, int64_t group, int64_t n0, int count, IssueKind kind, Issues& issues,
                  uint8_t* out) {
  const int64_t first = group * grid.group_stride + n0 * grid.channel_stride;
  uint16_t values[kNt];
  uint32_t words[kNt];
  switch (grid.kind) {
    case FloatKind::bf16:
      gather(grid.data, first, grid.channel_stride, count, values);
      break;
    case FloatKind::f16:
      gather(grid.data, first, grid.channel_stride, count, values);
      for (int n = 0; n < kNt; ++n) words[n] = half_to_float_bits(values[n]);
      for (int n = 0; n < kNt; ++n) values[n] = round_scale(words[n]);
      break;
    case FloatKind::f32:
      gather(grid.data, first, grid.channel_stride, count, words);
      for (int n = 0; n < kNt; ++n) values[n] = round_scale(words[n]);
      break;
  }
  std::memcpy(out, values, sizeof(values));
  int bad = 0;
  for (int n = 0; n < kNt; ++n) bad |= !finite_bf16(values[n]);
  for (int n = 0; bad != 0 && n < count; ++n) {
    if (!finite_bf16(values[n])) return issues.note(kind, group, n0 + n);
  }
}

// Clears what the source holds outside the matrix, and gives padded rows of a group that is partly real its zero point,
// so that they dequantise to 0.
template <int Bits>
void pad_codes(const TileLayout& layout, int64_t k0, int64_t n0, const uint8_t* zeros, Word<Bits>* codes) {
  const int real_n = static_cast<int>(std::min<int64_t>(kNt, layout.n - n0));
  constexpr Word<Bits> kOnes = ~Word<Bits>{0} / ((1u << Bits) - 1);  // 1 in every code
  for (int block = 0; block < kKBlocks; ++block) {
    Word<Bits>* row = codes + block * kNt;
    const auto real_k = std::clamp<int64_t>(layout.k - (k0 + block * kBlock), 0, kBlock);
    const Word<Bits> keep =
        real_k == kBlock ? ~Word<Bits>{0} : static_cast<Word<Bits>>((Word<Bits>{1} << (real_k * Bits)) - 1);
    const int group = block * kBlock / layout.tile_group;
    const bool real_group = k0 + group * layout.tile_group < layout.k;
    const bool fill = zeros != nullptr && real_group;
    for (int n = 0; n < real_n; ++n) {
      const Word<Bits> code = real_k == 0 ? Word<Bits>{0} : static_cast<Word<Bits>>(row[n] & keep);
      row[n] = code | (fill ? static_cast<Word<Bits>>(zeros[group * kNt + n] * kOnes & ~keep) : Word<Bits>{0});
    }
    std::fill(row + real_n, row + kNt, Word<Bits>{0});
  }
}

template <int Bits>
class Packer {
 public:
  Packer(const TileLayout& layout, const PackSource& source, uint8_t* out)
      : layout_(layout), source_(source), out_(out), issues_(layout.n) {}

  PackIssue run() {
    const PatchShape shape = best_patch(source_);
    const int64_t n_patches = (layout_.n_tiles() + shape.n_tiles - 1) / shape.n_tiles;
    const int64_t k_patches = (layout_.k_tiles + shape.k_tiles - 1) / shape.k_tiles;
    ThreadPool::instance().parallel_for(n_patches * k_patches, [&](int64_t item, int) {
      const int64_t n0 = item % n_patches * shape.n_tiles;
      const int64_t k0 = item / n_patches * shape.k_tiles;
      patch(k0, std::min(k0 + shape.k_tiles, layout_.k_tiles), n0, std::min(n0 + shape.n_tiles, layout_.n_tiles()));
    });
    return issues_.result();
  }

 private:
  // Tiles of rows [k_tile, k_end) and columns [n_tile, n_end), kMostPatchTiles at most.
  void patch(int64_t k_tile, int64_t k_end, int64_t n_tile, int64_t n_end) {
    const int64_t real_k = std::min(k_end, layout_.k_tiles_used());
    const int64_t real_n = std::min(n_end, layout_.n_tiles_used());
    Word<Bits>* codes[kMostPatchTiles];
    int count = 0;
    for (int64_t k = k_tile; k < k_end; ++k) {
      for (int64_t n = n_tile; n < n_end; ++n) {
        uint8_t* tile = out_ + layout_.tile_offset(n, k);
        if (k < real_k && n < real_n) {
          codes[count++] = reinterpret_cast<Word<Bits>*>(tile);
        } else {
          std::memset(tile, 0, static_cast<size_t>(layout_.tile_bytes));
        }
      }
    }
    if (count == 0) return;
    const Patch at{.k0 = k_tile * kKt,
                   .n0 = n_tile * kNt,
                   .k_tiles = static_cast<int>(real_k - k_tile),
                   .n_tiles = static_cast<int>(real_n - n_tile)};
    const bool fit = read_code_patch<Bits>(layout_, source_, at, codes);
    for (int i = 0; i < count; ++i) finish(at.k0 + i / at.n_tiles * kKt, at.n0 + i % at.n_tiles * kNt, fit, codes[i]);
  }

  // All of a tile but its codes.
  void finish(int64_t k0, int64_t n0, bool fit, Word<Bits>* codes) {
    auto* bytes = reinterpret_cast<uint8_t*>(codes);
    if (!fit) find_bad_code(k0, n0);
    write_groups(k0, n0, bytes);
    const uint8_t* zeros = layout_.zero == ZeroKind::z8 ? bytes + layout_.zero_offset : nullptr;
    if (k0 + kKt > layout_.k || n0 + kNt > layout_.n) pad_codes<Bits>(layout_, k0, n0, zeros, codes);
  }

  void write_groups(int64_t k0, int64_t n0, uint8_t* bytes) {
    const int real_n = static_cast<int>(std::min<int64_t>(kNt, layout_.n - n0));
    std::memset(bytes + layout_.scale_offset, 0, static_cast<size_t>(layout_.tile_bytes - layout_.scale_offset));
    for (int row = 0; row < layout_.groups_per_tile(); ++row) {
      const int64_t k = k0 + row * layout_.tile_group;
      if (k >= layout_.k) return;
      const int64_t group = k / source_.group;
      write_floats(source_.scales, group, n0, real_n, IssueKind::scale, issues_,
                   bytes + layout_.scale_offset + row * kNt * 2);
      if (layout_.zero == ZeroKind::m16) {
        write_floats(source_.mins, group, n0, real_n, IssueKind::min, issues_,
                     bytes + layout_.zero_offset + row * kNt * 2);
      } else {
        write_zeros(group, n0, real_n, bytes + layout_.zero_offset + row * kNt);
      }
    }
  }

  void write_zeros(int64_t group, int64_t n0, int count, uint8_t* out) {
    const ByteGrid& grid = source_.zeros;
    uint8_t values[kNt];
    gather(grid.data, group * grid.group_stride + n0 * grid.channel_stride, grid.channel_stride, count, values);
    std::memcpy(out, values, sizeof(values));
    if constexpr (Bits == 4) {
      const uint8_t* bad = std::find_if(values, values + count, [](uint8_t zero) { return zero > 15; });
      if (bad != values + count) issues_.note(IssueKind::zero, group, n0 + (bad - values));
    }
  }

  // Only CodeOrder::kn can hold a code of more than 4 bits.
  void find_bad_code(int64_t k0, int64_t n0) {
    for (int64_t k = k0; k < std::min(k0 + kKt, layout_.k); ++k) {
      const int64_t source_row = source_.perm != nullptr ? source_.perm[k] : k;
      for (int64_t n = n0; n < std::min(n0 + kNt, layout_.n); ++n) {
        if (source_.codes[source_row * layout_.n + n] > 15) return issues_.note(IssueKind::code, k, n);
      }
    }
  }

  const TileLayout& layout_;
  const PackSource& source_;
  uint8_t* out_;
  Issues issues_;
};

}  // namespace

PackIssue pack(const TileLayout& layout, const PackSource& source, uint8_t* out) {
  assert(reinterpret_cast<uintptr_t>(out) % kAlignment == 0);
  return layout.bits == 4 ? Packer<4>(layout, source, out).run() : Packer<8>(layout, source, out).run();
}

}  // namespace tilefuse
