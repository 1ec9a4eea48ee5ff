// Keys and values that stay from call to call: full blocks packed and sealed once, the last one open in 16 bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attention.h"

namespace tilefuse {

// One sequence of a cache. Head h's blocks are at sealed + h * sealed_stride; its open block is at open + h *
// open_stride, packed as `open` says, and after it the block's rows, bf16 [64][d] and [64][dv].
struct CachedSequence {
  std::byte* sealed = nullptr;
  std::byte* open = nullptr;
  std::byte* sink = nullptr;  // a copy of the open block 0 when it is sealed; null: not wanted
  int64_t sealed_stride = 0;
  int64_t open_stride = 0;
  int64_t length = 0;  // tokens that it has
  int64_t count = 0;   // to append, or to keep
  int64_t k_at = 0;    // their first row in the arrays, in elements
  int64_t v_at = 0;
};

struct KeyCache {
  BlockLayout sealed;
  BlockLayout open;
  int64_t heads = 0;
  Smoothing smoothing = Smoothing::block;  // not global
};

[[nodiscard]] constexpr int64_t open_bytes(const BlockLayout& open) {
  return open.bytes + kKeyBlock * (open.d + open.dv) * 2;
}

// Appends `count` tokens of k and v to each sequence. A block's packed form depends on its own keys alone.
void append(const KeyCache& cache, const HeadRows<const void>& k, const HeadRows<const void>& v,
            const CachedSequence* sequences, int64_t batch);

// Makes the open block of each sequence what it was at length `count` <= length; the block that then is open must have
// its 16-bit forms.
void reopen(const KeyCache& cache, const CachedSequence* sequences, int64_t batch);

}  // namespace tilefuse
