// The entry points of a GEMV kernel whose arithmetic is the type TF_GEMV. Included by the kernels' .cc, with TF_NAME
// defined, and any number of times by one host translation unit, so without a guard.
//
// All pointers are 64-byte aligned, and no two arrays overlap: a store must not hold up the next loads of its loop.
// x is 128 bfloat16, acc 64 fp32, w a packed tile, scratch scratch_bytes() bytes.

extern "C" {

void TF_KERNEL(zero)(float* __restrict acc) { tilefuse::gemv::zero(acc); }

unsigned TF_KERNEL(scratch_bytes)() { return TF_GEMV::scratch_bytes; }

void TF_KERNEL(prepare)(const bfloat16* __restrict x, uint8_t* __restrict x_scratch) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  TF_GEMV::prepare(x, x_scratch);
}

void TF_NAME(const uint8_t* __restrict x_scratch, const uint8_t* __restrict w, float* __restrict acc) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  TF_GEMV::multiply(x_scratch, w, acc);
}

void TF_KERNEL(add)(const float* __restrict partial, float* __restrict acc) { tilefuse::gemv::add(partial, acc); }

void TF_KERNEL(store_bf16)(const float* __restrict acc, bfloat16* __restrict y) { tilefuse::gemv::store_bf16(acc, y); }
}
