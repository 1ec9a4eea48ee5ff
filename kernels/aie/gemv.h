// The arithmetic of the GEMV kernels: one k tile (128 input channels) by 64 output channels a call.
//
// Both paths leave Kt * Nt products of a tile as 64 fp32 sums, fold the zero points through the group sum of x,
//   sum (q - z) s x = s (sum q x - z sum x),
// and lose nothing that fp32 accumulation keeps: every product is exact, every addition rounds once to fp32.
#pragma once

#include <stdint.h>

#include <aie_api/aie.hpp>

#include "epilogue.h"
#include "loops.h"
#include "packed_tile.h"
#include "unpack.h"

namespace tilefuse::gemv {

using gemm::load_accum;
using gemm::store_accum;

using Sums64 = aie::accum<accfloat, 64>;
using Sums32 = aie::accum<accfloat, 32>;
using Bf16x64 = aie::vector<bfloat16, 64>;

// What bfloat16 can't hold of an fp32 value in one piece, it holds in three, of 8 bits each. Multiplied one by one with
// a bfloat16, they make the exact product that the core has no instruction for.
struct Bf16Digits {
  Bf16x64 high, middle, low;
};
TF_INLINE Bf16Digits split(const Sums64& value) {
  Bf16Digits digits;
  digits.high = value.to_vector<bfloat16>();
  const Sums64 below = aie::sub(value, Sums64(digits.high));
  digits.middle = below.to_vector<bfloat16>();
  digits.low = aie::sub(below, Sums64(digits.middle)).to_vector<bfloat16>();
  return digits;
}
TF_INLINE void store_digits(bfloat16* p, const Bf16Digits& digits) {
  aie::store_v(p, digits.high);
  aie::store_v(p + 64, digits.middle);
  aie::store_v(p + 128, digits.low);
}
TF_INLINE Bf16Digits load_digits(const bfloat16* p) {
  return {aie::load_v<64>(p), aie::load_v<64>(p + 64), aie::load_v<64>(p + 128)};
}
// Largest first: split() has it first, and where a difference cancels it leaves a small sum for the others to round.
TF_INLINE Sums64 mac(const Sums64& sums, const Bf16x64& factor, const Bf16Digits& digits) {
  Sums64 result = aie::mac(sums, factor, digits.high);
  result = aie::mac(result, factor, digits.middle);
  return aie::mac(result, factor, digits.low);
}
TF_INLINE Sums64 msc(const Sums64& sums, const Bf16x64& factor, const Bf16Digits& digits) {
  Sums64 result = aie::msc(sums, factor, digits.high);
  result = aie::msc(result, factor, digits.middle);
  return aie::msc(result, factor, digits.low);
}

TF_INLINE void zero(float* acc) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  store_accum(acc, aie::zeros<accfloat, 64>());
}

// acc += partial: the sums of the row above, on their way down the column.
TF_INLINE void add(const float* partial, float* acc) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  TF_REGION(add);
  store_accum(acc, aie::add(load_accum(acc), load_accum(partial)));
}

TF_INLINE void store_bf16(const float* acc, bfloat16* y) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  TF_REGION(store_bf16);
  aie::store_v(y, load_accum(acc).to_vector<bfloat16>());
}

inline constexpr int32_t kTileOfX = kKt;
inline constexpr int32_t kQuarterOfX = 16 * kTileOfX;  // of what stays in a core

template <int32_t Count>
TF_INLINE void keep(const bfloat16* from, bfloat16* to) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  TF_REGION(keep);
  TF_LOOP_RANGE(4, 64)
  for (int32_t i = 0; i < Count; i += 32) aie::store_v(to + i, aie::load_v<32>(from + i));
}

// 0x43 above a byte below 128 makes the bfloat16 128 + byte.
TF_INLINE gemm::Bytes upper_bytes() { return aie::broadcast<uint8, 64>(0x43); }
TF_INLINE Bf16x64 plus_128(const gemm::Bytes& bytes, const gemm::Bytes& upper) {
  const auto [first, second] = aie::interleave_zip(bytes, upper, 1);
  return aie::concat(first, second).cast_to<bfloat16>();
}

// acc += scale * (dots - zero * sum of x) for the 64 outputs of one group, or scale * dots + minimum * sum of x.
// `Offset` is what the caller has already taken off every code.
template <class Tile, bool Minima, int Offset>
TF_INLINE void apply_group(const uint8_t* w, unsigned group, Sums64 dots, const bfloat16* x_sums, float* acc) {
  const Bf16Digits x_sum = load_digits(x_sums + group * 192);
  const Bf16x64 scale = aie::load_v<64>(reinterpret_cast<const bfloat16*>(w + Tile::scale_offset) + group * kNt);
  Sums64 sums = load_accum(acc);
  if constexpr (Minima) {
    const Bf16x64 minimum = aie::load_v<64>(reinterpret_cast<const bfloat16*>(w + Tile::zero_offset) + group * kNt);
    if constexpr (Offset != 0)
      dots = mac(dots, aie::broadcast<bfloat16, 64>(bfloat16(static_cast<float>(Offset))), x_sum);
    sums = mac(sums, minimum, x_sum);
  } else {
    const gemm::Bytes zeros = aie::load_v<64>(w + Tile::zero_offset + group * kNt);
    if constexpr (Offset == 128)
      dots = msc(dots, aie::to_float<bfloat16>(aie::add(zeros.cast_to<int8>(), int8(-128))), x_sum);
    else if constexpr (Offset == -128)
      dots = msc(dots, plus_128(zeros, upper_bytes()), x_sum);
    else
      dots = msc(dots, aie::to_float<bfloat16>(zeros), x_sum);
  }
  store_accum(acc, mac(sums, scale, split(dots)));
}

// --- mantissa path ---------------------------------------------------------------------------------------------------
//
// Codes are bfp16 mantissas as they are: one exponent for all of them makes each worth its integer. x becomes four rows
// of an A operand: row 0 is x in bfp16 (7 bits below the largest of 8), each further row what the rows before it leave
// over. Four rows keep 2^-27 of a block's largest value, beyond fp32 accumulation; the multiplier reads four anyway.
//
// An instruction is 4 rows x 8 k by 8 k x 16 n: 128 weights. Each accumulator register then holds 16 neighbouring
// outputs, so that adding the four rows needs no shuffle.

using Operand = aie::block_vector<bfp16ebs8, 64>;

inline constexpr unsigned kOperandBytes = 72;  // of one k block of x
inline constexpr unsigned kSumsOffset = kKBlocks * kOperandBytes;

// sums[4 rows][16 outputs] += x rows * codes
TF_INLINE Sums64 mac_rows(const Operand& x, const gemm::CodePair& codes, const Sums64& sums) {
  aie::block_vector<bfp16ebs8, 128> columns = Operand(gemm::as_operand(codes[0])).grow<128>();
  columns.insert(1, Operand(gemm::as_operand(codes[1])));
  return ::mac_4x8_8x16T_conf(x, 1, columns, 1, sums, 0, 0, 0);
}

// The four rows added.
TF_INLINE aie::accum<accfloat, 16> fold(const Sums64& rows) {
  const Sums32 pairs = aie::add(rows.extract<32>(0), rows.extract<32>(1));
  return aie::add(pairs.extract<16>(0), pairs.extract<16>(1));
}

template <unsigned Bits, unsigned Group, bool Minima>
struct Mantissa {
  using Tile = PackedTile<Bits, Group, Minima>;
  static constexpr int offset = gemm::kCodeOffset<Bits>;
  static constexpr unsigned scratch_bytes = kSumsOffset + Tile::groups * 3 * 64 * 2;

  // x -> [16 k blocks] operands of 72 bytes, then [groups] sums of x as three bfloat16, each in 64 lanes.
  static TF_INLINE void prepare(const bfloat16* x, uint8_t* scratch) {
    make_operands(x, scratch);
    sum_groups(scratch);
  }

  static TF_INLINE void multiply(const uint8_t* scratch, const uint8_t* w, float* acc) {
    aie::block_vector_input_buffer_stream<bfp16ebs8, 64> x(reinterpret_cast<const bfp16ebs8*>(scratch));
    const auto* x_sums = reinterpret_cast<const bfloat16*>(scratch + kSumsOffset);
    const auto codes = [w, midpoint = gemm::midpoint<Bits>()](unsigned k_block, unsigned pair) TF_INLINE_LAMBDA {
      return gemm::load_pair<Bits>(w + Tile::block_offset(k_block, 2 * pair), midpoint);
    };
    TF_LOOP_RANGE(1, 4)
    TF_LOOP_NO_UNROLL
    for (unsigned group = 0; group < Tile::groups; ++group) {
      Sums64 s0 = aie::zeros<accfloat, 64>(), s1 = s0, s2 = s0, s3 = s0;
      {
        TF_REGION(dots);
        TF_LOOP_RANGE(4, 16)
        TF_LOOP_NO_UNROLL
        for (unsigned i = 0; i < Tile::k_blocks_per_group; ++i) {
          const unsigned k_block = group * Tile::k_blocks_per_group + i;
          const Operand rows = x.pop();
          s0 = mac_rows(rows, codes(k_block, 0), s0);
          s1 = mac_rows(rows, codes(k_block, 1), s1);
          s2 = mac_rows(rows, codes(k_block, 2), s2);
          s3 = mac_rows(rows, codes(k_block, 3), s3);
        }
      }
      TF_REGION(scale);
      const Sums64 dots = aie::concat(fold(s0), fold(s1), fold(s2), fold(s3));
      apply_group<Tile, Minima, offset>(w, group, dots, x_sums, acc);
    }
  }

 private:
  // All four rows at once for 8 k blocks: what each row leaves over is exact in bfloat16, so the rows are gathered as
  // bfloat16 and converted together.
  static TF_INLINE void make_operands(const bfloat16* x, uint8_t* scratch) {
    aie::block_vector_output_buffer_stream<bfp16ebs8, 64> operands(reinterpret_cast<bfp16ebs8*>(scratch));
    TF_REGION(operands);
    TF_LOOP_RANGE(2, 2)
    TF_LOOP_NO_UNROLL
    for (unsigned half = 0; half < 2; ++half) {
      const Bf16x64 row0 = aie::load_v<64>(x + 64 * half);
      Sums64 rest(row0);
      const Bf16x64 row1 = leave_over(rest);
      const Bf16x64 row2 = leave_over(rest);
      const Bf16x64 row3 = leave_over(rest);
      const auto [low01, high01] = aie::interleave_zip(row0, row1, 8);
      const auto [low23, high23] = aie::interleave_zip(row2, row3, 8);
      const auto [blocks01, blocks23] = aie::interleave_zip(low01, low23, 16);
      const auto [blocks45, blocks67] = aie::interleave_zip(high01, high23, 16);
      push_pair(operands, blocks01);
      push_pair(operands, blocks23);
      push_pair(operands, blocks45);
      push_pair(operands, blocks67);
    }
  }

  // rest -= rest in bfp16; what is then left, in bfloat16.
  static TF_INLINE Bf16x64 leave_over(Sums64& rest) {
    rest = aie::sub(rest, Sums64(rest.to_vector<bfp16ebs8>()));
    return rest.to_vector<bfloat16>();
  }

  // Two k blocks of [4 rows][8 k]. The multiplier reads rows 0 to 3; rows 4 to 7 repeat them.
  template <class Stream>
  static TF_INLINE void push_pair(Stream& operands, const Bf16x64& blocks) {
    const Sums32 first(blocks.extract<32>(0));
    const Sums32 second(blocks.extract<32>(1));
    operands.push(aie::concat(first, first).to_vector<bfp16ebs8>());
    operands.push(aie::concat(second, second).to_vector<bfp16ebs8>());
  }

  // The sum of a group is its product with codes of 1; summed in quarters of the tile, whose chains overlap. All of it
  // through one stream: each occupies a queue of the load units.
  static TF_INLINE void sum_groups(uint8_t* scratch) {
    aie::block_vector_input_buffer_stream<bfp16ebs8, 64> x(reinterpret_cast<const bfp16ebs8*>(scratch));
    const auto quarter = [&x, one = gemm::Codes(aie::broadcast<int8, 64>(1))]() TF_INLINE_LAMBDA {
      Sums64 sums = aie::zeros<accfloat, 64>();
      TF_LOOP_UNROLL_FULL
      for (unsigned i = 0; i < kKBlocks / 4; ++i) sums = mac_rows(x.pop(), {one, one}, sums);
      return sums;
    };
    Sums64 s0, s1, s2, s3;
    {
      TF_REGION(x_sums);
      s0 = quarter();
      s1 = quarter();
      s2 = quarter();
      s3 = quarter();
    }
    TF_REGION(x_digits);
    auto* x_sums = reinterpret_cast<bfloat16*>(scratch + kSumsOffset);
    if constexpr (Tile::groups == 4) {
      store_sum(x_sums, s0);
      store_sum(x_sums + 192, s1);
      store_sum(x_sums + 384, s2);
      store_sum(x_sums + 576, s3);
    } else if constexpr (Tile::groups == 2) {
      store_sum(x_sums, aie::add(s0, s1));
      store_sum(x_sums + 192, aie::add(s2, s3));
    } else {
      store_sum(x_sums, aie::add(aie::add(s0, s1), aie::add(s2, s3)));
    }
  }

  static TF_INLINE void store_sum(bfloat16* p, const Sums64& rows) {
    const aie::accum<accfloat, 16> sum = fold(rows);
    store_digits(p, split(aie::concat(sum, sum, sum, sum)));
  }
};

// --- element-wise path -----------------------------------------------------------------------------------------------
//
// Codes widened to bfloat16 and multiplied lane by lane: 64 weights an instruction at best, and a lane for each k to be
// added up after every group. The rung below the mantissa path in the ladder, and the multiplication of unquantised
// weights.

// x -> each block of 8 k in all eight rows of 8 lanes.
inline constexpr unsigned kSpreadBytes = kKBlocks * 64 * 2;
TF_INLINE void spread(const bfloat16* x, uint8_t* scratch) {
  auto* spread = reinterpret_cast<bfloat16*>(scratch);
  TF_REGION(operands);
  TF_LOOP_RANGE(16, 16)
  for (unsigned i = 0; i < kKBlocks; ++i) aie::store_v(spread + 64 * i, aie::load_v<8>(x + 8 * i).grow_replicate<64>());
}

// Neighbouring lanes added: 64 fp32 in, 32 out.
TF_INLINE Sums32 add_neighbours(const Sums32& a, const Sums32& b) {
  const auto [even, odd] = aie::interleave_unzip(a.to_vector<float>(), b.to_vector<float>(), 1);
  return aie::add(Sums32(even), Sums32(odd));
}
// Four blocks of [8 n][8 k] -> [32 n]
TF_INLINE Sums32 add_lanes(const Sums64& a, const Sums64& b, const Sums64& c, const Sums64& d) {
  const auto halve = [](const Sums64& s)
                         TF_INLINE_LAMBDA { return add_neighbours(s.extract<32>(0), s.extract<32>(1)); };
  return add_neighbours(add_neighbours(halve(a), halve(b)), add_neighbours(halve(c), halve(d)));
}

// sums[64 n] of k blocks [begin, begin + count), with block(k_block, n_block) -> Bf16x64 the weights of a block.
template <unsigned Count, class Block>
TF_INLINE Sums64 dot_blocks(const bfloat16* spread, unsigned begin, const Block& block) {
  Sums32 halves[2];
  TF_LOOP_UNROLL_FULL
  for (unsigned half = 0; half < 2; ++half) {
    Sums64 s0 = aie::zeros<accfloat, 64>(), s1 = s0, s2 = s0, s3 = s0;
    {
      TF_REGION(dots);
      TF_LOOP_RANGE(4, 16)
      TF_LOOP_NO_UNROLL
      for (unsigned k = begin; k < begin + Count; ++k) {
        const Bf16x64 x = aie::load_v<64>(spread + 64 * k);
        s0 = aie::mac(s0, block(k, 4 * half), x);
        s1 = aie::mac(s1, block(k, 4 * half + 1), x);
        s2 = aie::mac(s2, block(k, 4 * half + 2), x);
        s3 = aie::mac(s3, block(k, 4 * half + 3), x);
      }
    }
    TF_REGION(lanes);
    halves[half] = add_lanes(s0, s1, s2, s3);
  }
  return aie::concat(halves[0], halves[1]);
}

template <unsigned Bits, unsigned Group, bool Minima>
struct Elementwise {
  using Tile = PackedTile<Bits, Group, Minima>;
  static constexpr int offset = Bits == 4 ? -128 : 0;
  static constexpr unsigned scratch_bytes = kSpreadBytes + Tile::groups * 3 * 64 * 2;

  // x -> [16 k blocks][64] bfloat16, then [groups] sums of x as three bfloat16, each in 64 lanes.
  static TF_INLINE void prepare(const bfloat16* x, uint8_t* scratch) {
    spread(x, scratch);
    const auto* rows = reinterpret_cast<const bfloat16*>(scratch);
    auto* x_sums = reinterpret_cast<bfloat16*>(scratch + kSpreadBytes);
    const Bf16x64 one = aie::broadcast<bfloat16, 64>(bfloat16(1.0f));
    TF_LOOP_RANGE(1, 4)
    TF_LOOP_NO_UNROLL
    for (unsigned group = 0; group < Tile::groups; ++group) {
      const Sums64 sums = dot_blocks<Tile::k_blocks_per_group>(
          rows, group * Tile::k_blocks_per_group, [&](unsigned, unsigned) TF_INLINE_LAMBDA { return one; });
      TF_REGION(x_digits);
      store_digits(x_sums + 192 * group, split(sums));
    }
  }

  static TF_INLINE void multiply(const uint8_t* scratch, const uint8_t* w, float* acc) {
    const auto* rows = reinterpret_cast<const bfloat16*>(scratch);
    const auto* x_sums = reinterpret_cast<const bfloat16*>(scratch + kSpreadBytes);
    const auto block = [w, upper = upper_bytes()](unsigned k_block, unsigned n_block) TF_INLINE_LAMBDA {
      const uint8_t* codes = w + Tile::block_offset(k_block, n_block);
      if constexpr (Bits == 4)
        return plus_128(aie::unpack(aie::load_v<64>(reinterpret_cast<const uint4*>(codes))), upper);
      else
        return aie::to_float<bfloat16>(aie::load_v<64>(codes));
    };
    TF_LOOP_RANGE(1, 4)
    TF_LOOP_NO_UNROLL
    for (unsigned group = 0; group < Tile::groups; ++group) {
      const Sums64 dots = dot_blocks<Tile::k_blocks_per_group>(rows, group * Tile::k_blocks_per_group, block);
      TF_REGION(scale);
      apply_group<Tile, Minima, offset>(w, group, dots, x_sums, acc);
    }
  }
};

// bfloat16 weights, in the same block order.
struct Unquantized {
  static constexpr unsigned scratch_bytes = kSpreadBytes;

  static TF_INLINE void prepare(const bfloat16* x, uint8_t* scratch) { spread(x, scratch); }

  static TF_INLINE void multiply(const uint8_t* scratch, const uint8_t* w, float* acc) {
    const Sums64 dots = dot_blocks<kKBlocks>(
        reinterpret_cast<const bfloat16*>(scratch), 0, [w](unsigned k_block, unsigned n_block) TF_INLINE_LAMBDA {
          return aie::load_v<64>(
              reinterpret_cast<const bfloat16*>(w + UnquantizedTile::block_offset(k_block, n_block)));
        });
    TF_REGION(sum);
    store_accum(acc, aie::add(load_accum(acc), dots));
  }
};

}  // namespace tilefuse::gemv
