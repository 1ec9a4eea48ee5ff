// Element-wise arithmetic. bfloat16 products are exact in fp32; an accumulation rounds once, to nearest even whatever
// the core's mode (model: the modes govern conversions).
#pragma once

#include "accum.hpp"
#include "count.hpp"
#include "types.hpp"
#include "vector.hpp"

namespace aie {

namespace detail {

enum class product { mul, negmul, mac, msc };

template <product Op, unsigned Elems>
[[gnu::noinline]] inline accum<accfloat, Elems> multiply(const vector<bfloat16, Elems>& a,
                                                         const vector<bfloat16, Elems>& b,
                                                         const accum<accfloat, Elems>* acc = nullptr) {
  accum<accfloat, Elems> result;
  for (unsigned i = 0; i < Elems; ++i) {
    const float p = static_cast<float>(a.data[i]) * static_cast<float>(b.data[i]);
    if constexpr (Op == product::mul) result.data[i] = p;
    if constexpr (Op == product::negmul) result.data[i] = -p;
    if constexpr (Op == product::mac) result.data[i] = acc->data[i] + p;
    if constexpr (Op == product::msc) result.data[i] = acc->data[i] - p;
  }
  count::now().vec += div_up(Elems, 64);
  return result;
}

template <unsigned Elems>
using bf16_vector = vector<bfloat16, Elems>;

}  // namespace detail

// mul, negmul, mac, msc of bfloat16: vector by vector, or by a scalar, which is broadcast first.
#define TF_EMU_PRODUCTS(name)                                                                                \
  template <AccumElemBaseType Tag = accfloat, unsigned Elems>                                                \
    requires std::is_same_v<Tag, accfloat>                                                                   \
  [[nodiscard]] accum<Tag, Elems> name(const vector<bfloat16, Elems>& a, const vector<bfloat16, Elems>& b) { \
    return detail::multiply<detail::product::name>(a, b);                                                    \
  }                                                                                                          \
  template <AccumElemBaseType Tag = accfloat, unsigned Elems>                                                \
    requires std::is_same_v<Tag, accfloat>                                                                   \
  [[nodiscard]] accum<Tag, Elems> name(const vector<bfloat16, Elems>& a, std::same_as<bfloat16> auto b) {    \
    return detail::multiply<detail::product::name>(a, broadcast<bfloat16, Elems>(b));                        \
  }                                                                                                          \
  template <AccumElemBaseType Tag = accfloat, unsigned Elems>                                                \
    requires std::is_same_v<Tag, accfloat>                                                                   \
  [[nodiscard]] accum<Tag, Elems> name(std::same_as<bfloat16> auto a, const vector<bfloat16, Elems>& b) {    \
    return detail::multiply<detail::product::name>(broadcast<bfloat16, Elems>(a), b);                        \
  }
TF_EMU_PRODUCTS(mul)
TF_EMU_PRODUCTS(negmul)
#undef TF_EMU_PRODUCTS

#define TF_EMU_ACCUMULATIONS(name)                                                                               \
  template <unsigned Elems>                                                                                      \
  [[nodiscard]] accum<accfloat, Elems> name(const accum<accfloat, Elems>& acc, const vector<bfloat16, Elems>& a, \
                                            const vector<bfloat16, Elems>& b) {                                  \
    return detail::multiply<detail::product::name>(a, b, &acc);                                                  \
  }                                                                                                              \
  template <unsigned Elems>                                                                                      \
  [[nodiscard]] accum<accfloat, Elems> name(const accum<accfloat, Elems>& acc, const vector<bfloat16, Elems>& a, \
                                            std::same_as<bfloat16> auto b) {                                     \
    return detail::multiply<detail::product::name>(a, broadcast<bfloat16, Elems>(b), &acc);                      \
  }                                                                                                              \
  template <unsigned Elems>                                                                                      \
  [[nodiscard]] accum<accfloat, Elems> name(const accum<accfloat, Elems>& acc, std::same_as<bfloat16> auto a,    \
                                            const vector<bfloat16, Elems>& b) {                                  \
    return detail::multiply<detail::product::name>(broadcast<bfloat16, Elems>(a), b, &acc);                      \
  }
TF_EMU_ACCUMULATIONS(mac)
TF_EMU_ACCUMULATIONS(msc)
#undef TF_EMU_ACCUMULATIONS

namespace detail {

// Integers wrap, as in the core's vector adder.
template <bool Subtract, typename E>
inline E sum(E a, E b) {
  if constexpr (std::is_same_v<E, float>) {
    return Subtract ? a - b : a + b;
  } else {
    const auto x = static_cast<uint32_t>(a);
    const auto y = static_cast<uint32_t>(b);
    return static_cast<E>(Subtract ? x - y : x + y);
  }
}

template <bool Subtract, typename Tag, unsigned Elems>
[[gnu::noinline]] inline accum<Tag, Elems> sum_accums(const accum<Tag, Elems>& a, const accum<Tag, Elems>& b) {
  accum<Tag, Elems> result;
  for (unsigned i = 0; i < Elems; ++i) result.data[i] = sum<Subtract>(a.data[i], b.data[i]);
  count::now().vec += div_up(Elems, 64);
  return result;
}

// Integers: one instruction a register. bfloat16: widened, summed in accumulators, narrowed in the core's mode.
template <bool Subtract, typename T, unsigned Elems>
[[gnu::noinline]] inline vector<T, Elems> sum_vectors(const vector<T, Elems>& a, const vector<T, Elems>& b) {
  if constexpr (is_one_of<T, bfloat16, float>) {
    return sum_accums<Subtract>(accum<accfloat, Elems>(a), accum<accfloat, Elems>(b)).template to_vector<T>();
  } else {
    static_assert(!is_nibble<T>, "there is no 4-bit vector arithmetic");
    vector<T, Elems> result;
    for (unsigned i = 0; i < Elems; ++i) result.data[i] = sum<Subtract>(a.data[i], b.data[i]);
    count::now().mv += div_up(a.bits(), 512);
    return result;
  }
}

}  // namespace detail

template <AccumElemBaseType Tag, unsigned Elems>
[[nodiscard]] accum<Tag, Elems> add(const accum<Tag, Elems>& a, const accum<Tag, Elems>& b) {
  return detail::sum_accums<false>(a, b);
}
template <AccumElemBaseType Tag, unsigned Elems>
[[nodiscard]] accum<Tag, Elems> sub(const accum<Tag, Elems>& a, const accum<Tag, Elems>& b) {
  return detail::sum_accums<true>(a, b);
}

// The vector is converted to an accumulator first.
template <AccumElemBaseType Tag, ElemBaseType T, unsigned Elems>
  requires(detail::accum_from<Tag, T>)
[[nodiscard]] accum<Tag, Elems> add(const accum<Tag, Elems>& a, const vector<T, Elems>& b) {
  return detail::sum_accums<false>(a, accum<Tag, Elems>(b));
}
template <AccumElemBaseType Tag, ElemBaseType T, unsigned Elems>
  requires(detail::accum_from<Tag, T>)
[[nodiscard]] accum<Tag, Elems> sub(const accum<Tag, Elems>& a, const vector<T, Elems>& b) {
  return detail::sum_accums<true>(a, accum<Tag, Elems>(b));
}

template <ElemBaseType T, unsigned Elems>
[[nodiscard]] vector<T, Elems> add(const vector<T, Elems>& a, const vector<T, Elems>& b) {
  return detail::sum_vectors<false>(a, b);
}
template <ElemBaseType T, unsigned Elems>
[[nodiscard]] vector<T, Elems> sub(const vector<T, Elems>& a, const vector<T, Elems>& b) {
  return detail::sum_vectors<true>(a, b);
}
template <ElemBaseType T, unsigned Elems>
[[nodiscard]] vector<T, Elems> add(const vector<T, Elems>& a, std::type_identity_t<T> b) {
  return detail::sum_vectors<false>(a, broadcast<T, Elems>(b));
}
template <ElemBaseType T, unsigned Elems>
[[nodiscard]] vector<T, Elems> sub(const vector<T, Elems>& a, std::type_identity_t<T> b) {
  return detail::sum_vectors<true>(a, broadcast<T, Elems>(b));
}

}  // namespace aie
