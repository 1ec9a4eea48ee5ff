// The entry points of an attention kernel whose heads have TF_D channels. Included by the kernel's .cc, with TF_NAME
// defined, and any number of times by one host translation unit, so without a guard.
//
// All pointers are 64-byte aligned, and no two arrays overlap; attention_layout.h says what they hold.

extern "C" {

void TF_KERNEL(begin)(float* __restrict state, float* __restrict o) {
  tilefuse::attention::Values<TF_D>::begin(state, o);
}

void TF_KERNEL(scores_int8)(const uint8_t* __restrict q, const uint8_t* __restrict kv, uint8_t* __restrict scores) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  tilefuse::attention::Scores<TF_D>::of_codes(q, kv, scores);
}

void TF_KERNEL(scores_bf16)(const uint8_t* __restrict q, const uint8_t* __restrict kv, int32_t half,
                            uint8_t* __restrict scores) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  tilefuse::attention::Scores<TF_D>::of_bf16(q, kv, half, scores);
}

void TF_KERNEL(softmax)(const uint8_t* __restrict scores, float* __restrict state, uint8_t* __restrict p) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  tilefuse::attention::Softmax::run(scores, state, p);
}

void TF_KERNEL(values)(const uint8_t* __restrict p, const uint8_t* __restrict kv, int32_t half, float* __restrict o) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  tilefuse::attention::Values<TF_D>::add(p, kv, half, o);
}

void TF_KERNEL(store)(const float* __restrict o, const float* __restrict state, int32_t block, uint8_t* __restrict y) {
  aie::set_rounding(aie::rounding_mode::conv_even);
  tilefuse::attention::Values<TF_D>::store(o, state, block, y);
}
}
