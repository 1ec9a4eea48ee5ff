// TF_SOURCE in the path that stands, for every group size and kind of zero point.
#define TF_MINIMA 0
#define TF_GROUP 32
#include "gemv_variant.h"
#undef TF_GROUP
#define TF_GROUP 64
#include "gemv_variant.h"
#undef TF_GROUP
#define TF_GROUP 128
#include "gemv_variant.h"
#undef TF_GROUP
#undef TF_MINIMA

#define TF_MINIMA 1
#define TF_GROUP 32
#include "gemv_variant.h"
#undef TF_GROUP
#define TF_GROUP 64
#include "gemv_variant.h"
#undef TF_GROUP
#define TF_GROUP 128
#include "gemv_variant.h"
#undef TF_GROUP
#undef TF_MINIMA
