// The attention kernel for each size of heads.
#include "variant.h"

#define TF_D 64
#include "attention_variant.h"
#undef TF_D
#define TF_D 128
#include "attention_variant.h"
