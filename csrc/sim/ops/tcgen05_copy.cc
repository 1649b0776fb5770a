// tcgen05.cp (PTX ISA 9.7.16.9): rows of a K-major matrix in shared memory to lanes of tensor memory.
//
// Row r of 16 or 32 bytes goes to ... the words of a row to columns that follow each other:
//   128x256b, 128x128b    lane r
//   4x256b                lane 32 r, counted from the lane of the address
//   64x128b.warpx2::02_13 lanes r and r + 64
//   64x128b.warpx2::01_23 lanes r % 32 + 64 (r / 32), and 32 more
//   32x128b.warpx4        lanes r, r + 32, r + 64 and r + 96
// With .cta_group::2 each CTA of the pair copies from its own shared memory, at the same offsets, to its own
// tensor memory. A copy belongs to the pipe of the warp that issued it and reads through the asynchronous proxy.
//
// A chunk of 16 elements of 4 or 6 bits takes 16 bytes, of which the last 8 or 4 are padding that is not read. It
// becomes 16 bytes, one element in the low bits of each (docs/simulator.md, assumption S45).
#include "sim/coverage.h"
#include "sim/machine/async.h"
#include "sim/ops/matrix_descriptor.h"
#include "sim/ops/tcgen05.h"

namespace jax_fp4::sim {
namespace {

enum class Shape : u8 { s128x256b, s4x256b, s128x128b, s64x128b_02_13, s64x128b_01_23, s32x128b };

// Code::variant: the shape in the low byte; then these.
constexpr u16 kPair = 1 << 8, kFourBit = 1 << 9, kSixBit = 1 << 10;

constexpr u32 kChunkBytes = 16, kChunkColumns = 4;
constexpr u32 kQuarter = kTensorLanes / 4;

struct Extent {
  u32 rows, chunks;  // of 16 bytes in a row
};
Extent extent_of(Shape shape) {
  switch (shape) {
    case Shape::s128x256b: return {128, 2};
    case Shape::s4x256b: return {4, 2};
    case Shape::s128x128b: return {128, 1};
    case Shape::s32x128b: return {32, 1};
    default: return {64, 1};
  }
}

// The lanes that row r goes to, as a first one, how many and how far apart.
struct Lanes {
  u32 first, count, step;
};
Lanes lanes_of(Shape shape, u32 row) {
  switch (shape) {
    case Shape::s4x256b: return {kQuarter * row, 1, 0};
    case Shape::s64x128b_02_13: return {row, 2, 2 * kQuarter};
    case Shape::s64x128b_01_23:
      return {row % kQuarter + 2 * kQuarter * (row / kQuarter), 2, kQuarter};
    case Shape::s32x128b: return {row, 4, kQuarter};
    default: return {row, 1, 0};
  }
}

// 16 elements of `bits` bits to a byte each.
void expand(const u8* packed, u32 bits, u8* bytes) {
  for (u32 i = 0; i < kChunkBytes; ++i) {
    const u32 at = i * bits;
    u32 pair = packed[at / 8];
    if (at % 8 + bits > 8) pair |= static_cast<u32>(packed[at / 8 + 1]) << 8;
    bytes[i] = static_cast<u8>(pair >> at % 8 & ((1u << bits) - 1));
  }
}

class CopyOperation : public AsyncOperation {
 public:
  CopyOperation(Warp& issuer, const Code& c, int issuing_lane, u32 taddr,
                const SharedMatrix& matrix)
      : AsyncOperation(issuer, c, issuing_lane, Clock::pipe), taddr_(taddr), matrix_(matrix) {
    // The PTX ISA (9.7.16.6) orders a copy before a later MMA, and not an MMA before a later copy.
    follows_waits = warp->launch->spec.checks.strict;
  }

  bool uses(const Cta& cta) const override {
    return &cta == warp->cta || ((code->variant & kPair) && &cta == &peer_of(*warp->cta));
  }

  AsyncWork work() const override {
    const Extent extent = extent_of(static_cast<Shape>(code->variant & 0xFF));
    AsyncWork work;
    work.engine = AsyncWork::Engine::tensor_copy;
    work.ctas = code->variant & kPair ? 0b11u << (warp->cta->rank & ~1u) : 1u << warp->cta->rank;
    work.shared_bytes = u64{extent.rows} * extent.chunks * kChunkBytes;
    const u32 copies = lanes_of(static_cast<Shape>(code->variant & 0xFF), 0).count;
    work.tensor_bytes = work.shared_bytes * copies;
    return work;
  }

  void perform() override {
    if (!moves_data()) return;
    copy(*warp->cta);
    if (code->variant & kPair) copy(peer_of(*warp->cta));
  }

 private:
  void copy(Cta& cta) {
    const Shape shape = static_cast<Shape>(code->variant & 0xFF);
    const Extent extent = extent_of(shape);
    const u32 bits = code->variant & kFourBit ? 4 : code->variant & kSixBit ? 6 : 8;
    const u32 column = tensor_column(taddr_);
    const u64 base = u64{cta.rank} << kRankShift;
    if (shape == Shape::s4x256b) {
      for (u32 row = 0; row < extent.rows; ++row)
        write(cta, lanes_of(shape, row).first + tensor_lane(taddr_), 1, extent.chunks);
    } else {
      write(cta, 0, kTensorLanes, extent.chunks);
    }
    for (u32 row = 0; row < extent.rows; ++row) {
      const Lanes lanes = lanes_of(shape, row);
      for (u32 chunk = 0; chunk < extent.chunks; ++chunk) {
        u8 bytes[kChunkBytes];
        const u8* from = access(Space::shared_cluster, base + matrix_.address(row, chunk),
                                kChunkBytes * bits / 8, AccessKind::read);
        if (bits == 8) {
          std::memcpy(bytes, from, kChunkBytes);
        } else {
          expand(from, bits, bytes);
        }
        for (u32 k = 0; k < lanes.count; ++k) {
          const u32 lane = lanes.first + k * lanes.step + tensor_lane(taddr_);
          std::memcpy(cta.tensor->lane(lane) + column + kChunkColumns * chunk, bytes, kChunkBytes);
        }
      }
    }
  }
  void write(Cta& cta, u32 lane, u32 lanes, u32 chunks) {
    cta.tensor->access(actor(), TensorMemory::Use::write, lane, lanes, tensor_column(taddr_),
                       kChunkColumns * chunks);
  }

  u32 taddr_;
  SharedMatrix matrix_;
};

void copy_lanes(Warp& w, const Code& c, u32 mask) {
  warn_of_lanes(w, c, mask);
  const Shape shape = static_cast<Shape>(c.variant & 0xFF);
  const Extent extent = extent_of(shape);
  const u32 most = shape == Shape::s4x256b ? kQuarter - 1 : 0;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const u32 taddr = static_cast<u32>(address_of(w, c, lane, c.src[0], 0));
    if (tensor_lane(taddr) > most) {
      w.fault(c, lane, FaultKind::argument,
              "the address names lane " + std::to_string(tensor_lane(taddr)) + "; expected " +
                  (most == 0 ? "lane 0" : "a lane below 32"));
    }
    try {
      const SharedMatrix matrix(w.in64(c.src[1])[lane], Major::k, extent.rows, extent.chunks);
      record_matrix_descriptor(w.in64(c.src[1])[lane], false);
      w.launch->issue(std::make_unique<CopyOperation>(w, c, lane, taddr, matrix));
    } catch (const MatrixDescriptorError& error) {
      w.fault(c, lane, error.kind, std::string("the matrix descriptor: ") + error.what());
    }
  }
}

}  // namespace

Exec tcgen05_cp(const Form& form, Code& code) {
  const Shape shape = form.has("128x256b")        ? Shape::s128x256b
                      : form.has("4x256b")        ? Shape::s4x256b
                      : form.has("128x128b")      ? Shape::s128x128b
                      : form.has("warpx2::02_13") ? Shape::s64x128b_02_13
                      : form.has("warpx2::01_23") ? Shape::s64x128b_01_23
                                                  : Shape::s32x128b;
  // The formats of destination and source come together.
  const bool expands = form.has("b8x16");
  const u16 packing = form.has("b4x16_p64") ? kFourBit : form.has("b6x16_p32") ? kSixBit : 0;
  if (expands != (packing != 0)) return nullptr;
  code.variant =
      static_cast<u16>(static_cast<u16>(shape) | packing | (form.has("cta_group::2") ? kPair : 0));
  return copy_lanes;
}

}  // namespace jax_fp4::sim
