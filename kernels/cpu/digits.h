// What the formats of activations as integer digits (digits_avx2.h, digits_vnni.h) share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matmul_kernels.h"

namespace tilefuse {
namespace {

// What the digits leave of x[k], exactly. One with kNoRest as k ends a row's list.
struct DigitRest {
  int64_t k = 0;
  float value = 0.0F;
};
inline constexpr int64_t kNoRest = INT64_MAX;

// Entries of a row's list, the end included. Of 4096 normally distributed activations one in four rows needs one; a row
// that needs more than these is better off with the float kernels.
constexpr int64_t rest_capacity(int64_t k) { return k / 16 + 1; }

// Where what is written of a row lies: rests, a Group for each group, digits that are always multiplied, the lowest.
template <class Group>
struct DigitMemory {
  int64_t k = 0;
  int64_t groups = 0;
  int64_t rests = 0;     // DigitRest [rests] at offset 0
  int64_t group_at = 0;  // Group [groups]
  int64_t high_at = 0;
  int64_t low_at = 0;
  int64_t row_bytes = 0;

  explicit DigitMemory(const TileLayout& layout)
      : k(layout.k_tiles_used() * kKt), groups(k / layout.tile_group), rests(rest_capacity(k)) {
    const auto rounded = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    group_at = rounded(rests * static_cast<int64_t>(sizeof(DigitRest)));
    high_at = group_at + rounded(groups * static_cast<int64_t>(sizeof(Group)));
    low_at = high_at + k * 2;
    row_bytes = low_at + k * 2;
  }
};

template <class Group>
struct DigitRow {
  const int8_t* high = nullptr;
  const int8_t* low = nullptr;
  const Group* groups = nullptr;
  const DigitRest* rests = nullptr;

  DigitRow() = default;
  DigitRow(const DigitMemory<Group>& at, const std::byte* memory, int row) {
    memory += row * at.row_bytes;
    high = reinterpret_cast<const int8_t*>(memory + at.high_at);
    low = reinterpret_cast<const int8_t*>(memory + at.low_at);
    groups = reinterpret_cast<const Group*>(memory + at.group_at);
    rests = reinterpret_cast<const DigitRest*>(memory);
  }
};

}  // namespace
}  // namespace tilefuse
