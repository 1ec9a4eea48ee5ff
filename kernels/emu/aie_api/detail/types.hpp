// Scalar types, under the names that the device compiler gives them.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

using int8 = int8_t;
using uint8 = uint8_t;
using int16 = int16_t;
using uint16 = uint16_t;
using int32 = int32_t;
using uint32 = uint32_t;

// 4-bit elements exist in vectors only, two to a byte, the low nibble first. sizeof is 1, as on the device: a pointer
// to them steps in BYTES, so N of them are N / 2 steps.
struct int4 {
  int8_t value;
  constexpr operator int() const { return value; }
};
struct uint4 {
  uint8_t value;
  constexpr operator int() const { return value; }
};

// The upper half of a float. Scalar conversion rounds to nearest even, as the device compiler's does.
struct bfloat16 {
  uint16_t bits;

  bfloat16() = default;
  constexpr bfloat16(float value) : bits(round(std::bit_cast<uint32_t>(value))) {}
  constexpr operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  static constexpr bfloat16 of_bits(uint16_t bits) {
    bfloat16 result;
    result.bits = bits;
    return result;
  }

 private:
  static constexpr uint16_t round(uint32_t bits) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

// One byte of a stream of 72-byte blocks of 64 values; no arithmetic of its own (see block_vector.hpp).
struct bfp16ebs8 {
  uint8_t byte;
};

// Accumulator tags.
struct acc32 {};
struct accfloat {};
struct accauto {};

namespace aie {

enum class aie_dm_resource { none };

namespace detail {

template <typename T, typename... Ts>
inline constexpr bool is_one_of = (std::is_same_v<T, Ts> || ...);

template <typename T>
inline constexpr bool is_nibble = is_one_of<T, int4, uint4>;
template <typename T>
inline constexpr bool is_integer = is_one_of<T, int4, uint4, int8, uint8, int16, uint16, int32, uint32>;

template <typename T>
inline constexpr unsigned type_bits_v = is_nibble<T> ? 4 : 8 * sizeof(T);

// What a vector of T is an array of.
template <typename T>
using element_t = std::conditional_t<is_nibble<T>, uint8_t, T>;

constexpr unsigned div_up(unsigned a, unsigned b) { return (a + b - 1) / b; }

}  // namespace detail

template <typename T>
concept ElemBaseType = detail::is_integer<T> || detail::is_one_of<T, bfloat16, float>;

template <typename T>
concept BlockType = std::is_same_v<T, bfp16ebs8>;

template <typename T>
concept AccumElemBaseType = detail::is_one_of<T, acc32, accfloat>;

}  // namespace aie
