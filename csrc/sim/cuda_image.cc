// Module images: which kind one is, and where its PTX lies.
#include "sim/cuda_image.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace jax_fp4::sim {
namespace {

// First words of images. The wrapper that nvcc registers and the container it points to (fatbinary_section.h, and the files
// that NVIDIA's fatbinary 13.5 writes).
constexpr u32 kElfMagic = 0x464C457F;  // 0x7F and "ELF"
constexpr u32 kWrapperMagic = 0x466243B1;
constexpr u32 kFatbinMagic = 0xBA55ED50;
constexpr u16 kPtxEntry = 1;

struct FatbinWrapper {
  u32 magic, version;
  const u8* data;
};
struct FatbinHeader {
  u32 magic;
  u16 version, header_bytes;
  u64 bytes;  // of the entries
};
struct FatbinEntry {
  u16 kind, unknown;
  u32 header_bytes;
  u64 bytes;  // of the payload, padding included
  u32 compressed_bytes;
  u32 options;
  u16 ptx_minor, ptx_major;
  u32 chip;
};
static_assert(sizeof(FatbinHeader) == 16 && sizeof(FatbinEntry) == 32);

// Of the ELF64 header and its tables, what tells how long the file is (ELF specification 1.2).
struct ElfHeader {
  u8 identity[16];
  u16 type, machine;
  u32 version;
  u64 entry, program_offset, section_offset;
  u32 flags;
  u16 header_bytes, program_bytes, programs, section_bytes, sections, names;
};
struct ElfSection {
  u32 name, type;
  u64 flags, address, offset, bytes;
};
constexpr u32 kElfNoBits = 8;  // a section without bytes in the file
static_assert(sizeof(ElfHeader) == 64 && sizeof(ElfSection) == 40);

template <class T>
T read(const u8* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// Byte by byte, since nothing says how long an image is: reading stops at the first difference.
bool starts_with(const u8* bytes, std::string_view expected) {
  return std::all_of(expected.begin(), expected.end(),
                     [&](char c) { return *bytes++ == static_cast<u8>(c); });
}
bool starts_with(const u8* bytes, u32 magic) {
  return starts_with(bytes, std::string_view(reinterpret_cast<const char*>(&magic), sizeof magic));
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

u64 elf_bytes(const u8* image) {
  const auto elf = read<ElfHeader>(image);
  u64 end = std::max<u64>(elf.program_offset + u64{elf.programs} * elf.program_bytes,
                          elf.section_offset + u64{elf.sections} * elf.section_bytes);
  for (u64 s = 0; s < elf.sections; ++s) {
    const auto section = read<ElfSection>(image + elf.section_offset + s * elf.section_bytes);
    if (section.type != kElfNoBits) end = std::max(end, section.offset + section.bytes);
  }
  return end;
}

std::string ptx_behind_cubin(const u8* image) {
  const u8* trailer = image + round_up(static_cast<i64>(elf_bytes(image)), 8);
  if (!starts_with(trailer, kCubinMarker))
    refuse(
        "the image is a cubin without PTX behind it, and the PTX machine runs PTX only: load the PTX "
        "text, or a cubin that compile_kernels.py has written");
  const u64 bytes = read<u64>(trailer + kCubinMarker.size());
  const auto* text = reinterpret_cast<const char*>(trailer + kCubinMarker.size() + sizeof(u64));
  if (text[bytes] != '\0') refuse("the PTX behind the cubin does not end where its length says");
  return std::string(text, bytes);
}

std::vector<std::string> ptx_of_fatbin(const u8* image) {
  const auto header = read<FatbinHeader>(image);
  std::vector<std::string> texts;
  const u8* at = image + header.header_bytes;
  const u8* end = at + header.bytes;
  std::string others;
  while (at < end) {
    const auto entry = read<FatbinEntry>(at);
    if (entry.header_bytes < sizeof(FatbinEntry) ||
        entry.header_bytes + entry.bytes > static_cast<u64>(end - at))
      refuse("the fat binary is damaged: an entry is longer than what is left of the file");
    if (entry.kind == kPtxEntry) {
      if (entry.compressed_bytes != 0)
        refuse("the PTX in the fat binary (chip " + std::to_string(entry.chip) +
               ") is compressed; compile with `nvcc -Xfatbin -compress-mode=none`");
      const auto* text = reinterpret_cast<const char*>(at + entry.header_bytes);
      texts.emplace_back(text, strnlen(text, entry.bytes));
    } else {
      others += " " + std::to_string(entry.chip);
    }
    at += entry.header_bytes + entry.bytes;
  }
  if (texts.empty())
    refuse(
        "the fat binary has no PTX" +
        (others.empty() ? std::string() : ", only machine code for chips" + others) +
        "; compile with `nvcc -gencode arch=compute_100a,code=compute_100a` or another compute_...");
  return texts;
}

// What follows a directive at the start of a line, up to a blank, a comma or the line's end.
std::string_view directive(std::string_view ptx, std::string_view name) {
  while (!ptx.empty()) {
    const std::size_t end = std::min(ptx.find('\n'), ptx.size());
    std::string_view line = ptx.substr(0, end);
    ptx.remove_prefix(std::min(end + 1, ptx.size()));
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
    if (!line.starts_with(name)) continue;
    line.remove_prefix(name.size());
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
    return line.substr(0, line.find_first_of(" \t,;/\r"));
  }
  return {};
}

}  // namespace

std::vector<std::string> ptx_of_image(const void* image) {
  const auto* bytes = static_cast<const u8*>(image);
  if (starts_with(bytes, kElfMagic)) return {ptx_behind_cubin(bytes)};
  if (starts_with(bytes, kWrapperMagic)) return ptx_of_fatbin(read<FatbinWrapper>(bytes).data);
  if (starts_with(bytes, kFatbinMagic)) return ptx_of_fatbin(bytes);
  std::string text(reinterpret_cast<const char*>(bytes));
  if (text.find(".version") == std::string::npos)
    refuse(
        "the image is no PTX text (it has no .version), no cubin and no fat binary; expected one of "
        "them");
  return {std::move(text)};
}

std::string ptx_target(std::string_view ptx) { return std::string(directive(ptx, ".target")); }

int ptx_version(std::string_view ptx) {
  int version = 0;
  for (char c : directive(ptx, ".version"))
    if (c >= '0' && c <= '9') version = version * 10 + (c - '0');
  return version;
}

}  // namespace jax_fp4::sim
