#include "activations.h"

#include <cmath>
#include <cstring>

#include "bf16.h"

namespace tilefuse {
namespace {

// NumPy's arrays need not be aligned to their elements, hence the copies, which compile to plain loads.
template <Dtype kType>
float load(const void* row, int64_t i) {
  if constexpr (kType == Dtype::f32) {
    float value;
    std::memcpy(&value, static_cast<const std::byte*>(row) + i * 4, sizeof(value));
    return value;
  } else {
    uint16_t bits;
    std::memcpy(&bits, static_cast<const std::byte*>(row) + i * 2, sizeof(bits));
    return kType == Dtype::bf16 ? bf16_to_float(bits) : half_to_float(bits);
  }
}

template <Dtype kType>
void load_row(const void* row, const int32_t* perm, int64_t k_real, float* out) {
  for (int64_t i = 0; i < k_real; ++i) out[i] = round_to_bf16(load<kType>(row, perm == nullptr ? i : perm[i]));
}

// One row as floats that are bfloat16 values, zero beyond K.
void load_row(const MatmulArgs& args, int64_t row, int64_t k, float* out) {
  const int64_t element = args.x_dtype == Dtype::f32 ? 4 : 2;
  const void* from = static_cast<const std::byte*>(args.x) + row * args.x_stride * element;
  switch (args.x_dtype) {
    case Dtype::f32:
      load_row<Dtype::f32>(from, args.perm, args.layout.k, out);
      break;
    case Dtype::bf16:
      load_row<Dtype::bf16>(from, args.perm, args.layout.k, out);
      break;
    case Dtype::f16:
      load_row<Dtype::f16>(from, args.perm, args.layout.k, out);
      break;
  }
  std::memset(out + args.layout.k, 0, sizeof(float) * static_cast<size_t>(k - args.layout.k));
}

}  // namespace

void write_row(const MatmulArgs& args, int64_t row, int64_t k, float* out) { load_row(args, row, k, out); }

bool write_digits(const MatmulArgs& args, int64_t row, int64_t k, float* scratch, int8_t* digits, float* scales,
                  int32_t* sums, DigitRest* rests) {
  // Byte b of a block's eight holds input channel kOrder[b] of the block.
  static constexpr int kOrder4[kBlock] = {0, 2, 4, 6, 1, 3, 5, 7};
  static constexpr int kOrder8[kBlock] = {0, 1, 2, 3, 4, 5, 6, 7};
  const auto& order = args.layout.bits == 4 ? kOrder4 : kOrder8;
  const int group = args.layout.tile_group;
  load_row(args, row, k, scratch);
  const DigitRest* const last_rest = rests + rest_capacity(k) - 1;
  for (int64_t g = 0; g < k / group; ++g) {
    const float* x = scratch + g * group;
    uint32_t largest = 0;
    for (int i = 0; i < group; ++i) {
      const uint32_t magnitude = __builtin_bit_cast(uint32_t, x[i]) & 0x7FFFFFFFU;
      largest = magnitude > largest ? magnitude : largest;
    }
    const auto exponent = static_cast<int>(largest >> 23) - 127;
    // From 2^111 on, a group's sum of code differences (below 2^15 in all) times activations could overflow.
    if (exponent > 110 || (largest != 0 && exponent < -100)) return false;
    // The largest magnitude is below 2^(exponent + 1): scaled by 2^(21 - exponent), below 2^22. All-zero: any scale
    // does.
    const float up = largest == 0 ? 0.0F : std::ldexp(1.0F, 21 - exponent);
    scales[g] = largest == 0 ? 0.0F : std::ldexp(1.0F, exponent - 21);
    int8_t* out = digits + g * group * kDigits;
    int32_t sum[kDigits] = {};
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the significand.
    constexpr float kMagic = 0x1.8p23F;
    bool exact = true;
    for (int b = 0; b < group / kBlock; ++b) {
      for (int i = 0; i < kBlock; ++i) {
        const float scaled = x[b * kBlock + order[i]] * up;
        const float shifted = scaled + kMagic;
        exact &= shifted - kMagic == scaled;
        const auto value = static_cast<int32_t>(__builtin_bit_cast(uint32_t, shifted) - 0x4B400000U);
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
    std::memcpy(sums + g * kDigits, sum, sizeof(sum));
    for (int i = 0; !exact && i < group; ++i) {
      const float rest = x[i] - (x[i] * up + kMagic - kMagic) * scales[g];
      if (rest == 0.0F) continue;
      if (rests == last_rest) return false;
      *rests++ = {.k = g * group + i, .value = rest};
    }
  }
  *rests = {.k = kNoRest};
  return true;
}

}  // namespace tilefuse
