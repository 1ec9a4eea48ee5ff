// The activations of one row and k tile, wherever they are. Included by translation units of several instruction sets.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "matmul.h"

namespace tilefuse {
namespace {

// Activations k0 .. k0 + 127 of one row, permuted, zero beyond K, in `piece` where they don't lie like that in x.
inline const std::byte* tile_of_row(const MatmulArgs& args, int64_t row, int64_t k0, std::byte* piece) {
  const int64_t element = item_size(args.x_dtype);
  const std::byte* from = static_cast<const std::byte*>(args.x) + row * args.x_stride * element;
  const int64_t count = std::min<int64_t>(kKt, args.layout.k - k0);
  if (args.perm == nullptr && count == kKt) return from + k0 * element;
  std::memset(piece + count * element, 0, static_cast<size_t>((kKt - count) * element));
  if (args.perm == nullptr) {
    std::memcpy(piece, from + k0 * element, static_cast<size_t>(count * element));
  } else if (element == 4) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(piece + i * 4, from + args.perm[k0 + i] * 4, 4);
  } else {
    for (int64_t i = 0; i < count; ++i) std::memcpy(piece + i * 2, from + args.perm[k0 + i] * 2, 2);
  }
  return piece;
}

}  // namespace
}  // namespace tilefuse
