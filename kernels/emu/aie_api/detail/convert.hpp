// Conversions between vectors: unpack, to_float; and exp2.
#pragma once

#include <cmath>

#include "accum.hpp"
#include "count.hpp"
#include "types.hpp"
#include "vector.hpp"

namespace aie {

namespace detail {
template <typename T>
struct unpacked;  // the types that the hardware widens, each to twice its width
template <>
struct unpacked<int4> {
  using type = int8;
};
template <>
struct unpacked<uint4> {
  using type = uint8;
};
template <>
struct unpacked<int8> {
  using type = int16;
};
template <>
struct unpacked<uint8> {
  using type = uint16;
};

// Nibbles sign- or zero-extended, bytes likewise.
template <typename To, typename T, unsigned Elems>
[[gnu::noinline]] inline vector<To, Elems> widen(const vector<T, Elems>& v) {
  vector<To, Elems> result;
  if constexpr (is_nibble<T>) {
    for (unsigned i = 0; i < Elems / 2; ++i) {
      const unsigned low = v.data[i] & 15u;
      const unsigned high = v.data[i] >> 4;
      if constexpr (std::is_same_v<T, int4>) {
        result.data[2 * i] = static_cast<To>(static_cast<int>(low ^ 8u) - 8);
        result.data[2 * i + 1] = static_cast<To>(static_cast<int>(high ^ 8u) - 8);
      } else {
        result.data[2 * i] = static_cast<To>(low);
        result.data[2 * i + 1] = static_cast<To>(high);
      }
    }
  } else {
    for (unsigned i = 0; i < Elems; ++i) result.data[i] = static_cast<To>(v.data[i]);
  }
  return result;
}

template <typename T>
using unpacked_t = typename unpacked<T>::type;
}  // namespace detail

// One instruction of the second load unit turns 512 bits into 1024.
template <ElemBaseType T, unsigned Elems>
template <typename To>
vector<To, Elems> vector<T, Elems>::unpack() const {
  static_assert(std::is_same_v<To, detail::unpacked_t<T>>, "unpack doubles the width and keeps the sign");
  detail::count::now().ldb += detail::div_up(bits(), 512);
  return detail::widen<To>(*this);
}

template <ElemBaseType T, unsigned Elems>
auto vector<T, Elems>::unpack() const {
  return this->template unpack<detail::unpacked_t<T>>();
}

template <Vector Vec>
[[nodiscard]] auto unpack(const Vec& v) {
  return v.unpack();
}

// Integers of up to 16 bits, times 2^-shift, exact but for the final narrowing: the device adds them to the mantissa of
// a constant in an integer accumulator and subtracts the constant as a float. bfloat16 results round in the core's
// mode.
template <ElemBaseType TR = float, ElemBaseType T, unsigned Elems>
  requires(detail::is_one_of<TR, bfloat16, float> && detail::is_integer<T> && detail::type_bits_v<T> <= 16)
[[nodiscard, gnu::noinline]] vector<TR, Elems> to_float(const vector<T, Elems>& v, int shift = 0) {
  const auto wide = detail::widen<int32>(v);
  accum<accfloat, Elems> exact;
  const auto unit = static_cast<float>(detail::power_of_2(-shift));
  for (unsigned i = 0; i < Elems; ++i) exact.data[i] = static_cast<float>(wide.data[i]) * unit;
  detail::count::slots& now = detail::count::now();
  if constexpr (detail::is_nibble<T>) now.ldb += detail::div_up(v.bits(), 512);
  now.mv += detail::div_up(Elems, 64);
  now.vec += 2 * detail::div_up(Elems, 64);
  return exact.template to_vector<TR>();
}

// 2^x, of fp32, and only as bfloat16. Model: the power rounded to fp32, then narrowed in the core's mode; one below the
// normal range is 0. One instruction for 16 lanes.
template <typename TR = bfloat16, unsigned Elems>
  requires std::is_same_v<TR, bfloat16>
[[nodiscard, gnu::noinline]] vector<TR, Elems> exp2(const vector<float, Elems>& v) {
  std::array<float, Elems> powers;
  for (unsigned i = 0; i < Elems; ++i)
    powers[i] = v.data[i] < -126.0f ? 0.0f : static_cast<float>(std::exp2(static_cast<double>(v.data[i])));
  vector<TR, Elems> result;
  detail::narrow_to_bf16(powers.data(), result.data.data(), Elems);
  detail::count::now().mv += detail::div_up(Elems, 16);
  return result;
}

}  // namespace aie
