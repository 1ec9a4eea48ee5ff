// What one instruction set provides to staging.cpp. Included by one translation unit a level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bf16.h"
#include "staging.h"

namespace tilefuse {

inline constexpr uint16_t kBf16Infinity = 0x7f80;

struct StagingKernels {
  // `count` channels of a row of x as bfloat16, from `row` on or, with `perm`, row[perm[i]].
  void (*load)(const void* row, Dtype dtype, const int32_t* perm, int64_t count, uint16_t* out);
  // bfloat16 [16 rows][128] to a band; returns the largest magnitude, as bits.
  uint16_t (*write_band)(const uint16_t* rows, std::byte* out);
};

const StagingKernels& staging_kernels_portable();
#if defined(__x86_64__)
const StagingKernels& staging_kernels_avx2();
const StagingKernels& staging_kernels_avx512();
#endif

namespace {

template <Dtype kType>
TILEFUSE_ALWAYS_INLINE uint16_t load_bf16(const std::byte* row, int64_t i) {
  // NumPy's arrays need not be aligned to their elements, hence the copies, which compile to plain loads.
  if constexpr (kType == Dtype::f32) {
    float value;
    std::memcpy(&value, row + i * 4, sizeof(value));
    return float_to_bf16(value);
  } else {
    uint16_t bits;
    std::memcpy(&bits, row + i * 2, sizeof(bits));
    return kType == Dtype::bf16 ? bits : float_to_bf16(half_to_float(bits));
  }
}

template <Dtype kType>
void load_as(const std::byte* row, const int32_t* perm, int64_t count, uint16_t* out) {
  if (perm == nullptr) {
    for (int64_t i = 0; i < count; ++i) out[i] = load_bf16<kType>(row, i);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = load_bf16<kType>(row, perm[i]);
  }
}

// The compiler vectorises it at the level of its translation unit.
[[maybe_unused]] void load_row(const void* row, Dtype dtype, const int32_t* perm, int64_t count, uint16_t* out) {
  const auto* bytes = static_cast<const std::byte*>(row);
  switch (dtype) {
    case Dtype::f32:
      return load_as<Dtype::f32>(bytes, perm, count, out);
    case Dtype::bf16:
      return load_as<Dtype::bf16>(bytes, perm, count, out);
    case Dtype::f16:
      return load_as<Dtype::f16>(bytes, perm, count, out);
  }
}

// Eight bfloat16 of a row share 128 bits. A value is (128 + m) 2^(f - 134), f its exponent and m its fraction; the unit
// that the largest of the eight sets, of exponent e, is 2^(e - 133), so mantissas are (128 + m) / 2^(e - f + 1). That
// is a product by a power of two of 16 bits: its upper half the quotient, its lower half what the rounding looks at.
//
// S has a vector of 16-bit lanes, kRows groups of eight, and: load, set1, the operations, lane_max (the largest,
// signed, of each eight in all of them), power (2^(16 - i), and 0 for i > 8), and store (of mantissas and exponents).
template <class S>
[[maybe_unused]] uint16_t write_band(const uint16_t* rows, std::byte* out) {
  using V = typename S::V;
  const V magnitude_bits = S::set1(0x7fff);
  const V fraction_bits = S::set1(0x7f);
  const V one = S::set1(1);
  V seen = S::set1(0);
  for (int k = 0; k < kKt; k += kBlock) {
    for (int r = 0; r < kBandRows; r += S::kRows) {
      const V given = S::load(rows + r * kKt + k);
      // Denormals count as zero.
      const V normal = S::greater(S::and_(given, magnitude_bits), fraction_bits);
      const V bits = S::and_(given, normal);
      const V magnitude = S::and_(bits, magnitude_bits);
      const V largest = S::lane_max(magnitude);
      seen = S::max(seen, largest);
      // The largest fraction rounds to 128, which only a negative mantissa can be: then all eight take the next unit.
      const V full = S::equal(S::lane_max(bits), S::or_(largest, fraction_bits));
      const V exponent = S::sub(S::template shift_right<7>(largest), full);
      const V shift = S::sub(S::add(exponent, one), S::template shift_right<7>(magnitude));
      const V significand = S::or_(S::and_(magnitude, fraction_bits), S::and_(normal, S::set1(0x80)));
      const V factor = S::power(shift);
      const V quotient = S::multiply_high(significand, factor);
      const V rest = S::multiply_low(significand, factor);
      // Up from half a unit on if odd, else beyond it: rest - 2^15 > -odd.
      const V up = S::greater(S::xor_(rest, S::set1(-0x8000)), S::sub(S::set1(0), S::and_(quotient, one)));
      S::store(out + k / kBlock * (kBandRows * 9) + r * 9, S::with_sign(S::sub(quotient, up), bits), exponent);
    }
  }
  return S::largest(seen);
}

}  // namespace
}  // namespace tilefuse
