// aie::mmul: the shapes and operand types below, and no others. A is M x K row-major, B is K x N row-major, except that
// a bfp16 B comes transposed, N x K, because its blocks of 8 have to run along k.
#pragma once

#include <array>
#include <bit>
#include <cstring>

#include "accum.hpp"
#include "arithmetic.hpp"
#include "bfp16.hpp"
#include "block_vector.hpp"
#include "count.hpp"
#include "shuffle.hpp"
#include "types.hpp"
#include "vector.hpp"

// --- the multiplier's own instruction
// -----------------------------------------------------------------------------------

// A's rows and B's rows are 8 consecutive k, with one exponent each: T stands for the transposed B.

namespace aie::detail {

template <bool Accumulate>
inline void mac_8x8_8x8T(const v64bfp16ebs8& a, const v64bfp16ebs8& b, v64accfloat& acc) {
  const auto a_bytes = std::bit_cast<std::array<int8_t, 64>>(a.mantissa);
  const auto b_bytes = std::bit_cast<std::array<int8_t, 64>>(b.mantissa);
  const auto a_exponents = std::bit_cast<std::array<uint8_t, 8>>(a.exponent);
  const auto b_exponents = std::bit_cast<std::array<uint8_t, 8>>(b.exponent);
  bfp16_mac<Accumulate, 8, 8>(a_bytes.data(), a_exponents.data(), b_bytes.data(), b_exponents.data(), acc.data.data());
  ++count::now().vec;
}

// The first four rows of A, sixteen of B.
template <bool Accumulate>
inline void mac_4x8_8x16T(const v64bfp16ebs8& a, const v128bfp16ebs8& b, v64accfloat& acc) {
  const auto a_bytes = std::bit_cast<std::array<int8_t, 64>>(a.mantissa);
  const auto a_exponents = std::bit_cast<std::array<uint8_t, 8>>(a.exponent);
  std::array<int8_t, 128> b_bytes;
  std::array<uint8_t, 16> b_exponents;
  std::memcpy(b_bytes.data(), &b.mantissaX0, 64);
  std::memcpy(b_bytes.data() + 64, &b.mantissaX1, 64);
  std::memcpy(b_exponents.data(), &b.exponentE0, 8);
  std::memcpy(b_exponents.data() + 8, &b.exponentE1, 8);
  bfp16_mac<Accumulate, 4, 16>(a_bytes.data(), a_exponents.data(), b_bytes.data(), b_exponents.data(), acc.data.data());
  ++count::now().vec;
}

}  // namespace aie::detail

// mul, mac, and mac_conf, whose last three arguments zero the accumulator and subtract instead of adding. bfp16
// operands are signed. Subtraction is not emulated.
#define TF_EMU_MULTIPLIER(shape, A, B)                                                                                 \
  [[nodiscard]] inline v64accfloat mul_##shape(const A& a, const B& b) {                                               \
    v64accfloat acc;                                                                                                   \
    aie::detail::mac_##shape<false>(a, b, acc);                                                                        \
    return acc;                                                                                                        \
  }                                                                                                                    \
  [[nodiscard]] inline v64accfloat mac_##shape(const A& a, const B& b, v64accfloat acc) {                              \
    aie::detail::mac_##shape<true>(a, b, acc);                                                                         \
    return acc;                                                                                                        \
  }                                                                                                                    \
  [[nodiscard]] inline v64accfloat mac_##shape##_conf(const A& a, const B& b, v64accfloat acc, int zero_acc,           \
                                                      int sub_mul, int sub_acc1) {                                     \
    if (sub_mul != 0 || sub_acc1 != 0) aie::detail::count::fault("mac_conf: subtraction is not emulated", 0, 0);       \
    return zero_acc != 0 ? mul_##shape(a, b) : mac_##shape(a, b, acc);                                                 \
  }                                                                                                                    \
  [[nodiscard]] inline v64accfloat mac_##shape##_conf(const A& a, int, const B& b, int, v64accfloat acc, int zero_acc, \
                                                      int sub_mul, int sub_acc1) {                                     \
    return mac_##shape##_conf(a, b, acc, zero_acc, sub_mul, sub_acc1);                                                 \
  }
TF_EMU_MULTIPLIER(8x8_8x8T, v64bfp16ebs8, v64bfp16ebs8)
TF_EMU_MULTIPLIER(4x8_8x16T, v64bfp16ebs8, v128bfp16ebs8)
#undef TF_EMU_MULTIPLIER

namespace aie {

// --- operand modifiers
// ----------------------------------------------------------------------------------------------------

namespace detail {
template <BlockVector Vec>
struct transposed {
  const Vec& operand;
};
}  // namespace detail

template <BlockVector Vec>
[[nodiscard]] detail::transposed<Vec> op_transpose(const Vec& v) {
  return {v};
}

// --- mmul
// -------------------------------------------------------------------------------------------------------------------

namespace detail {

// What products of A are summed in, and the only tag that AIE2P has for them.
template <typename A>
using product_tag = std::conditional_t<is_integer<A>, acc32, accfloat>;

template <typename T, typename A>
inline constexpr bool is_tag_of = is_one_of<T, accauto, product_tag<A>>;

// What every 8 x 8 result has in common; the first mac of a new one multiplies.
class mmul_8x8 {
 public:
  using accum_type = accum<accfloat, 64>;

  mmul_8x8() = default;
  mmul_8x8(const accum_type& acc) : acc_(acc), zero_(false) {}

  [[nodiscard]] accum_type to_accum() const { return acc_; }
  operator accum_type() const { return acc_; }
  template <typename T>
  [[nodiscard]] auto to_vector() const {
    return acc_.template to_vector<T>();
  }

  static constexpr unsigned size() { return 64; }

 protected:
  void multiply(const v64bfp16ebs8& a, const v64bfp16ebs8& b, bool accumulate) {
    acc_ = accumulate && !zero_ ? mac_8x8_8x8T(a, b, acc_) : mul_8x8_8x8T(a, b);
    zero_ = false;
  }

  accum_type acc_;
  bool zero_ = true;
};

template <unsigned M, unsigned K, unsigned N, typename TypeA, typename TypeB>
struct mmul_impl;  // not defined: AIE2P has no such shape, or no kernel here uses it

template <>
struct mmul_impl<8, 8, 8, bfloat16, bfloat16> : mmul_8x8 {
  using mmul_8x8::mmul_8x8;
  using vector_A_type = vector<bfloat16, 64>;
  using vector_B_type = vector<bfloat16, 64>;

  void mul(const vector_A_type& a, const vector_B_type& b) { run(a, b, false); }
  void mac(const vector_A_type& a, const vector_B_type& b) { run(a, b, true); }

 private:
#if AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16
  // Both converted: A through an accumulator, B, transposed, through a product with one, so that the two conversions
  // use different slots.
  void run(const vector_A_type& a, const vector_B_type& b, bool accumulate) {
    const accum_type a_wide(a);
    auto one = bf16_vector<64>();
    one.data.fill(bfloat16(1.0f));  // a constant register: costs nothing in a loop
    const accum_type b_wide = aie::mul(transpose(b, 8, 8), one);
    multiply(a_wide.to_vector<bfp16ebs8>(), b_wide.to_vector<bfp16ebs8>(), accumulate);
  }
#else
  // On the element-wise multiplier: for each k, in order, a column of A by a row of B, each product exact, each sum
  // rounded. What limits it is the 42 broadcasts and shuffles.
  void run(const vector_A_type& a, const vector_B_type& b, bool accumulate) {
    if (!accumulate || zero_) acc_.data.fill(0);
    zero_ = false;
    for (unsigned k = 0; k < 8; ++k)
      for (unsigned m = 0; m < 8; ++m)
        for (unsigned n = 0; n < 8; ++n)
          acc_.data[8 * m + n] += static_cast<float>(a.data[8 * m + k]) * static_cast<float>(b.data[8 * k + n]);
    count::now().vec += 16;
    count::now().mv += 42;
  }
#endif
};

// bfloat16 by bfp16: only A is converted.
template <>
struct mmul_impl<8, 8, 8, bfloat16, bfp16ebs8> : mmul_8x8 {
  using mmul_8x8::mmul_8x8;
  using vector_A_type = vector<bfloat16, 64>;
  using vector_B_type = transposed<block_vector<bfp16ebs8, 64>>;

  void mul(const vector_A_type& a, const vector_B_type& b) { run(a, b, false); }
  void mac(const vector_A_type& a, const vector_B_type& b) { run(a, b, true); }

 private:
  void run(const vector_A_type& a, const vector_B_type& b, bool accumulate) {
    multiply(accum_type(a).to_vector<bfp16ebs8>(), b.operand, accumulate);
  }
};

template <>
struct mmul_impl<8, 8, 8, bfp16ebs8, bfp16ebs8> : mmul_8x8 {
  using mmul_8x8::mmul_8x8;
  using vector_A_type = block_vector<bfp16ebs8, 64>;
  using vector_B_type = transposed<block_vector<bfp16ebs8, 64>>;

  void mul(const vector_A_type& a, const vector_B_type& b) { multiply(a, b.operand, false); }
  void mac(const vector_A_type& a, const vector_B_type& b) { multiply(a, b.operand, true); }
};

// int8 by int8: exact, and modulo 2^32 where a sum leaves int32.
template <>
struct mmul_impl<8, 8, 8, int8, int8> {
  using accum_type = accum<acc32, 64>;
  using vector_A_type = vector<int8, 64>;
  using vector_B_type = vector<int8, 64>;

  mmul_impl() = default;
  mmul_impl(const accum_type& acc) : acc_(acc), zero_(false) {}

  [[nodiscard]] accum_type to_accum() const { return acc_; }
  operator accum_type() const { return acc_; }

  static constexpr unsigned size() { return 64; }

  void mul(const vector_A_type& a, const vector_B_type& b) { run(a, b, false); }
  void mac(const vector_A_type& a, const vector_B_type& b) { run(a, b, true); }

 private:
  [[gnu::noinline]] void run(const vector_A_type& a, const vector_B_type& b, bool accumulate) {
    if (!accumulate || zero_) acc_.data.fill(0);
    zero_ = false;
    for (unsigned m = 0; m < 8; ++m) {
      std::array<int32_t, 8> dots{};
      for (unsigned k = 0; k < 8; ++k)
        for (unsigned n = 0; n < 8; ++n) dots[n] += a.data[8 * m + k] * b.data[8 * k + n];
      for (unsigned n = 0; n < 8; ++n) acc_.data[8 * m + n] = sum<false>(acc_.data[8 * m + n], dots[n]);
    }
    ++count::now().vec;
  }

  accum_type acc_;
  bool zero_ = true;
};

}  // namespace detail

template <unsigned M_Elems, unsigned K_Elems, unsigned N_Elems, typename TypeA, typename TypeB = TypeA,
          typename AccumTag = accauto>
  requires detail::is_tag_of<AccumTag, TypeA>
class mmul : public detail::mmul_impl<M_Elems, K_Elems, N_Elems, TypeA, TypeB> {
  using base = detail::mmul_impl<M_Elems, K_Elems, N_Elems, TypeA, TypeB>;

 public:
  static constexpr unsigned M = M_Elems;
  static constexpr unsigned K = K_Elems;
  static constexpr unsigned N = N_Elems;
  static constexpr unsigned size_A = M * K;
  static constexpr unsigned size_B = K * N;
  static constexpr unsigned size_C = M * N;

  using base::base;
};

}  // namespace aie
