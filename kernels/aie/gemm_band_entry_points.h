// The entry points of a GEMM kernel of bfp16 activations whose arithmetic is the type TF_GEMM. Included by the kernels'
// .cc, with TF_NAME and TF_TILES defined, and any number of times by one host translation unit, so without a guard.
//
// All pointers are 64-byte aligned, and no two arrays overlap: a store must not hold up the next loads of its loop.
// a: a band, 2304 bytes (gemm_band.h); w: TF_TILES packed tiles; scratch: scratch_bytes() bytes; acc: fp32
// [bands][TF_TILES][2][8] blocks of [8 rows][8 output channels], always all of it; band: which of them to work on, a
// number that a design may know at run time only.

extern "C" {

void TF_KERNEL(zero)(float* __restrict acc, int32_t band) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  tilefuse::gemm::zero<TF_TILES * tilefuse::gemm::kBandRows>(acc + band * (TF_TILES * tilefuse::gemm::kPieceFloats));
}

unsigned TF_KERNEL(scratch_bytes)() { return TF_GEMM::scratch_bytes; }

// Once for the weights of a k tile.
void TF_KERNEL(prepare)(const uint8_t* __restrict w, uint8_t* __restrict scratch) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  TF_GEMM::prepare(w, scratch);
}

// acc[band] += a w, once a band.
void TF_NAME(const uint8_t* __restrict a, const uint8_t* __restrict w, const uint8_t* __restrict scratch,
             float* __restrict acc, int32_t band) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  TF_GEMM::multiply(a, w, scratch, acc + band * (TF_TILES * tilefuse::gemm::kPieceFloats));
}

// After the last tile of K: the 64 output channels of tile `half` of a band. c: bfloat16 [2][8] blocks of [8][8].
void TF_KERNEL(store_bf16)(const float* __restrict acc, int32_t band, int32_t half, bfloat16* __restrict c) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  tilefuse::gemm::store_bf16<tilefuse::gemm::kBandRows>(acc + (band * TF_TILES + half) * tilefuse::gemm::kPieceFloats,
                                                        c);
}
}
