// Conversion to bfp16ebs8 and its products, the arithmetic that AIE2P documents only by example. The model:
//
// - fp32 -> bfp16: the shared exponent is the largest of the 8; each value is rounded, in the core's mode, to a
// multiple of
//   2^(exponent - 127 - 6). If a value then falls outside [-128, 127], the exponent goes up by one and all 8 are
//   rounded again from what they were. fp32 denormals count as zero; Inf and NaN are not defined (a design must not
//   make them). For finite normal bfloat16 in conv_even this is what hardware was seen to do, byte for byte, by others.
// - dot product of 8: the integer sum of mantissa products is exact, and so is its scaling; the result, rounded to fp32
// (a
//   rounding that only under- or overflow makes visible), is added to the fp32 accumulator with one rounding to nearest
//   even. Hardware may keep a few bits fewer when it aligns the sum with the accumulator.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "count.hpp"
#include "native.hpp"
#include "rounding.hpp"

namespace aie::detail {

// 2^n, for n in the range of double's normal exponents.
[[gnu::always_inline]] inline double power_of_2(int n) {
  return std::bit_cast<double>(static_cast<uint64_t>(n + 1023) << 52);
}

[[gnu::always_inline]] inline unsigned exponent_field(float x) { return (std::bit_cast<uint32_t>(x) >> 23) & 0xffu; }

// 8 values -> 8 mantissas (as integers in doubles) at the given exponent.
template <rounding_mode Mode>
[[gnu::always_inline]] inline bool round_mantissas(const double* x, unsigned exponent, double* mantissas) {
  const double to_unit = power_of_2(133 - static_cast<int>(exponent));
  int outside = 0;
  for (int i = 0; i < 8; ++i) {
    mantissas[i] = round_to_integer<Mode>(x[i] * to_unit);
    outside |= static_cast<int>(mantissas[i] > 127) | static_cast<int>(mantissas[i] < -128);
  }
  return outside == 0;
}

template <rounding_mode Mode>
inline void convert_block(const float* x, int8_t* mantissas, uint8_t* exponent) {
  unsigned largest = 0;
  std::array<double, 8> wide;
  for (int i = 0; i < 8; ++i) {
    const unsigned field = exponent_field(x[i]);
    largest = field > largest ? field : largest;
    wide[i] = field == 0 ? 0.0 : static_cast<double>(x[i]);
  }
  if (largest == 255) {
    count::fault("an Inf or NaN is converted to bfp16, which has neither", 0, 0);
    wide.fill(0.0);
  }
  std::array<double, 8> rounded;
  if (!round_mantissas<Mode>(wide.data(), largest, rounded.data()))
    round_mantissas<Mode>(wide.data(), ++largest, rounded.data());
  for (int i = 0; i < 8; ++i) mantissas[i] = static_cast<int8_t>(static_cast<int>(rounded[i]));
  *exponent = static_cast<uint8_t>(largest);
}

// 64 values, 8 blocks of 8. This and the next are out of line: a kernel has dozens of them, and inlining all would make
// its compilation slow and its code no faster.
[[gnu::noinline]] inline v64bfp16ebs8 to_bfp16(const float* x) {
  std::array<int8_t, 64> mantissas;
  std::array<uint8_t, 8> exponents;
  with_rounding_mode([&](auto mode) {
    for (int block = 0; block < 8; ++block)
      convert_block<decltype(mode)::value>(x + 8 * block, mantissas.data() + 8 * block, &exponents[block]);
  });
  v64bfp16ebs8 result;
  std::memcpy(&result.mantissa, mantissas.data(), 64);
  std::memcpy(&result.exponent, exponents.data(), 8);
  return result;
}

inline void from_bfp16(const v64bfp16ebs8& v, float* x) {
  for (int i = 0; i < 64; ++i) {
    const auto exponent = static_cast<uint8_t>(v.exponent[i / 8]);
    x[i] = static_cast<float>(v.mantissa[i] * power_of_2(static_cast<int>(exponent) - 133));
  }
}

// acc[m][n] = (Accumulate ? acc[m][n] : 0) + A[m][:] . B[n][:] for M rows of A and N of B, 8 values each.
template <bool Accumulate, unsigned M, unsigned N>
[[gnu::noinline]] inline void bfp16_mac(const int8_t* a, const uint8_t* a_exponents, const int8_t* b,
                                        const uint8_t* b_exponents, float* acc) {
  // fp32 holds every partial sum: at most 8 * 128 * 128 = 2^17. k-major, so that the loop over n vectorises.
  std::array<float, 8 * N> b_by_k;
  for (unsigned n = 0; n < N; ++n)
    for (unsigned k = 0; k < 8; ++k) b_by_k[N * k + n] = static_cast<float>(b[8 * n + k]);
  std::array<double, N> b_scale;
  for (unsigned n = 0; n < N; ++n) b_scale[n] = power_of_2(b_exponents[n] - 133);
  for (unsigned m = 0; m < M; ++m) {
    std::array<float, N> dots{};
    for (unsigned k = 0; k < 8; ++k) {
      const auto a_mk = static_cast<float>(a[8 * m + k]);
      for (unsigned n = 0; n < N; ++n) dots[n] += a_mk * b_by_k[N * k + n];
    }
    const double a_scale = power_of_2(a_exponents[m] - 133);
    for (unsigned n = 0; n < N; ++n) {
      const auto dot = static_cast<float>(dots[n] * (a_scale * b_scale[n]));
      acc[N * m + n] = Accumulate ? acc[N * m + n] + dot : dot;
    }
  }
}

}  // namespace aie::detail
