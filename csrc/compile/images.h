// The compiled kernels of a build, embedded. compile_kernels.py writes the table's definition; a
// build without the device compilers has none and does not link this.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jax_fp4 {

enum class ImageKind : std::uint8_t { ptx, cubin };

struct ImageEntry {
  const char* kernel;  // of csrc/kernels/variants.def: also the name of the image's only entry
  const char* target;  // of PTX "100f", "120f", "90", "80"; of a cubin the chip, as "103a"
  ImageKind kind;
  std::size_t offset, bytes;  // in ImageTable::data; PTX ends with a NUL, which is counted
};

struct ImageTable {
  const ImageEntry* entries;
  std::size_t count;
  const unsigned char* data;  // aligned to 64 bytes, as is every image
};

ImageTable images();

}  // namespace jax_fp4
