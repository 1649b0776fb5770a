// ldmatrix and stmatrix of 8-bit elements (PTX ISA 9.7.14.5.15 and 9.7.14.5.16), also from rows of
// packed 4- and 6-bit codes, which become one code a byte, in its low bits.
//
// Lane 8m + r (m16n16: 16m + r) gives the address of row r of matrix m. With g = lane / 4 and
// t = lane % 4:
//
//   ldmatrix m8n16          register m, byte i        row g, column 4t + i
//   ldmatrix m16n16.trans   register 2m + j, byte i   row 4t + i, column g + 8j
//   stmatrix m16n8.trans    register m, byte i        row 2t + i % 2, column g + 8 (i / 2)
//
// Rows take 16 bytes: 16 elements, or 8 bytes of 4-bit codes and 8 of padding (b4x16_p64), or 12
// bytes of 6-bit codes and 4 of padding (b6x16_p32). Padding is not read.
#include "numerics/formats.h"
#include "sim/ops/lanes.h"

namespace jax_fp4::sim {
namespace {

constexpr int kColumns = 16;
// Code::variant: bits of a stored element, and above them the number of matrices.
constexpr int kMatricesShift = 8;

// The elements of the row that a lane addresses, one a byte.
void read_row(Warp& w, const Code& c, int lane, u8 (&row)[kColumns]) {
  const u64 address = address_of(w, c, lane, c.src[0], 0);
  const int bits = c.variant & 0xFF;
  if (address % kColumns != 0)
    w.fault(c, lane, FaultKind::misaligned, "a row of a matrix must be aligned to 16 bytes");
  u8 packed[kColumns] = {};
  for (u32 at = 0; at < static_cast<u32>(2 * bits);) {
    const u32 bytes = bits == 8 ? 16 : at == 0 ? 8 : 4;
    std::memcpy(packed + at, access(w, c, lane, c.space, address + at, bytes, AccessKind::read),
                bytes);
    at += bytes;
  }
  const Element element = bits == 4 ? Element::e2m1 : bits == 6 ? Element::e2m3 : Element::e4m3;
  for (int k = 0; k < kColumns; ++k) row[k] = static_cast<u8>(load_code(element, packed, k));
}

void load_rows(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask)) return;
  const u32* slots = w.launch->program->slots.data() + c.vectors[0];
  for (int m = 0; m < c.variant >> kMatricesShift; ++m) {
    u8 rows[8][kColumns];
    for (int r = 0; r < 8; ++r) read_row(w, c, 8 * m + r, rows[r]);
    const Out<u32> d(w, slots[m]);
    for (int lane = 0; lane < kLanes; ++lane) {
      u32 word;
      std::memcpy(&word, &rows[lane / 4][4 * (lane % 4)], 4);
      d.set(lane, word);
    }
  }
}

void load_transposed(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask)) return;
  const u32* slots = w.launch->program->slots.data() + c.vectors[0];
  for (int m = 0; m < c.variant >> kMatricesShift; ++m) {
    u8 rows[16][kColumns];
    for (int r = 0; r < 16; ++r) read_row(w, c, 16 * m + r, rows[r]);
    for (int j = 0; j < 2; ++j) {
      const Out<u32> d(w, slots[2 * m + j]);
      for (int lane = 0; lane < kLanes; ++lane) {
        u32 word = 0;
        for (int i = 0; i < 4; ++i)
          word |= u32{rows[4 * (lane % 4) + i][lane / 4 + 8 * j]} << (8 * i);
        d.set(lane, word);
      }
    }
  }
}

void store_transposed(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask)) return;
  const u32* slots = w.launch->program->slots.data() + c.vectors[0];
  for (int m = 0; m < c.variant >> kMatricesShift; ++m) {
    u8 rows[8][kColumns];
    const In<u32> a(w, slots[m]);
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < 4; ++i)
        rows[2 * (lane % 4) + i % 2][lane / 4 + 8 * (i / 2)] = static_cast<u8>(a[lane] >> (8 * i));
    for (int r = 0; r < 8; ++r) {
      const int lane = 8 * m + r;
      u8* to = access(w, c, lane, c.space, address_of(w, c, lane, c.src[0], 0), kColumns,
                      AccessKind::write, rows[r]);
      std::memcpy(to, rows[r], kColumns);
    }
  }
}

Exec with_matrices(const Form& form, Code& code, int registers, Exec handler) {
  const int matrices = form.has("x4") ? 4 : form.has("x2") ? 2 : 1;
  const int bits = form.has("b4x16_p64") ? 4 : form.has("b6x16_p32") ? 6 : 8;
  code.space = form.has("shared") || form.has("shared::cta") ? Space::shared : Space::generic;
  code.variant = static_cast<u16>(bits | matrices << kMatricesShift);
  return code.counts[0] == matrices * registers ? handler : nullptr;
}

}  // namespace

Exec ldmatrix_m8n16(const Form& form, Code& code) {
  return with_matrices(form, code, 1, load_rows);
}
Exec ldmatrix_m16n16(const Form& form, Code& code) {
  return with_matrices(form, code, 2, load_transposed);
}
Exec stmatrix_m16n8(const Form& form, Code& code) {
  return with_matrices(form, code, 1, store_transposed);
}

}  // namespace jax_fp4::sim
