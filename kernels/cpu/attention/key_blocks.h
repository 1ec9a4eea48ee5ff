// Keys and values packed in blocks of 64 keys: what the attention kernels read. Packed for one call, or kept by a
// KVCache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tilefuse {

inline constexpr int kKeyBlock = 64;
inline constexpr int64_t kAbsent = -1;

// Codes are stored with 128 added: VPDPBUSD multiplies an unsigned operand (the keys) by a signed one (the queries).
inline constexpr int kKeyCodeBias = 128;

// Where the parts of a block lie, in bytes from its start; kAbsent: not kept. Every part starts at a multiple of 64,
// and so does a block. Words are little-endian.
struct BlockLayout {
  int64_t d = 0;               // of keys: a multiple of 8
  int64_t dv = 0;              // of values: a multiple of 8
  int64_t k16 = kAbsent;       // bf16 [d / 2][64 keys][2]
  int64_t k8 = kAbsent;        // uint8 [d / 4][64 keys][4]: code + 128
  int64_t mean = kAbsent;      // bf16 [d], subtracted before quantising; with k8
  int64_t k_scale = kAbsent;   // float; with k8
  int64_t v16 = kAbsent;       // bf16 [32 pairs of keys][padded dv][2]
  int64_t v8 = kAbsent;        // int8 [32][padded dv][2]
  int64_t v_scales = kAbsent;  // float [64 keys]; with v8
  int64_t bytes = 0;

  [[nodiscard]] int64_t padded_dv() const { return (dv + 15) / 16 * 16; }

  // k16, k8: which forms of the keys; v16 or v8: which form of the values.
  [[nodiscard]] static BlockLayout of(int64_t d, int64_t dv, bool k16, bool k8, bool v16, bool v8);
};

enum class Smoothing : int { none = 0, block = 1, global = 2 };

}  // namespace tilefuse
