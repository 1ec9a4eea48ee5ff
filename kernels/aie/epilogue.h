// The fp32 accumulator of a GEMM, in blocks [m/8][n/8][8][8]: cleared, and stored at the end of K, narrowed once.
#pragma once

#include <aie_api/aie.hpp>

#include "loops.h"
#include "packed_tile.h"

namespace tilefuse::gemm {

TF_INLINE aie::accum<accfloat, 64> load_accum(const float* p) {
  return aie::concat(aie::accum<accfloat, 32>(aie::load_v<32>(p)), aie::accum<accfloat, 32>(aie::load_v<32>(p + 32)));
}
TF_INLINE void store_accum(float* p, const aie::accum<accfloat, 64>& acc) {
  aie::store_v(p, acc.template extract<32>(0).template to_vector<float>());
  aie::store_v(p + 32, acc.template extract<32>(1).template to_vector<float>());
}

template <unsigned M>
TF_INLINE void zero(float* acc) {
  const aie::vector<float, 16> nothing = aie::zeros<float, 16>();
  TF_REGION(zero);
  TF_LOOP_RANGE(32, 256)
  for (unsigned i = 0; i < M * kNt; i += 16) aie::store_v(acc + i, nothing);
}

template <unsigned M>
TF_INLINE void store_bf16(const float* acc, bfloat16* c) {
  TF_REGION(store);
  TF_LOOP_RANGE(8, 64)
  for (unsigned i = 0; i < M * kNt; i += 64) aie::store_v(c + i, load_accum(acc + i).template to_vector<bfloat16>());
}

template <unsigned M>
TF_INLINE void store_f32(const float* acc, float* c) {
  TF_REGION(store);
  TF_LOOP_RANGE(32, 256)
  for (unsigned i = 0; i < M * kNt; i += 16) aie::store_v(c + i, aie::load_v<16>(acc + i));
}

}  // namespace tilefuse::gemm
