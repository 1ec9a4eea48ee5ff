// aie::vector: a register of N elements of type T, 128 bits to 4096 (native registers have 256, 512 and 1024 bits; the
// device's library makes larger ones of several).
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <utility>

#include "count.hpp"
#include "native.hpp"
#include "types.hpp"

namespace aie {

template <ElemBaseType T, unsigned Elems>
class vector;

namespace detail {

constexpr bool is_power_of_2(unsigned n) { return n != 0 && (n & (n - 1)) == 0; }

// Registers are aliased down to 256 bits; a smaller part has to be moved.
constexpr unsigned moves(unsigned bits) { return bits < 256 ? 1 : 0; }

template <typename T, unsigned Elems>
struct native_vector {};  // most have a native type whose name no kernel needs
template <>
struct native_vector<int8, 64> {
  using type = v64int8;
};
template <>
struct native_vector<uint8, 64> {
  using type = v64uint8;
};

template <typename T, unsigned Elems>
concept HasNativeVector = requires { typename native_vector<T, Elems>::type; };

}  // namespace detail

template <ElemBaseType T, unsigned Elems>
class vector {
  static constexpr unsigned bits_ = detail::type_bits_v<T> * Elems;
  static_assert(detail::is_power_of_2(Elems) && bits_ >= 128 && bits_ <= 4096,
                "a vector has 128 to 4096 bits, and a power of two elements");

 public:
  using value_type = T;
  // The stored form: nibbles are kept two to a byte.
  static constexpr unsigned stored = detail::is_nibble<T> ? Elems / 2 : Elems;

  static constexpr unsigned type_bits() { return detail::type_bits_v<T>; }
  static constexpr unsigned size() { return Elems; }
  static constexpr unsigned bits() { return bits_; }
  static constexpr unsigned bytes() { return bits_ / 8; }
  static constexpr bool is_signed() { return detail::is_one_of<T, int4, int8, int16, int32, bfloat16, float>; }

  // Undefined values, as on the device; a debug build makes them conspicuous.
  vector() {
#ifndef NDEBUG
    std::memset(data.data(), 0xff, sizeof data);
#endif
  }

  template <typename Native>
    requires(detail::HasNativeVector<T, Elems> &&
             std::is_same_v<Native, typename detail::native_vector<T, Elems>::type>)
  vector(const Native& native) {
    std::memcpy(data.data(), &native, sizeof native);
  }

  auto to_native() const
    requires detail::HasNativeVector<T, Elems>
  {
    typename detail::native_vector<T, Elems>::type native;
    std::memcpy(&native, data.data(), sizeof native);
    return native;
  }

  [[nodiscard]] T get(unsigned i) const {
    ++detail::count::now().mv;
    if constexpr (detail::is_nibble<T>) {
      const unsigned nibble = (data[i / 2] >> (i % 2 * 4)) & 15u;
      if constexpr (std::is_same_v<T, int4>)
        return T{static_cast<int8_t>(static_cast<int>(nibble ^ 8u) - 8)};
      else
        return T{static_cast<uint8_t>(nibble)};
    } else {
      return data[i];
    }
  }

  void set(T value, unsigned i)
    requires(!detail::is_nibble<T>)
  {
    ++detail::count::now().mv;
    data[i] = value;
  }

  // Reading an element by index; writing goes through set().
  [[nodiscard]] T operator[](unsigned i) const { return get(i); }

  template <unsigned ElemsOut>
  [[nodiscard]] vector<T, ElemsOut> extract(unsigned i) const {
    static_assert(ElemsOut <= Elems);
    using part = vector<T, ElemsOut>;
    if constexpr (ElemsOut != Elems) detail::count::now().mv += detail::moves(part::bits());
    part result;
    std::copy_n(data.data() + static_cast<size_t>(i) * part::stored, part::stored, result.data.data());
    return result;
  }

  template <unsigned ElemsIn>
  vector& insert(unsigned i, const vector<T, ElemsIn>& part) {
    static_assert(ElemsIn <= Elems);
    if constexpr (ElemsIn != Elems) detail::count::now().mv += detail::moves(part.bits());
    std::copy_n(part.data.data(), part.stored, data.data() + static_cast<size_t>(i) * part.stored);
    return *this;
  }

  // The other elements are undefined.
  template <unsigned ElemsOut>
  [[nodiscard]] vector<T, ElemsOut> grow(unsigned i = 0) const {
    static_assert(ElemsOut >= Elems);
    vector<T, ElemsOut> result;
    result.insert(i, *this);
    return result;
  }

  // A shuffle for each doubling within a 512-bit register, a move for each register beyond the first.
  template <unsigned ElemsOut>
  [[nodiscard]] vector<T, ElemsOut> grow_replicate() const {
    static_assert(ElemsOut >= Elems);
    vector<T, ElemsOut> result;
    for (unsigned i = 0; i < ElemsOut / Elems; ++i)
      std::copy_n(data.data(), stored, result.data.data() + static_cast<size_t>(i) * stored);
    unsigned width = bits_;
    for (; width < result.bits() && width < 512; width *= 2) ++detail::count::now().mv;
    detail::count::now().mv += result.bits() > 512 && width < result.bits() ? result.bits() / width - 1 : 0;
    return result;
  }

  template <unsigned ElemsOut>
  [[nodiscard]] vector<T, ElemsOut> grow_extract(unsigned i) const {
    if constexpr (ElemsOut > Elems)
      return grow<ElemsOut>();
    else
      return extract<ElemsOut>(i);
  }

  template <unsigned ElemsOut>
  [[nodiscard]] auto split() const {
    return [this]<size_t... I>(std::index_sequence<I...>) {
      return std::make_tuple(extract<ElemsOut>(I)...);
    }(std::make_index_sequence<Elems / ElemsOut>{});
  }

  // The same bits as elements of another type.
  template <ElemBaseType To>
  [[nodiscard]] auto cast_to() const {
    vector<To, bits_ / detail::type_bits_v<To>> result;
    std::memcpy(result.data.data(), data.data(), sizeof data);
    return result;
  }

  // Each element of twice the width (convert.hpp).
  template <typename To>
  [[nodiscard]] vector<To, Elems> unpack() const;
  [[nodiscard]] auto unpack() const;

  alignas(std::min(bits_ / 8, 64u)) std::array<detail::element_t<T>, stored> data;
};

// Native register -> vector, for the deduction that a kernel's `aie::vector v = native;` asks for.
vector(v64int8) -> vector<int8, 64>;
vector(v64uint8) -> vector<uint8, 64>;

namespace detail {
template <typename V>
struct vector_traits : std::false_type {};
template <typename T, unsigned Elems>
struct vector_traits<vector<T, Elems>> : std::true_type {};

template <typename V, typename... Vs>
inline constexpr bool all_same = (std::is_same_v<V, Vs> && ...);
}  // namespace detail

template <typename V>
concept Vector = detail::vector_traits<V>::value;

template <ElemBaseType DstT, Vector Vec>
[[nodiscard]] auto vector_cast(const Vec& v) {
  return v.template cast_to<DstT>();
}

// Registers that follow one another: no instruction from 256 bits on.
template <Vector Vec, Vector... Vectors>
  requires(detail::all_same<Vec, Vectors...>)
[[nodiscard]] auto concat(const Vec& v, const Vectors&... vectors) {
  vector<typename Vec::value_type, Vec::size() * (1 + sizeof...(Vectors))> result;
  unsigned i = 0;
  result.insert(i++, v);
  (result.insert(i++, vectors), ...);
  return result;
}

template <ElemBaseType T, unsigned Elems>
[[nodiscard]] vector<T, Elems> zeros() {
  vector<T, Elems> result;
  std::memset(result.data.data(), 0, sizeof result.data);
  detail::count::now().mv += detail::div_up(result.bits(), 512);
  return result;
}

// One instruction fills a 512-bit register; wider ones are copies of it.
template <typename T, unsigned Elems>
  requires(ElemBaseType<T> && !detail::is_nibble<T>)
[[nodiscard]] vector<T, Elems> broadcast(std::type_identity_t<T> value) {
  vector<T, Elems> result;
  result.data.fill(value);
  detail::count::now().mv += detail::div_up(result.bits(), 512);
  return result;
}

}  // namespace aie
