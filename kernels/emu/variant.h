// What the host translation units of all kernels share: words for the macros of a configuration.
#pragma once

#include <aie_api/aie.hpp>

#include "config.h"
#include "packed_tile.h"
#include "registry.h"

#define TF_TEXT_(name) #name
#define TF_TEXT(name) TF_TEXT_(name)

namespace tilefuse::emu {

constexpr const char* path_name(int path) {
  switch (path) {
    case TF_PATH_EMULATED:
      return "emulated";
    case TF_PATH_BFP16:
      return "bfp16";
    case TF_PATH_MANTISSA:
      return "mantissa";
    case TF_PATH_ELEMENTWISE:
      return "elementwise";
  }
  return "";
}

}  // namespace tilefuse::emu
