// Comparisons, masks and choices between lanes; minima and maxima. One instruction for each 512 bits; masks are scalar
// registers. Integers only: how the device's library compares floating-point vectors is not emulated.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "count.hpp"
#include "types.hpp"
#include "vector.hpp"

namespace aie {

template <unsigned Elems>
class mask {
  static_assert(detail::is_power_of_2(Elems) && Elems >= 4 && Elems <= 64, "masks of 4 to 64 lanes are emulated");
  static constexpr uint64_t all = Elems == 64 ? ~uint64_t{0} : (uint64_t{1} << (Elems % 64)) - 1;

 public:
  static constexpr unsigned size() { return Elems; }

  explicit constexpr mask(bool initial_set = false) : bits_(initial_set ? all : 0) {}

  static constexpr mask from_uint32(uint32_t word)
    requires(Elems <= 32)
  {
    return of(word);
  }
  static constexpr mask from_uint64(uint64_t word)
    requires(Elems == 64)
  {
    return of(word);
  }
  [[nodiscard]] constexpr uint32_t to_uint32() const
    requires(Elems <= 32)
  {
    return static_cast<uint32_t>(bits_);
  }
  [[nodiscard]] constexpr uint64_t to_uint64() const
    requires(Elems == 64)
  {
    return bits_;
  }

  [[nodiscard]] constexpr bool test(unsigned i) const { return (bits_ >> i & 1u) != 0; }
  constexpr void set(unsigned i) { bits_ |= uint64_t{1} << i; }

  template <unsigned ElemsOut>
  [[nodiscard]] constexpr mask<ElemsOut> extract(unsigned i) const {
    static_assert(ElemsOut <= Elems);
    mask<ElemsOut> part;
    for (unsigned j = 0; j < ElemsOut; ++j)
      if (test(i * ElemsOut + j)) part.set(j);
    return part;
  }

  [[nodiscard]] constexpr mask operator&(const mask& other) const { return of(bits_ & other.bits_); }
  [[nodiscard]] constexpr mask operator|(const mask& other) const { return of(bits_ | other.bits_); }
  [[nodiscard]] constexpr mask operator~() const { return of(~bits_); }
  [[nodiscard]] constexpr bool operator==(const mask& other) const { return bits_ == other.bits_; }

 private:
  static constexpr mask of(uint64_t word) {
    mask result;
    result.bits_ = word & all;
    return result;
  }

  uint64_t bits_;
};

namespace detail {

template <typename T>
inline constexpr bool is_compared = is_integer<T> && !is_nibble<T>;

template <typename T, unsigned Elems, typename F>
inline mask<Elems> compare(const vector<T, Elems>& a, const vector<T, Elems>& b, F&& f) {
  mask<Elems> result;
  for (unsigned i = 0; i < Elems; ++i)
    if (f(a.data[i], b.data[i])) result.set(i);
  count::now().mv += div_up(a.bits(), 512);
  return result;
}

template <typename T, unsigned Elems, typename F>
inline vector<T, Elems> choose(const vector<T, Elems>& a, const vector<T, Elems>& b, F&& f) {
  vector<T, Elems> result;
  for (unsigned i = 0; i < Elems; ++i) result.data[i] = f(a.data[i], b.data[i]);
  count::now().mv += div_up(a.bits(), 512);
  return result;
}

}  // namespace detail

template <ElemBaseType T, unsigned Elems>
  requires(detail::is_compared<T> && Elems <= 64)
[[nodiscard]] mask<Elems> lt(const vector<T, Elems>& a, const vector<T, Elems>& b) {
  return detail::compare(a, b, [](T x, T y) { return x < y; });
}
template <ElemBaseType T, unsigned Elems>
  requires(detail::is_compared<T> && Elems <= 64)
[[nodiscard]] mask<Elems> lt(const vector<T, Elems>& a, std::same_as<T> auto b) {
  return lt(a, broadcast<T, Elems>(b));
}
template <ElemBaseType T, unsigned Elems>
  requires(detail::is_compared<T> && Elems <= 64)
[[nodiscard]] mask<Elems> ge(const vector<T, Elems>& a, const vector<T, Elems>& b) {
  return detail::compare(a, b, [](T x, T y) { return x >= y; });
}
template <ElemBaseType T, unsigned Elems>
  requires(detail::is_compared<T> && Elems <= 64)
[[nodiscard]] mask<Elems> ge(const vector<T, Elems>& a, std::same_as<T> auto b) {
  return ge(a, broadcast<T, Elems>(b));
}

template <ElemBaseType T, unsigned Elems>
  requires detail::is_compared<T>
[[nodiscard]] vector<T, Elems> max(const vector<T, Elems>& a, const vector<T, Elems>& b) {
  return detail::choose(a, b, [](T x, T y) { return std::max(x, y); });
}
template <ElemBaseType T, unsigned Elems>
  requires detail::is_compared<T>
[[nodiscard]] vector<T, Elems> min(const vector<T, Elems>& a, const vector<T, Elems>& b) {
  return detail::choose(a, b, [](T x, T y) { return std::min(x, y); });
}

// Lane i of `a` where bit i is 0, of `b` where it is 1. Any type: bits are moved.
template <ElemBaseType T, unsigned Elems>
  requires(!detail::is_nibble<T>)
[[nodiscard]] vector<T, Elems> select(const vector<T, Elems>& a, const vector<T, Elems>& b, const mask<Elems>& m) {
  vector<T, Elems> result;
  for (unsigned i = 0; i < Elems; ++i) result.data[i] = m.test(i) ? b.data[i] : a.data[i];
  detail::count::now().mv += detail::div_up(a.bits(), 512);
  return result;
}

}  // namespace aie
