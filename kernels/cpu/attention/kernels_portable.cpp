// The portable level: plain loops over one row and sixteen keys or channels.
#include <limits>

#include "attention/packing.h"

namespace tilefuse {
namespace {

constexpr int kRowsAtOnce = 8;
constexpr int kLanes = 16;

// 2^x for x <= 0 (a little above is fine), within 2 units in the last place; 0 below 2^-126; NaN stays NaN. Minimax
// polynomial of 2^f, |f| <= 1/2, that is exact at 0.
inline float exp2_near(float x) {
  constexpr float kRound = 12582912.0F;
  const float t = x < -126.0F ? -126.0F : x;
  const float rounded = t + kRound;
  const float f = t - (rounded - kRound);
  float p = 0x1.5bba0ep-10F;
  p = p * f + 0x1.3cea88p-7F;
  p = p * f + 0x1.c6b752p-5F;
  p = p * f + 0x1.ebf9bcp-3F;
  p = p * f + 0x1.62e42ap-1F;
  p = p * f + 1.0F;
  const uint32_t power = (__builtin_bit_cast(uint32_t, rounded) - __builtin_bit_cast(uint32_t, kRound) + 127U) << 23;
  return x < -126.0F ? 0.0F : p * __builtin_bit_cast(float, power);
}

void pack_rows16(const uint16_t* const* from, int rows, int64_t d, void* to) {
  auto* out = static_cast<float*>(to);
  for (int r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < d; ++c) *out++ = bf16_to_float(from[r][c]);
  }
}

void pack_rows8(const uint16_t* const* from, const void* /*rows16*/, int rows, int64_t d, RowCodes& to) {
  quantise_rows(from, rows, d, to.scales, reinterpret_cast<int8_t*>(to.codes), to.starts);
}

void scores16(const void* rows16, int rows, const std::byte* k16, int64_t d, int keys, float* scores) {
  const auto* q = static_cast<const float*>(rows16);
  const auto* k = reinterpret_cast<const uint32_t*>(k16);
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < keys; j += kLanes) {
      float sums[kLanes] = {};
      for (int64_t c = 0; c < d; c += 2) {
        for (int i = 0; i < kLanes; ++i) {
          const uint32_t pair = k[c / 2 * kKeyBlock + j + i];
          sums[i] += q[r * d + c] * __builtin_bit_cast(float, pair << 16);
          sums[i] += q[r * d + c + 1] * __builtin_bit_cast(float, pair & 0xffff0000U);
        }
      }
      std::copy_n(sums, kLanes, scores + r * kChunkKeys + j);
    }
  }
}

void scores8(const RowCodes& codes, int rows, const std::byte* k8, int64_t d, int keys, float* scores) {
  const auto* q = reinterpret_cast<const int8_t*>(codes.codes);
  const auto* k = reinterpret_cast<const uint8_t*>(k8);
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < keys; j += kLanes) {
      int32_t sums[kLanes];
      std::fill_n(sums, kLanes, codes.starts[r]);
      for (int64_t c = 0; c < d; ++c) {
        const uint8_t* from = k + (c / 4 * kKeyBlock + j) * 4 + c % 4;
        for (int i = 0; i < kLanes; ++i) sums[i] += q[r * d + c] * from[i * 4];
      }
      for (int i = 0; i < kLanes; ++i) scores[r * kChunkKeys + j + i] = static_cast<float>(sums[i]);
    }
  }
}

void softmax(const float* scores, int rows, const Chunk& chunk, RowState& state, float* rescale, uint16_t* p) {
  for (int r = 0; r < rows; ++r, scores += kChunkKeys, p += kChunkKeys) {
    float largest = state.max[r];
    for (int b = 0; b < chunk.blocks; ++b) {
      float raw = -std::numeric_limits<float>::infinity();
      for (int j = 0; j < chunk.keys[b]; ++j) raw = std::max(raw, scores[b * kKeyBlock + j]);
      if (chunk.keys[b] > 0) largest = std::max(largest, raw * chunk.multiplier[b][r] + chunk.offset[b][r]);
    }
    const float base = largest == -std::numeric_limits<float>::infinity() ? 0.0F : largest;
    rescale[r] = exp2_near(state.max[r] - base);
    state.max[r] = largest;
    float* sums = state.sums[r];
    for (int i = 0; i < kLanes; ++i) sums[i] *= rescale[r];
    for (int b = 0; b < chunk.blocks; ++b) {
      const float* s = scores + b * kKeyBlock;
      const float multiplier = chunk.multiplier[b][r];
      const float offset = chunk.offset[b][r] - base;
      for (int j = 0; j < chunk.keys[b]; ++j) {
        const float x = exp2_near(s[j] * multiplier + offset);
        sums[j % kLanes] += x;
        const float* value_scales = chunk.v_scales[b];
        p[b * kKeyBlock + j] = float_to_bf16(value_scales == nullptr ? x : x * value_scales[j]);
      }
    }
  }
}

void values(const uint16_t* p, int rows, const Chunk& chunk, int64_t padded_dv, const float* rescale, float* out) {
  for (int r = 0; r < rows; ++r, p += kChunkKeys, out += padded_dv) {
    for (int64_t c = 0; c < padded_dv; ++c) out[c] = rescale == nullptr ? 0.0F : out[c] * rescale[r];
    for (int b = 0; b < chunk.blocks; ++b) {
      const auto* v = reinterpret_cast<const uint32_t*>(chunk.v16[b]);
      for (int j = 0; j < chunk.keys[b]; j += 2, v += padded_dv) {
        const float first = bf16_to_float(p[b * kKeyBlock + j]);
        const float second = bf16_to_float(p[b * kKeyBlock + j + 1]);
        for (int64_t c = 0; c < padded_dv; ++c) {
          out[c] += first * __builtin_bit_cast(float, v[c] << 16);
          out[c] += second * __builtin_bit_cast(float, v[c] & 0xffff0000U);
        }
      }
    }
  }
}

}  // namespace

const AttentionKernels& attention_kernels_portable() {
  static constexpr AttentionKernels kernels = {
      .rows = kRowsAtOnce,
      .row16_bytes = kRowsAtOnce * 4,
      .row8_bytes = kRowsAtOnce,
      .load_row = load_row_any,
      .pack_rows16 = pack_rows16,
      .pack_rows8 = pack_rows8,
      .largest = largest_any,
      .pack_keys16 = pack_keys16_any,
      .mean_of_keys = mean_of_keys_any,
      .pack_keys8 = pack_keys8_any,
      .pack_values16 = pack_values16_any,
      .widen_values = widen_values_any,
      .scores16 = scores16,
      .scores8 = scores8,
      .biases = nullptr,
      .softmax = softmax,
      .values = values,
      .store_row = store_row_any,
  };
  return kernels;
}

}  // namespace tilefuse
