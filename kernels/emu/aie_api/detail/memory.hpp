// Loads and stores. The hardware drops the low address bits of a misaligned vector access without a word; here it is a
// fault, in every build.
#pragma once

#include <cstdint>
#include <cstring>

#include "count.hpp"
#include "types.hpp"
#include "vector.hpp"

namespace aie {

namespace detail {

// Bytes: 16 for 128-bit vectors, 32 for 256-bit ones, 64 above.
template <typename T, unsigned Elems>
inline constexpr unsigned vector_ldst_align_v = std::min(type_bits_v<T> * Elems / 8, 64u);

template <unsigned Alignment>
inline void check_alignment(const void* ptr) {
  const auto address = reinterpret_cast<uintptr_t>(ptr);
  if (address % Alignment != 0)
    count::fault("vector access at address ...%02lx needs an alignment of %lu bytes", address % 256, Alignment);
}

template <unsigned Elems, typename T>
inline vector<T, Elems> load_bytes(const T* ptr) {
  vector<T, Elems> result;
  std::memcpy(result.data.data(), ptr, sizeof result.data);
  return result;
}

}  // namespace detail

template <unsigned Elems, aie_dm_resource Resource = aie_dm_resource::none, ElemBaseType T>
[[nodiscard]] vector<T, Elems> load_v(const T* ptr) {
  detail::check_alignment<detail::vector_ldst_align_v<T, Elems>>(ptr);
  detail::count::now().load += detail::div_up(vector<T, Elems>::bits(), 512);
  return detail::load_bytes<Elems>(ptr);
}

template <aie_dm_resource Resource = aie_dm_resource::none, ElemBaseType T, unsigned Elems>
T* store_v(T* ptr, const vector<T, Elems>& v) {
  detail::check_alignment<detail::vector_ldst_align_v<T, Elems>>(ptr);
  detail::count::now().st += detail::div_up(v.bits(), 512);
  std::memcpy(ptr, v.data.data(), sizeof v.data);
  return ptr;
}

// Aligned to `aligned_elems` elements: two loads and a shift for each register.
template <unsigned Elems, aie_dm_resource Resource = aie_dm_resource::none, ElemBaseType T>
[[nodiscard]] vector<T, Elems> load_unaligned_v(const T* ptr, unsigned aligned_elems = 1) {
  if (reinterpret_cast<uintptr_t>(ptr) % (aligned_elems * sizeof(T)) != 0)
    detail::count::fault("unaligned load promised a multiple of %lu elements of %lu bytes", aligned_elems, sizeof(T));
  const unsigned registers = detail::div_up(vector<T, Elems>::bits(), 512);
  detail::count::now().load += 2 * registers;
  detail::count::now().mv += registers;
  return detail::load_bytes<Elems>(ptr);
}

}  // namespace aie
