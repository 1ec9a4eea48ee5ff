// Rows, keys and values into the kernels' layouts, as loops that each translation unit's compiler vectorises for its
// instruction set, hence the unnamed namespace. Every rounding is IEEE's: codes and scales are the same bits at every
// level.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/attention_kernels.h"
#include "bf16.h"

namespace tilefuse {
namespace {

inline constexpr int64_t kMaxChannels = 512;

inline uint32_t load_word(const void* p) {
  uint32_t w;
  std::memcpy(&w, p, sizeof(w));
  return w;
}

inline void load_row_any(const void* from, Dtype dtype, int64_t d, uint16_t* to) {
  switch (dtype) {
    case Dtype::bf16:
      std::memcpy(to, from, static_cast<size_t>(d) * 2);
      break;
    case Dtype::f32:
      for (int64_t c = 0; c < d; ++c) to[c] = float_to_bf16(static_cast<const float*>(from)[c]);
      break;
    case Dtype::f16:
      for (int64_t c = 0; c < d; ++c) {
        to[c] = float_to_bf16(__builtin_bit_cast(float, half_to_float_bits(static_cast<const uint16_t*>(from)[c])));
      }
      break;
  }
}

inline void store_row_any(const float* from, float factor, int64_t dv, Dtype dtype, void* to) {
  switch (dtype) {
    case Dtype::f32:
      for (int64_t c = 0; c < dv; ++c) static_cast<float*>(to)[c] = from[c] * factor;
      break;
    case Dtype::bf16:
      for (int64_t c = 0; c < dv; ++c) static_cast<uint16_t*>(to)[c] = float_to_bf16(from[c] * factor);
      break;
    case Dtype::f16:
      for (int64_t c = 0; c < dv; ++c) static_cast<uint16_t*>(to)[c] = float_to_half(from[c] * factor);
      break;
  }
}

// The bits of magnitudes order as the magnitudes do, NaN above all.
inline float largest_any(const uint16_t* from, int64_t count) {
  uint16_t bits = 0;
  for (int64_t c = 0; c < count; ++c) bits = std::max(bits, static_cast<uint16_t>(from[c] & 0x7fffU));
  return bf16_to_float(bits);
}

// Of codes, given the largest magnitude. NaN if that isn't finite (a key less its mean may overflow), so that NaN is
// what spreads: of Inf, scores of -inf might come out, which count as masked.
inline float scale_of(float largest) {
  if (!(largest <= std::numeric_limits<float>::max())) return std::numeric_limits<float>::quiet_NaN();
  return largest == 0.0F ? 1.0F : largest / 127.0F;
}

// Nearest integer to x / scale, ties to even, within +-127; -127 where the scale is NaN. Adding 1.5 * 2^23 rounds.
inline int32_t code_of(float x, float scale) {
  constexpr float kRound = 12582912.0F;
  float q = x / scale;
  q = q > -127.0F ? q : -127.0F;
  q = q < 127.0F ? q : 127.0F;
  return static_cast<int32_t>(__builtin_bit_cast(uint32_t, q + kRound) - __builtin_bit_cast(uint32_t, kRound));
}

// `mean`, of `keys` rows, bf16 [d].
inline void mean_of_keys_any(const uint16_t* from, int keys, int64_t d, uint16_t* mean) {
  float sums[kMaxChannels];
  std::fill_n(sums, d, 0.0F);
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t c = 0; c < d; ++c) sums[c] += bf16_to_float(from[j * d + c]);
  }
  const float part = 1.0F / static_cast<float>(keys);
  for (int64_t c = 0; c < d; ++c) mean[c] = float_to_bf16(sums[c] * part);
}

// codes, int8 [64][d] with 0 beyond `keys`, and their scale.
inline float quantise_keys(const uint16_t* from, int keys, int64_t d, const uint16_t* mean, int8_t* codes) {
  float means[kMaxChannels];
  for (int64_t c = 0; c < d; ++c) means[c] = mean == nullptr ? 0.0F : bf16_to_float(mean[c]);
  uint32_t bits = 0;
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t c = 0; c < d; ++c) {
      const float x = bf16_to_float(from[j * d + c]) - means[c];
      bits = std::max(bits, __builtin_bit_cast(uint32_t, x) & 0x7fffffffU);
    }
  }
  const float scale = scale_of(__builtin_bit_cast(float, bits));
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t c = 0; c < d; ++c) {
      codes[j * d + c] = static_cast<int8_t>(code_of(bf16_to_float(from[j * d + c]) - means[c], scale));
    }
  }
  std::fill_n(codes + keys * d, (kKeyBlock - keys) * d, int8_t{0});
  return scale;
}

// Codes int8 [rows][d] of rows of bf16 [d], and -128 times their sums.
inline void quantise_rows(const uint16_t* const* from, int rows, int64_t d, const float* scales, int8_t* codes,
                          int32_t* starts) {
  for (int64_t r = 0; r < rows; ++r) {
    int32_t sum = 0;
    for (int64_t c = 0; c < d; ++c) {
      const int32_t code = code_of(bf16_to_float(from[r][c]), scales[r]);
      codes[r * d + c] = static_cast<int8_t>(code);
      sum += code;
    }
    starts[r] = -kKeyCodeBias * sum;
  }
}

// to[i][r] = from[r][i] for 4-byte words: rows of `words`, from and to as given.
inline void transpose_words(const void* from, int rows, int64_t words, int64_t to_stride, void* to) {
  const auto* in = static_cast<const std::byte*>(from);
  auto* out = static_cast<uint32_t*>(to);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < words; ++i) out[i * to_stride + r] = load_word(in + (r * words + i) * 4);
  }
}

inline void pack_keys16_any(const uint16_t* from, int64_t d, std::byte* to) {
  transpose_words(from, kKeyBlock, d / 2, kKeyBlock, to);
}

inline float pack_keys8_any(const uint16_t* from, int keys, int64_t d, const uint16_t* mean, std::byte* to) {
  int8_t codes[kKeyBlock * kMaxChannels];
  const float scale = quantise_keys(from, keys, d, mean, codes);
  for (int64_t i = 0; i < kKeyBlock * d; ++i) codes[i] = static_cast<int8_t>(codes[i] ^ -kKeyCodeBias);
  transpose_words(codes, kKeyBlock, d / 4, kKeyBlock, to);
  return scale;
}

inline void pack_values16_any(const uint16_t* from, int64_t dv, std::byte* to) {
  const int64_t padded = (dv + 15) / 16 * 16;
  auto* out = reinterpret_cast<uint32_t*>(to);
  for (int64_t pair = 0; pair < kKeyBlock / 2; ++pair, from += 2 * dv, out += padded) {
    for (int64_t c = 0; c < dv; ++c) out[c] = from[c] | static_cast<uint32_t>(from[dv + c]) << 16;
    std::fill(out + dv, out + padded, 0U);
  }
}

// The codes are integers up to 127: exact.
inline void widen_values_any(const std::byte* v8, int64_t padded_dv, std::byte* v16) {
  const auto* from = reinterpret_cast<const int8_t*>(v8);
  auto* to = reinterpret_cast<uint16_t*>(v16);
  for (int64_t i = 0; i < kKeyBlock * padded_dv; ++i) {
    to[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, static_cast<float>(from[i])) >> 16);
  }
}

}  // namespace
}  // namespace tilefuse
