// The entry points of a GEMV kernel whose arithmetic is the type TF_GEMV. Included by the kernels' .cc, with TF_NAME
// defined, and any number of times by one host translation unit, so without a guard.
//
// All pointers are 64-byte aligned, and no two arrays overlap: a store must not hold up the next loads of its loop.
// x is 128 bfloat16, acc 64 fp32, w a packed tile, scratch scratch_bytes() bytes.
//
// A core of a design that splits K over four rows keeps its own up to 8192 channels of x and prepares them tile by tile
// (prepare_resident). x comes in objects of four k tiles, one for each row of cores (keep_row), or, at the head of the
// stream of weights, in objects of a tile's size (keep).

extern "C" {

void TF_KERNEL(zero)(float* __restrict acc) { tilefuse::gemv::zero(acc); }

unsigned TF_KERNEL(scratch_bytes)() { return TF_GEMV::scratch_bytes; }

void TF_KERNEL(prepare)(const bfloat16* __restrict x, uint8_t* __restrict x_scratch) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  TF_GEMV::prepare(x, x_scratch);
}

// x: bfloat16 [4][128]; x_resident: bfloat16 [64][128], of which it writes k_tile.
void TF_KERNEL(keep_row)(const bfloat16* __restrict x, int32_t row, int32_t k_tile, bfloat16* __restrict x_resident) {
  using namespace tilefuse::gemv;
  keep<kTileOfX>(x + row * kTileOfX, x_resident + k_tile * kTileOfX);
}

// object: 2048 bfloat16 from its byte 64 on, a design's own before; x_resident: bfloat16 [4][2048], of which it writes
// index.
void TF_KERNEL(keep)(const uint8_t* __restrict object, int32_t index, bfloat16* __restrict x_resident) {
  using namespace tilefuse::gemv;
  keep<kQuarterOfX>(reinterpret_cast<const bfloat16*>(object + 64), x_resident + index * kQuarterOfX);
}

// x_resident: bfloat16 [64][128].
void TF_KERNEL(prepare_resident)(const bfloat16* __restrict x_resident, int32_t k_tile, uint8_t* __restrict x_scratch) {
  TF_KERNEL(prepare)(x_resident + k_tile * tilefuse::gemv::kTileOfX, x_scratch);
}

void TF_NAME(const uint8_t* __restrict x_scratch, const uint8_t* __restrict w, float* __restrict acc) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  TF_GEMV::multiply(x_scratch, w, acc);
}

void TF_KERNEL(add)(const float* __restrict partial, float* __restrict acc) { tilefuse::gemv::add(partial, acc); }

void TF_KERNEL(store_bf16)(const float* __restrict acc, bfloat16* __restrict y) { tilefuse::gemv::store_bf16(acc, y); }
}
