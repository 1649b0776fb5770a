// The PTX inside what programs give to cuModuleLoadData. The machine runs PTX; a cubin alone is of no
// use to it. Accepted are
//
//   PTX text, ending with a zero byte
//   a cubin of ours: the ELF file, padded to 8 bytes; then 16 bytes of kCubinMarker, the length of the
//       PTX text as 8 bytes little-endian, the text and a zero byte. A driver reads an ELF file only up
//       to its end, so the same bytes load on hardware
//   a fat binary, or the wrapper of it that nvcc registers, whose PTX is not compressed
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "numerics/base.h"

namespace jax_fp4::sim {

inline constexpr std::string_view kCubinMarker = "JAX_FP4_PTX_TEXT";

// Every PTX text of the image, which may hold one for each of several targets. Throws
// std::invalid_argument that says what the image is and how to make one that the machine runs.
std::vector<std::string> ptx_of_image(const void* image);

// What the head of a PTX text says: "sm_100a"; 88 for 8.8. Empty or 0 where it does not.
std::string ptx_target(std::string_view ptx);
int ptx_version(std::string_view ptx);

}  // namespace jax_fp4::sim
