// All outputs of one MMA instruction of a tensor core, bit for bit those of mma_fp4_step and mma_plain_step
// (csrc/numerics), at the speed of the host's vector units.
#pragma once

#include <memory>
#include <vector>

#include "numerics/mma_plain.h"

namespace jax_fp4::sim {

// What an instruction multiplies and how it adds.
struct MmaKind {
  enum class Terms : u8 {
    groups,    // sums of 16 products (mxf4, mxf4nvf4)
    products,  // single products
    integers,
  };
  Terms terms = Terms::products;
  int k = 0;                            // elements of a row
  Minifloat a = kE2M1, b = kE2M1;       // their formats
  BlockScale scale = BlockScale::unit;  // unit: there are none
  int scales = 0;                       // of a row
  bool negate_a = false, negate_b = false;
  MmaCore core{};                                              // products
  bool signed_a = false, signed_b = false, saturates = false;  // integers
};

// Rows of A or columns of B: k codes each, and their scale bytes.
struct MmaOperand {
  int rows = 0;
  std::vector<u32> codes;  // [rows, k]
  std::vector<u8> scales;  // [rows, scales]
};

// The levels at which the inner loops were compiled.
enum class VectorLevel : u8 { portable, avx2, avx512 };
VectorLevel best_vector_level();

inline constexpr int kMmaMostColumns = 256;

class MmaTile {
 public:
  MmaTile(const MmaKind& kind, const MmaOperand& a, const MmaOperand& b, MmaSum sum,
          VectorLevel level = best_vector_level());
  ~MmaTile();

  // Adds the products of a row of A to d, which has room for kMmaMostColumns; those beyond the columns of B
  // are not defined.
  void row(int m, u32* d) const;

 private:
  struct Parts;
  u32 single(int m, int n, u32 c) const;

  MmaKind kind_;
  MmaSum sum_;
  VectorLevel level_;
  int columns_;
  std::unique_ptr<Parts> parts_;
};

}  // namespace jax_fp4::sim
