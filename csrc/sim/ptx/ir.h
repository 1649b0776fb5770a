// A parsed PTX module: names resolved, nothing interpreted yet.
//
//   Module  variables of module scope, functions
//   Function  registers, local variables, parameters, a flat list of instructions, label positions
//   Instruction  guard, opcode, modifiers in source order, operands
//
// Scopes are gone: registers, variables and labels are numbers that are unique in their function
// (variables: in the module).
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "sim/ptx/types.h"

namespace jax_fp4::sim {

inline constexpr u32 kNoIndex = ~0u;

struct Register {
  std::string name;
  Type type;
};

// A place of an initialiser that receives the address of a variable.
struct Relocation {
  u64 offset;
  u32 bytes;
  std::string symbol;
  i64 addend;
  bool generic;
};

struct Variable {
  std::string name;
  Space space = Space::global;
  Type element = Type::b8;
  u32 align = 1;
  u64 bytes = 0;
  u32 line = 0;
  bool external = false;  // `.extern .shared name[]`: the dynamic shared memory
  bool pointer = false;   // a parameter declared `.ptr`
  std::vector<u8> initial;
  std::vector<Relocation> relocations;
};

enum class OperandKind : u8 {
  reg,          // index
  integer,      // bits; a negative literal is sign-extended to 64 bits
  f32,          // bits
  f64,          // bits
  variable,     // index, offset: the address of a variable
  special,      // name: "tid.x"
  address,      // [base + offset]: base in `index` where base_kind is reg or variable
  vector,       // elements
  pair,         // elements[0] | elements[1]
  list,         // (elements): of a call
  label,        // index
  branch_list,  // index of Function::branch_lists
  function,     // name
  sink,         // _
};

struct Operand {
  OperandKind kind = OperandKind::sink;
  OperandKind base_kind = OperandKind::integer;  // of an address: reg, variable or integer
  bool negated = false;                          // !p
  u32 index = kNoIndex;
  u64 bits = 0;
  i64 offset = 0;
  std::string name;
  std::vector<Operand> elements;  // of an address: the coordinates of a tensor access
};

struct Instruction {
  u32 line = 0;
  u32 guard = kNoIndex;  // register of @p
  bool guard_negated = false;
  std::string_view opcode;
  std::vector<std::string_view> modifiers;
  std::vector<Operand> operands;
};

struct Function {
  std::string name;
  bool entry = false;
  bool defined = false;
  bool reports_assertion = false;  // __assertfail, which CUDA defines and assert() calls
  u32 line = 0;
  std::vector<Register> registers;
  std::vector<u32> parameters;  // variables, or registers where parameter_is_register
  std::vector<u32> results;
  std::vector<bool> parameter_is_register;
  std::vector<bool> result_is_register;
  std::vector<u32> variables;  // declared inside, in order
  std::vector<Instruction> body;
  std::vector<u32> labels;  // label number -> position in body
  std::vector<std::string> label_names;
  std::vector<std::vector<u32>> branch_lists;
  // Performance directives: name -> values (".reqntid" -> 128 1 1).
  std::map<std::string, std::vector<u64>, std::less<>> directives;
};

struct Module {
  std::string source;
  int version = 0;     // 88 for 8.8
  std::string target;  // "sm_100a"
  std::vector<Variable> variables;
  std::vector<Function> functions;

  const Function* find_function(std::string_view name) const {
    for (const Function& f : functions)
      if (f.name == name) return &f;
    return nullptr;
  }
};

}  // namespace jax_fp4::sim
