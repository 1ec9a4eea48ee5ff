#include "activations.h"

#include "activations_rows.h"
#include "cpu_features.h"

namespace tilefuse {
namespace {

struct PlainGroup {
  static uint32_t largest_magnitude(const float* x, int group) {
    uint32_t largest = 0;
    for (int i = 0; i < group; ++i) {
      const uint32_t magnitude = __builtin_bit_cast(uint32_t, x[i]) & 0x7FFFFFFFU;
      largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
  }

  template <bool kEvenFirst>
  static bool write_digits(const float* x, int group, float up, int8_t* out, int32_t* sums) {
    // Byte b of a block's eight holds input channel kOrder[b] of the block.
    static constexpr int kOrder4[kBlock] = {0, 2, 4, 6, 1, 3, 5, 7};
    static constexpr int kOrder8[kBlock] = {0, 1, 2, 3, 4, 5, 6, 7};
    constexpr const auto& kOrder = kEvenFirst ? kOrder4 : kOrder8;
    int32_t sum[kDigits] = {};
    bool exact = true;
    for (int b = 0; b < group / kBlock; ++b) {
      for (int i = 0; i < kBlock; ++i) {
        const float scaled = x[b * kBlock + kOrder[i]] * up;
        const float shifted = scaled + kMagic;
        exact &= shifted - kMagic == scaled;
        const auto value = static_cast<int32_t>(__builtin_bit_cast(uint32_t, shifted) - kMagicBits);
        const auto d0 = static_cast<int8_t>(value);
        const int32_t rest = (value - d0) >> 8;
        const auto d1 = static_cast<int8_t>(rest);
        const auto d2 = static_cast<int8_t>((rest - d1) >> 8);
        int8_t* at = out + b * (kDigits * kBlock) + i;
        at[0] = d0;
        at[kBlock] = d1;
        at[2 * kBlock] = d2;
        sum[0] += d0;
        sum[1] += d1;
        sum[2] += d2;
      }
    }
    std::memcpy(sums, sum, sizeof(sum));
    return exact;
  }
};

}  // namespace

void write_row(const MatmulArgs& args, int64_t row, int64_t k, float* out) { load_row(args, row, k, out); }

bool write_digits(const MatmulArgs& args, int64_t row, int64_t k, float* scratch, int8_t* digits, float* scales,
                  int32_t* sums, DigitRest* rests) {
#if defined(__x86_64__)
  if (current_level() >= CpuLevel::avx512)
    return write_digits_avx512(args, row, k, scratch, digits, scales, sums, rests);
#endif
  return write_digits_by<PlainGroup>(args, row, k, scratch, digits, scales, sums, rests);
}

}  // namespace tilefuse
