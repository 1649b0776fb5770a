// What an instruction occupies in its sub-partition, and how long its result takes.
//
// PTX is not machine code. What the assembler makes disappear costs nothing: moves, loads of parameters and
// constants (operands of machine instructions), address conversions, hints. What it expands has several slots.
// What it fuses (logic of three operands, multiplications with additions of integers) is counted unfused.
#pragma once

#include "sim/machine/program.h"

namespace jax_fp4::sim::costs {

enum class Unit : u8 { none, floating, integer, convert, special, warp, memory, tensor, control };
inline constexpr int kUnits = 9;

struct InstructionCost {
  Unit unit = Unit::control;
  u32 slots = 1;    // instructions that are issued
  u32 cycles = 1;   // for which the unit is occupied
  u32 latency = 1;  // until the result may be used; of loads: what is not the memory's
  // What else it waits for.
  enum class Wait : u8 { none, tensor_loads, tensor_stores, copies, copy_groups } wait = Wait::none;
  enum class Tensor : u8 { none, load, store } tensor = Tensor::none;  // tcgen05.ld and .st
  u32 tensor_bytes = 0;                                                // of the warp
  double warp_mma_flop = 0;                                            // of mma.sync
  int warp_mma_bits = 0;                                               // of its elements
  bool commits_copies = false;
  bool barrier = false;  // goes on some cycles after everybody has arrived
};

InstructionCost cost_of(const Form& form, const Code& code);

}  // namespace jax_fp4::sim::costs
