// From a checkpoint's codes, scales and zero points to packed tiles, and back.
#pragma once

#include "tile_layout.h"
