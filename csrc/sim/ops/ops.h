// The builders of all instructions: declared from the table, defined in the files of this folder.
#pragma once

#include "sim/isa.h"

namespace jax_fp4::sim {

#define GROUP(name)
#define ROW(opcode, modifiers, operands, builder, section, ptx, target) \
  Exec builder(const Form& form, Code& code);
#define APPROX ROW
#define ASYNC ROW
#include "sim/isa.def"
#undef GROUP
#undef ROW
#undef APPROX
#undef ASYNC

}  // namespace jax_fp4::sim
