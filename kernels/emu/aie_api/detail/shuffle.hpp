// Reordering: interleave_zip, interleave_unzip, transpose.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "count.hpp"
#include "types.hpp"
#include "vector.hpp"

namespace aie {

namespace detail {

// Two results of 512 bits are two shuffles; both halves of smaller ones come out of one.
template <typename V>
inline void count_interleave(unsigned chunk) {
  if (!is_power_of_2(chunk) || chunk > V::size())
    count::fault("interleave of %lu elements at a time: not a power of two up to %lu", chunk, V::size());
  if (chunk != V::size()) count::now().mv += V::bits() < 512 ? 1 : 2 * V::bits() / 512;
}

// Where element i of the first vector lies among both, interleaved; that of the second lies `chunk` further.
constexpr unsigned interleaved(unsigned i, unsigned chunk) { return i + (i & ~(chunk - 1)); }

}  // namespace detail

// { v[0:c], w[0:c], v[c:2c], w[c:2c], ... }, in two halves.
template <ElemBaseType T, unsigned Elems>
  requires(!detail::is_nibble<T>)
[[nodiscard, gnu::noinline]] std::pair<vector<T, Elems>, vector<T, Elems>> interleave_zip(const vector<T, Elems>& v,
                                                                                          const vector<T, Elems>& w,
                                                                                          unsigned chunk) {
  detail::count_interleave<vector<T, Elems>>(chunk);
  chunk = std::clamp(chunk, 1u, Elems);
  std::array<T, 2 * Elems> both;
  for (unsigned i = 0; i < Elems; ++i) {
    both[detail::interleaved(i, chunk) % (2 * Elems)] = v.data[i];
    both[(detail::interleaved(i, chunk) + chunk) % (2 * Elems)] = w.data[i];
  }
  std::pair<vector<T, Elems>, vector<T, Elems>> result;
  std::copy_n(both.data(), Elems, result.first.data.data());
  std::copy_n(both.data() + Elems, Elems, result.second.data.data());
  return result;
}

// The inverse: even chunks of v then of w, and odd chunks of v then of w.
template <ElemBaseType T, unsigned Elems>
  requires(!detail::is_nibble<T>)
[[nodiscard, gnu::noinline]] std::pair<vector<T, Elems>, vector<T, Elems>> interleave_unzip(const vector<T, Elems>& v,
                                                                                            const vector<T, Elems>& w,
                                                                                            unsigned chunk) {
  detail::count_interleave<vector<T, Elems>>(chunk);
  chunk = std::clamp(chunk, 1u, Elems);
  std::array<T, 2 * Elems> both;
  std::copy_n(v.data.data(), Elems, both.data());
  std::copy_n(w.data.data(), Elems, both.data() + Elems);
  std::pair<vector<T, Elems>, vector<T, Elems>> result;
  for (unsigned i = 0; i < Elems; ++i) {
    result.first.data[i] = both[detail::interleaved(i, chunk) % (2 * Elems)];
    result.second.data[i] = both[(detail::interleaved(i, chunk) + chunk) % (2 * Elems)];
  }
  return result;
}

// rows x columns, row-major, to columns x rows. One shuffle a 512-bit register of 8- or 16-bit elements.
template <ElemBaseType T, unsigned Elems>
  requires(detail::type_bits_v<T> == 8 || detail::type_bits_v<T> == 16)
[[nodiscard, gnu::noinline]] vector<T, Elems> transpose(const vector<T, Elems>& v, unsigned rows, unsigned columns) {
  if (rows * columns != Elems) {
    detail::count::fault("transpose of %lu elements in rows of %lu: not a whole matrix", Elems, columns);
    return v;
  }
  vector<T, Elems> result;
  for (unsigned i = 0; i < Elems; ++i) result.data[i % columns * rows + i / columns] = v.data[i];
  detail::count::now().mv += detail::div_up(v.bits(), 512);
  return result;
}

}  // namespace aie
