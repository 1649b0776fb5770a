// The instruction table: which forms exist, and how an instruction of the text finds its row.
//
// A row of isa.def is ROW(opcode, modifiers, operands, builder, section, ptx, target).
//
// modifiers  tokens separated by blanks, each a choice "a|b|c" of modifiers without dots; "?a|b" may be
//            absent; "~a|b" may be absent and has no effect on the result (cache hints and the like).
//            Tokens that are types are matched in order, all others as a set.
// operands   separated by commas, each
//              role   "=" a destination, "?" may be absent, "v" one register or a vector of them
//              type   a digit n: the n-th type of the form; "wn": twice as wide; a type name;
//                     "p" predicate; "l" label; "m" address; "t" address of a
//                     tensor map with coordinates (a vector operand follows it); "c" call operand
//              suffix "|p": a second, predicate destination; "~": the register may be wider
// builder    function of ops/ that turns the form into an executable handler
// section    of the PTX ISA; ptx: least .version times ten; target: least .target (see isa.cc)
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sim/ptx/ir.h"

namespace jax_fp4::sim {

struct Warp;
struct Code;
struct Form;

// Executes one instruction for the lanes of `mask` (never empty).
using Exec = void (*)(Warp&, const Code&, u32 mask);
// Chooses the handler of a form; may use the fields `variant` and `width` of the code. Null where
// the combination of modifiers does not exist.
using Builder = Exec (*)(const Form&, Code&);

enum class OpClass : u8 { integer, floating, convert, memory, control, warp, matrix };
inline constexpr int kOpClasses = 7;
std::string_view name_of_class(OpClass c);

struct ModifierToken {
  std::vector<std::string_view> alternatives;
  bool optional = false;
  bool hint = false;
  bool type = false;
};

struct OperandSpec {
  enum Kind : u8 { value, predicate, label, address, call } kind = value;
  bool destination = false;
  bool optional = false;
  bool vector = false;
  bool second_predicate = false;
  bool relaxed = false;  // the register may be wider than the type
  bool tensor = false;   // an address with coordinates
  int form_type = -1;    // number of a type of the form, or -1: `type`
  bool wide = false;
  Type type = Type::none;
};

struct Row {
  std::string_view opcode, modifiers, operands;
  Builder builder;
  std::string_view section;
  int ptx;
  std::string_view target;
  OpClass op_class;
  bool inexact;       // the hardware may differ within a documented tolerance
  bool asynchronous;  // performed by an engine, some time later (machine/async.h)
  std::vector<ModifierToken> tokens;
  std::vector<OperandSpec> specs;
};

const std::vector<Row>& isa_rows();

// An instruction's row, and which alternative of each token it has (-1: absent).
struct Form {
  const Row* row = nullptr;
  u32 row_index = 0;
  std::vector<int> choices;
  std::vector<Type> types;

  bool has(std::string_view modifier) const;
  // The modifier chosen for token n, or "".
  std::string_view modifier(std::size_t token) const;
  Type type(std::size_t n) const { return n < types.size() ? types[n] : Type::none; }
};

// Finds the row; throws PtxError if there is none, or if the version or the target is too low for it.
Form match_form(const Module& module, const Instruction& instruction);

// Number of different forms that the table describes (hints not counted).
u64 count_forms();

}  // namespace jax_fp4::sim
