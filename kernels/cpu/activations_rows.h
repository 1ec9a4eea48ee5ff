// Rows of activations as floats and as digits (matmul_kernels.h), for each instruction set's translation unit.
#pragma once

#include <cstring>

#include "activations.h"
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

// Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the significand.
inline constexpr float kMagic = 0x1.8p23F;
inline constexpr uint32_t kMagicBits = 0x4B400000U;

// write_digits by `Group`, which works on the activations of one group:
//   uint32_t largest_magnitude(const float* x, int group): as bits;
//   bool write_digits<kEvenFirst>(const float* x, int group, float up, int8_t* digits, int32_t* sums): the digits of
//   x up, below 2^22, and their sums; whether they hold all of it. kEvenFirst: the order 0 2 4 6 1 3 5 7 in a block.
template <typename Group>
bool write_digits_by(const MatmulArgs& args, int64_t row, int64_t k, float* scratch, int8_t* digits, float* scales,
                     int32_t* sums, DigitRest* rests) {
  const int group = args.layout.tile_group;
  load_row(args, row, k, scratch);
  const DigitRest* const last_rest = rests + rest_capacity(k) - 1;
  for (int64_t g = 0; g < k / group; ++g) {
    const float* x = scratch + g * group;
    const uint32_t largest = Group::largest_magnitude(x, group);
    const auto exponent = static_cast<int>(largest >> 23) - 127;
    // From 2^111 on, a group's sum of code differences (below 2^15 in all) times activations could overflow.
    if (exponent > 110 || (largest != 0 && exponent < -100)) return false;
    // The largest magnitude is below 2^(exponent + 1): scaled by 2^(21 - exponent), below 2^22. All-zero: any scale
    // does.
    const float up = largest == 0 ? 0.0F : power_of_two(21 - exponent);
    scales[g] = largest == 0 ? 0.0F : power_of_two(exponent - 21);
    int8_t* out = digits + g * group * kDigits;
    int32_t* sum = sums + g * kDigits;
    const bool exact = args.layout.bits == 4 ? Group::template write_digits<true>(x, group, up, out, sum)
                                             : Group::template write_digits<false>(x, group, up, out, sum);
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

}  // namespace
}  // namespace tilefuse
