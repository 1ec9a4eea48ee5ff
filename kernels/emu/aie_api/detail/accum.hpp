// aie::accum: fp32 or int32 accumulators.
//
// The device's library also accepts from_vector of integers into accfloat and to_vector of integers out of it, and
// reinterprets the bits. That is never meant, and does not compile here; cast_to says it when it is meant.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "bfp16.hpp"
#include "block_vector.hpp"
#include "count.hpp"
#include "rounding.hpp"
#include "types.hpp"
#include "vector.hpp"

namespace aie {

namespace detail {

template <typename Tag>
using accum_element_t = std::conditional_t<std::is_same_v<Tag, accfloat>, float, int32_t>;

template <typename Tag, typename T>
inline constexpr bool accum_from = std::is_same_v<Tag, accfloat> ? is_one_of<T, bfloat16, float> : is_integer<T>;

}  // namespace detail

template <AccumElemBaseType Tag, unsigned Elems>
class accum {
  static_assert(detail::is_power_of_2(Elems) && Elems >= 4 && Elems <= 128, "an accumulator has 4 to 128 lanes");

 public:
  using value_type = Tag;
  using element = detail::accum_element_t<Tag>;

  static constexpr unsigned size() { return Elems; }
  static constexpr unsigned accum_bits() { return 32; }
  static constexpr unsigned bits() { return 32 * Elems; }
  static constexpr bool is_floating_point() { return std::is_same_v<Tag, accfloat>; }

  accum() {
#ifndef NDEBUG
    std::memset(data.data(), 0xff, sizeof data);
#endif
  }

  template <ElemBaseType T>
    requires(detail::accum_from<Tag, T>)
  explicit accum(const vector<T, Elems>& v, int shift = 0) {
    from_vector(v, shift);
  }

  template <ElemBaseType T>
    requires(detail::accum_from<Tag, T>)
  accum& operator=(const vector<T, Elems>& v) {
    from_vector(v);
    return *this;
  }

  // bfloat16: one conversion for 32 lanes. Integers: one vups for 64 lanes, shifted left. fp32: the same bits.
  template <ElemBaseType T>
    requires(detail::accum_from<Tag, T>)
  void from_vector(const vector<T, Elems>& v, int shift = 0) {
    if constexpr (std::is_same_v<T, float>) {
      data = v.data;
    } else if constexpr (std::is_same_v<T, bfloat16>) {
      for (unsigned i = 0; i < Elems; ++i) data[i] = static_cast<float>(v.data[i]);
      detail::count::now().mv += detail::div_up(Elems, 32);
    } else {
      static_assert(!detail::is_nibble<T>, "unpack 4-bit elements first");
      for (unsigned i = 0; i < Elems; ++i) data[i] = static_cast<int32_t>(static_cast<uint32_t>(v.data[i]) << shift);
      detail::count::now().mv += detail::div_up(Elems, 64);
    }
  }

  // A multiplication by the identity: exact, but for what fp32 can't hold.
  template <BlockType T>
    requires(std::is_same_v<Tag, accfloat> && Elems == 64)
  explicit accum(const block_vector<T, Elems>& v) {
    from_vector(v);
  }
  template <BlockType T>
    requires(std::is_same_v<Tag, accfloat> && Elems == 64)
  void from_vector(const block_vector<T, Elems>& v) {
    detail::from_bfp16(v, data.data());
    ++detail::count::now().vec;
  }

  // Narrows in the core's rounding mode.
  template <ElemBaseType T>
    requires(std::is_same_v<Tag, accfloat> && detail::is_one_of<T, bfloat16, float>)
  [[nodiscard]] vector<T, Elems> to_vector() const {
    vector<T, Elems> result;
    if constexpr (std::is_same_v<T, float>) {
      result.data = data;
    } else {
      detail::narrow_to_bf16(data.data(), result.data.data(), Elems);
      detail::count::now().st += detail::div_up(Elems, 32);
    }
    return result;
  }

  template <BlockType T>
    requires(std::is_same_v<Tag, accfloat> && Elems == 64)
  [[nodiscard]] block_vector<T, Elems> to_vector() const {
    ++detail::count::now().st;
    return detail::to_bfp16(data.data());
  }

  template <unsigned ElemsOut>
  [[nodiscard]] accum<Tag, ElemsOut> extract(unsigned i) const {
    static_assert(ElemsOut <= Elems);
    accum<Tag, ElemsOut> result;
    std::copy_n(data.data() + static_cast<size_t>(i) * ElemsOut, ElemsOut, result.data.data());
    return result;
  }

  template <unsigned ElemsIn>
  accum& insert(unsigned i, const accum<Tag, ElemsIn>& part) {
    static_assert(ElemsIn <= Elems);
    std::copy_n(part.data.data(), ElemsIn, data.data() + static_cast<size_t>(i) * ElemsIn);
    return *this;
  }

  template <unsigned ElemsOut>
  [[nodiscard]] accum<Tag, ElemsOut> grow() const {
    static_assert(ElemsOut >= Elems);
    accum<Tag, ElemsOut> result;
    result.insert(0, *this);
    return result;
  }

  // The same bits under another tag.
  template <AccumElemBaseType To>
  [[nodiscard]] accum<To, Elems> cast_to() const {
    accum<To, Elems> result;
    std::memcpy(result.data.data(), data.data(), sizeof data);
    return result;
  }

  alignas(std::min(4 * Elems, 64u)) std::array<element, Elems> data;
};

namespace detail {
template <typename A>
struct accum_traits : std::false_type {};
template <typename Tag, unsigned Elems>
struct accum_traits<accum<Tag, Elems>> : std::true_type {};
}  // namespace detail

template <typename A>
concept Accum = detail::accum_traits<A>::value;

template <Accum Acc, Accum... Accums>
  requires(detail::all_same<Acc, Accums...>)
[[nodiscard]] auto concat(const Acc& acc, const Accums&... accums) {
  accum<typename Acc::value_type, Acc::size() * (1 + sizeof...(Accums))> result;
  unsigned i = 0;
  result.insert(i++, acc);
  (result.insert(i++, accums), ...);
  return result;
}

template <AccumElemBaseType Tag, unsigned Elems>
[[nodiscard]] accum<Tag, Elems> zeros() {
  accum<Tag, Elems> result;
  result.data.fill(0);
  detail::count::now().mv += detail::div_up(Elems, 64);
  return result;
}

}  // namespace aie

using v64accfloat = aie::accum<accfloat, 64>;
using v32accfloat = aie::accum<accfloat, 32>;
