// What the launches of this process have executed: forms of the instruction table, and forms of descriptors.
//
// Tests ask which forms none of them reaches. With JAX_FP4_SIM_FORMS=FILE a process appends a line for
// everything that it has executed to FILE when it ends; that is how programs which know nothing of us
// become witnesses (docs/forms.md).
#pragma once

#include <string>
#include <vector>

#include "sim/machine/core.h"
#include "sim/tensor_map.h"

namespace jax_fp4::sim {

// One alternative of a row of the instruction table; `alternative` is empty where the row has none.
struct InstructionForm {
  std::string opcode, modifiers, operands, alternative;
};

void record_executed(const Launch& launch);

// What a launch uses of the forms of tensor maps and of the matrix descriptors of tcgen05.
void record_tensor_map(const TensorMap& map);
void record_matrix_descriptor(u64 descriptor, bool mn_major);

std::vector<InstructionForm> unreached_forms();

}  // namespace jax_fp4::sim
