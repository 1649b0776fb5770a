// Plans for amax, quantize and dequantize: which kernel, and its grid. The parameters of the kernels
// are the problem; csrc/kernels/params.h describes them.
#pragma once

#include "plan/steps.h"

namespace jax_fp4::plan {

// Clears the outputs, then runs one pass. `rotate_rows`: the rotation is along the rows of x.
Steps amax(const AmaxParams& problem, bool rotate_rows, const Chip& chip);

// One pass. Both copies, where there are two, have the format of the problem.
Steps quantize(const QuantizeParams& problem);

Steps dequantize(const DequantizeParams& problem);

}  // namespace jax_fp4::plan
