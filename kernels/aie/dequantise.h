// Dequantisation on the matrix multiplier.
//
// The scales of 8 output channels, as a diagonal matrix S, turn a block Q of codes into S Q (or, the other way round,
// an 8 x 8 block of sums into sums S) in one multiplication, with no conversion of the codes. A bfp16 mantissa has 7
// bits beside its sign and a bfloat16 scale 8, so S is two matrices, S = high + low, exactly: what rounding to the
// first leaves is one bit. (Scales below 2^-119 lose that bit: their remainder is an fp32 denormal.)
//
// Every weight is exact in fp32 before it is narrowed: (q - z) s has at most 9 + 8 bits. For minima, q s is exact and
// the addition of m rounds once.
#pragma once

#include <aie_api/aie.hpp>

#include "loops.h"
#include "packed_tile.h"
#include "unpack.h"

namespace tilefuse::gemm {

using Bf16s = aie::vector<bfloat16, 64>;
using Accum = aie::accum<accfloat, 64>;
using Operand = aie::block_vector<bfp16ebs8, 64>;

inline constexpr unsigned kOperandBytes = 72;  // of an operand in memory

// Read-only data of the core, 192 bytes: an 8 x 8 identity, as bfloat16 bits and as negative bfp16 mantissas.
alignas(64) inline constexpr uint16 kIdentity[64] = {0x3f80, 0, 0, 0, 0, 0, 0, 0, 0, 0x3f80, 0, 0, 0, 0, 0, 0, 0, 0,
                                                     0x3f80, 0, 0, 0, 0, 0, 0, 0, 0, 0x3f80, 0, 0, 0, 0, 0, 0, 0, 0,
                                                     0x3f80, 0, 0, 0, 0, 0, 0, 0, 0, 0x3f80, 0, 0, 0, 0, 0, 0, 0, 0,
                                                     0x3f80, 0, 0, 0, 0, 0, 0, 0, 0, 0x3f80};
alignas(64) inline constexpr int8 kMinusIdentity[64] = {
    -64, 0, 0, 0, 0,   0, 0, 0, 0, -64, 0, 0, 0, 0,   0, 0, 0, 0, -64, 0, 0, 0, 0,   0, 0, 0, 0, -64, 0, 0, 0, 0,
    0,   0, 0, 0, -64, 0, 0, 0, 0, 0,   0, 0, 0, -64, 0, 0, 0, 0, 0,   0, 0, 0, -64, 0, 0, 0, 0, 0,   0, 0, 0, -64};

TF_INLINE Bf16s identity() { return aie::load_v<64>(kIdentity).template cast_to<bfloat16>(); }
TF_INLINE v64bfp16ebs8 minus_identity() {
  return v64bfp16ebs8{Codes(aie::load_v<64>(kMinusIdentity)).to_native(), exponents(127)};
}

// An fp32 block as the sum of two operands: what remains is below 2^-13 of the largest of each 8 values in a row.
struct Split {
  Operand high, low;
};
TF_INLINE Split split(const Accum& value, const v64bfp16ebs8& minus_one) {
  Split parts;
  parts.high = value.template to_vector<bfp16ebs8>();
  const Accum rest = mac_8x8_8x8T(parts.high, minus_one, value);
  parts.low = rest.template to_vector<bfp16ebs8>();
  return parts;
}

// 8 values of the output channels of a block, 16-byte aligned, in each of 8 rows.
TF_INLINE Bf16s rows_of(const bfloat16* channels) { return aie::load_v<8>(channels).template grow_replicate<64>(); }

// The diagonal matrix of 8 scales.
TF_INLINE Split scale_matrix(const Bf16s& scale_rows, const Bf16s& one, const v64bfp16ebs8& minus_one) {
  return split(aie::mul(scale_rows, one), minus_one);
}

// The scale matrices of all groups and output channels of a tile, [group][n/8], high and low, to `out`: 144 bytes each.
template <class Tile>
TF_INLINE void write_scale_matrices(const uint8_t* w, uint8_t* out) {
  const Bf16s one = identity();
  const v64bfp16ebs8 minus_one = minus_identity();
  const auto* scales = reinterpret_cast<const bfloat16*>(w + Tile::scale_offset);
  aie::block_vector_output_buffer_stream<bfp16ebs8, 64> matrices(reinterpret_cast<bfp16ebs8*>(out));
  TF_REGION(scales);
  TF_LOOP_RANGE(8, 32)
  TF_LOOP_NO_UNROLL
  for (unsigned i = 0; i < kNBlocks * Tile::groups; ++i) {
    const Split matrix = scale_matrix(rows_of(scales + 8 * i), one, minus_one);
    matrices.push(matrix.high);
    matrices.push(matrix.low);
  }
}

// `total` + sums S, S the diagonal matrix high + low. Smallest first: what the large product would round away is there
// when it comes.
TF_INLINE Accum add_scaled(const Accum& total, const Accum& sums, const Operand& high, const Operand& low,
                           const v64bfp16ebs8& minus_one) {
  const Split parts = split(sums, minus_one);
  Accum result = mac_8x8_8x8T(parts.low, high, total);
  result = mac_8x8_8x8T(parts.high, low, result);
  return mac_8x8_8x8T(parts.high, high, result);
}

// Which way a dequantised block lies in its 64 lanes.
enum class Order {
  kInputRows,   // [8 input][8 output]: B of a bfloat16 multiplication
  kOutputRows,  // [8 output][8 input]: B of a bfp16 multiplication, blocks of 8 along the input channels
};

// 4-bit zero points come off the codes; what 8-bit ones leave has 9 bits and no operand.
template <unsigned Bits, bool Minima>
inline constexpr bool kCentresCodes = Bits == 4 && !Minima;

// All that the blocks of one group and 8 output channels share.
template <unsigned Bits, bool Minima, Order order>
class Dequantiser {
 public:
  // Zero points beside their codes.
  TF_INLINE Dequantiser(const bfloat16* scales, const Codes& zeros, const Bf16s& one, const v64bfp16ebs8& minus_one)
    requires kCentresCodes<Bits, Minima>
      : matrix_(scale_matrix(rows_of(scales), one, minus_one)), zeros_(zeros) {}

  // `offset`: the channels' zero points less kCodeOffset, or their minima.
  TF_INLINE Dequantiser(const bfloat16* scales, const aie::vector<bfloat16, 8>& offset, const Bf16s& one,
                        const v64bfp16ebs8& minus_one)
    requires(!kCentresCodes<Bits, Minima>)
  {
    const Bf16s rows = rows_of(scales);
    matrix_ = scale_matrix(rows, one, minus_one);
    const Bf16s offset_rows = offset.template grow_replicate<64>();
    scale_ = order == Order::kInputRows ? rows : aie::transpose(rows, 8, 8);
    offset_ = order == Order::kInputRows ? offset_rows : aie::transpose(offset_rows, 8, 8);
    if constexpr (Minima) {
      one_ = aie::broadcast<bfloat16, 64>(bfloat16(1.0f));
      if constexpr (kCodeOffset<Bits> != 0) code_offset_ = aie::broadcast<bfloat16, 64>(bfloat16(kCodeOffset<Bits>));
    }
  }

  // A block's weights from its codes.
  TF_INLINE Accum operator()(const Codes& codes) const {
    if constexpr (kCentresCodes<Bits, Minima>) {
      return scaled(aie::sub(codes, zeros_));
    } else {
      Accum w = scaled(codes);
      if constexpr (Minima) {
        if constexpr (kCodeOffset<Bits> != 0) w = aie::mac(w, scale_, code_offset_);
        return aie::mac(w, offset_, one_);
      } else {
        return aie::msc(w, offset_, scale_);
      }
    }
  }

 private:
  TF_INLINE Accum scaled(const Codes& codes) const {
    const v64bfp16ebs8 q = as_operand(aie::transpose(codes, 8, 8));
    Accum w;
    if constexpr (order == Order::kInputRows) {
      w = mul_8x8_8x8T(q, matrix_.high);
      return mac_8x8_8x8T(q, matrix_.low, w);
    } else {
      w = mul_8x8_8x8T(matrix_.high, q);
      return mac_8x8_8x8T(matrix_.low, q, w);
    }
  }

  Split matrix_;
  Codes zeros_;              // if kCentresCodes
  Bf16s scale_, offset_;     // if not
  Bf16s one_, code_offset_;  // for minima
};

// What the constructor takes, for two blocks of output channels.
template <class Tile, unsigned Bits, bool Minima>
TF_INLINE auto load_offsets(const uint8_t* w, unsigned group, unsigned pair, const Codes& mid) {
  const uint8_t* zeros = w + Tile::zero_offset + (group * kNt + pair * 16) * Tile::zero_bytes;
  if constexpr (kCentresCodes<Bits, Minima>) {
    return repeat_8(aie::vector<uint8, 16>(aie::load_v<16>(zeros)));
  } else {
    aie::vector<bfloat16, 16> both;
    if constexpr (Minima)
      both = aie::load_v<16>(reinterpret_cast<const bfloat16*>(zeros));
    else
      both = aie::to_float<bfloat16>(
          aie::add(aie::load_v<16>(zeros).template cast_to<int8>(), mid.template extract<16>(0)));
    return std::array<aie::vector<bfloat16, 8>, 2>{both.template extract<8>(0), both.template extract<8>(1)};
  }
}

// Every block of a tile, dequantised, as emit(weights): two blocks of output channels at a time, all input channels
// of the first before the next, which is the order that the multiplication reads in.
template <class Tile, unsigned Bits, bool Minima, Order order, class Emit>
TF_INLINE void dequantise_tile(const uint8_t* w, Emit&& emit) {
  const Bf16s one = identity();
  const v64bfp16ebs8 minus_one = minus_identity();
  const Codes mid = midpoint<Bits>();
  const auto* scales = reinterpret_cast<const bfloat16*>(w + Tile::scale_offset);
  TF_LOOP_RANGE(4, 4)
  for (unsigned pair = 0; pair < kNBlocks / 2; ++pair) {
    TF_LOOP_RANGE(1, 4)
    for (unsigned group = 0; group < Tile::groups; ++group) {
      const bfloat16* s = scales + group * kNt + pair * 16;
      const auto offsets = load_offsets<Tile, Bits, Minima>(w, group, pair, mid);
      const Dequantiser<Bits, Minima, order> first(s, offsets[0], one, minus_one);
      const Dequantiser<Bits, Minima, order> second(s + 8, offsets[1], one, minus_one);
      const uint8_t* codes = w + Tile::block_offset(group * Tile::k_blocks_per_group, 2 * pair);
      TF_REGION(dequantise);
      TF_LOOP_RANGE(4, 16)
      TF_LOOP_NO_UNROLL
      for (unsigned i = 0; i < Tile::k_blocks_per_group; ++i) {
        const CodePair q = load_pair<Bits>(codes, mid);
        emit(first(q[0]));
        emit(second(q[1]));
        codes += kNBlocks * Tile::block_bytes;
      }
    }
  }
}

}  // namespace tilefuse::gemm
