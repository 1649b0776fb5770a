// The conversions in which kernels spend their time, in loops that the compiler can vectorize. Each gives what
// the general handler of ops/convert.cc gives, and is null for forms that only that one knows.
#pragma once

#include "sim/isa.h"

namespace jax_fp4::sim {

Exec common_integer_conversion(const Form& form, const Code& code);
Exec common_float_to_integer(const Form& form, const Code& code);
Exec common_integer_to_float(const Form& form, const Code& code);
Exec common_float_to_float(const Form& form, const Code& code);
Exec common_pair(const Form& form, const Code& code);
Exec common_elements(const Form& form, const Code& code);

}  // namespace jax_fp4::sim
