// The entry points of a GEMM kernel whose arithmetic is the type TF_GEMM. Included by the kernels' .cc, with TF_NAME
// and TF_M defined, and any number of times by one host translation unit, so without a guard.
//
// All pointers are 64-byte aligned, and no two arrays overlap: a store must not hold up the next loads of its loop.
// a: bfloat16 [TF_M/8][16] blocks of [8 rows][8 input channels]; w: a packed tile; scratch: scratch_bytes() bytes;
// acc: fp32 [TF_M/8][8] blocks of [8 rows][8 output channels], as is c.

extern "C" {

void TF_KERNEL(zero)(float* __restrict acc) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  tilefuse::gemm::zero<TF_M>(acc);
}

unsigned TF_KERNEL(scratch_bytes)() { return TF_GEMM::scratch_bytes; }

// Once a tile of weights.
void TF_KERNEL(prepare)(const uint8_t* __restrict w, uint8_t* __restrict scratch) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  TF_GEMM::prepare(w, scratch);
}

// acc += a w, once a band of TF_M rows.
void TF_NAME(const bfloat16* __restrict a, const uint8_t* __restrict w, const uint8_t* __restrict scratch,
             float* __restrict acc) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  TF_GEMM::multiply(a, w, scratch, acc);
}

// After the last tile of K.
void TF_KERNEL(store_bf16)(const float* __restrict acc, bfloat16* __restrict c) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  tilefuse::gemm::store_bf16<TF_M>(acc, c);
}

void TF_KERNEL(store_f32)(const float* __restrict acc, float* __restrict c) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  tilefuse::gemm::store_f32<TF_M>(acc, c);
}
}
