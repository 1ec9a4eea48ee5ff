// fp32 arithmetic that the core's instructions lack, of rows and of blocks: products of fp32 numbers, and one value a
// row spread over its 8 lanes of a block.
#pragma once

#include <aie_api/aie.hpp>
#include <array>
#include <cstring>

#include "dequantise.h"
#include "epilogue.h"
#include "loops.h"

namespace tilefuse::attention {

using gemm::Accum;                       // fp32, a block: 8 rows of 8 lanes
using gemm::Bf16s;                       // bfloat16, a block
using gemm::Operand;                     // bfp16, a block
using Row16 = aie::accum<accfloat, 16>;  // a value for each row of two blocks
using Floats = aie::vector<float, 16>;
using Ints = aie::vector<int32, 16>;
using Bf16Rows = aie::vector<bfloat16, 16>;
using OperandStream = aie::block_vector_input_buffer_stream<bfp16ebs8, 64>;
using OperandWriter = aie::block_vector_output_buffer_stream<bfp16ebs8, 64>;

// 1.5 2^23: from here to 2^22 on either side fp32 numbers are the integers, and the bits of 1.5 2^23 + i are those of
// 1.5 2^23 and i added as integers.
inline constexpr float kMagic = 12582912.0f;
// What a masked score becomes before the maximum, and the maximum before the first key.
inline constexpr float kMasked = -0x1p100f;

TF_INLINE OperandStream operand_stream(const uint8_t* bytes) {
  return OperandStream(reinterpret_cast<const bfp16ebs8*>(bytes));
}

// The core loads and stores aligned words only: what is not known to be aligned would be moved byte by byte.
template <typename T>
TF_INLINE T read(const uint8_t* bytes) {
  T value;
  memcpy(&value, __builtin_assume_aligned(bytes, alignof(T)), sizeof value);
  return value;
}
template <typename T>
TF_INLINE void write(uint8_t* bytes, const T& value) {
  memcpy(__builtin_assume_aligned(bytes, alignof(T)), &value, sizeof value);
}

TF_INLINE Row16 row16(float value) { return Row16(Floats(aie::broadcast<float, 16>(value))); }
TF_INLINE Ints bits_of(const Row16& x) { return x.template to_vector<float>().template cast_to<int32>(); }

// --- products of fp32, from three bfloat16 pieces of 8 bits each ---

struct Pieces {
  Bf16Rows high, middle, low;
};
TF_INLINE Pieces pieces(const Row16& x) {
  Pieces parts;
  parts.high = x.template to_vector<bfloat16>();
  const Row16 rest = aie::sub(x, Row16(parts.high));
  parts.middle = rest.template to_vector<bfloat16>();
  parts.low = aie::sub(rest, Row16(parts.middle)).template to_vector<bfloat16>();
  return parts;
}

// Within 2^-22 of a product: 6 of 9 partial ones, the smallest first.
TF_INLINE Row16 product(const Row16& a, const Row16& b) {
  const Pieces x = pieces(a);
  const Pieces y = pieces(b);
  Row16 result = aie::mul(x.low, y.high);
  result = aie::mac(result, x.middle, y.middle);
  result = aie::mac(result, x.high, y.low);
  result = aie::mac(result, x.middle, y.high);
  result = aie::mac(result, x.high, y.middle);
  return aie::mac(result, x.high, y.high);
}

// A block times bfloat16 powers of two: exact, unless it leaves the normal numbers.
TF_INLINE Accum scaled(const Accum& x, const Bf16s& powers) {
  const Bf16s high = x.template to_vector<bfloat16>();
  const Accum rest = aie::sub(x, Accum(high));
  const Bf16s middle = rest.template to_vector<bfloat16>();
  const Bf16s low = aie::sub(rest, Accum(middle)).template to_vector<bfloat16>();
  Accum result = aie::mul(low, powers);
  result = aie::mac(result, middle, powers);
  return aie::mac(result, high, powers);
}

// `total` + a block times the numbers high + low: within 2^-16 of the product.
TF_INLINE Accum add_product(const Accum& total, const Accum& x, const Bf16s& high, const Bf16s& low) {
  const Bf16s x_high = x.template to_vector<bfloat16>();
  const Bf16s x_low = aie::sub(x, Accum(x_high)).template to_vector<bfloat16>();
  Accum result = aie::mac(total, x_low, high);
  result = aie::mac(result, x_high, low);
  return aie::mac(result, x_high, high);
}

// --- between lanes ---

// A block in which row i has value i of 8 in all its lanes.
TF_INLINE Accum spread(const aie::vector<float, 8>& rows) {
  const Floats twice = rows.template grow_replicate<16>();
  const auto [a, unused] = aie::interleave_zip(twice, twice, 1);
  const auto [a0, a1] = aie::interleave_zip(a, a, 2);
  const auto [r0, r2] = aie::interleave_zip(a0, a0, 4);
  const auto [r4, r6] = aie::interleave_zip(a1, a1, 4);
  return aie::concat(Row16(r0), Row16(r2), Row16(r4), Row16(r6));
}
TF_INLINE Bf16s spread(const aie::vector<bfloat16, 8>& rows) {
  const auto often = rows.template grow_replicate<32>();
  const auto [a, unused] = aie::interleave_zip(often, often, 1);
  const auto [b, unused_too] = aie::interleave_zip(a, a, 2);
  const auto [r0, r4] = aie::interleave_zip(b, b, 4);
  return aie::concat(r0, r4);
}

// Of each row of two blocks, its 8 lanes combined by `op`: 16 results.
template <typename V, typename Op>
TF_INLINE V fold_rows(const std::array<V, 4>& first, const std::array<V, 4>& second, Op&& op) {
  const auto halve = [&op](const V& v, const V& w) TF_INLINE_LAMBDA {
    const auto [even, odd] = aie::interleave_unzip(v, w, 1);
    return op(even, odd);
  };
  return halve(halve(halve(first[0], first[1]), halve(first[2], first[3])),
               halve(halve(second[0], second[1]), halve(second[2], second[3])));
}

}  // namespace tilefuse::attention
