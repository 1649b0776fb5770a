// The instruction table in memory: rows parsed once from isa.def, and the search for a form.
#include "sim/isa.h"

#include <algorithm>
#include <unordered_map>

#include "sim/ops/ops.h"
#include "sim/ptx/lexer.h"

namespace jax_fp4::sim {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(separator), text.size());
    if (end > 0) parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

std::vector<ModifierToken> parse_modifiers(std::string_view text) {
  std::vector<ModifierToken> tokens;
  for (std::string_view part : split(text, ' ')) {
    ModifierToken token;
    token.hint = part[0] == '~';
    token.optional = token.hint || part[0] == '?';
    if (token.optional) part.remove_prefix(1);
    token.alternatives = split(part, '|');
    token.type = type_of_name(token.alternatives[0]) != Type::none;
    tokens.push_back(std::move(token));
  }
  return tokens;
}

OperandSpec parse_operand(std::string_view text) {
  OperandSpec spec;
  const auto accept = [&](char c) {
    if (text.empty() || text[0] != c) return false;
    text.remove_prefix(1);
    return true;
  };
  spec.optional = accept('?');
  spec.destination = accept('=');
  spec.vector = accept('v');
  if (text.ends_with("|p")) {
    spec.second_predicate = true;
    text.remove_suffix(2);
  }
  if (text.ends_with('~')) {
    spec.relaxed = true;
    text.remove_suffix(1);
  }
  if (text == "p") {
    spec.kind = OperandSpec::predicate;
    spec.type = Type::pred;
  } else if (text == "l") {
    spec.kind = OperandSpec::label;
  } else if (text == "m" || text == "t") {
    spec.kind = OperandSpec::address;
    spec.tensor = text == "t";
  } else if (text == "c") {
    spec.kind = OperandSpec::call;
  } else {
    spec.wide = accept('w');
    if (text[0] >= '0' && text[0] <= '9') {
      spec.form_type = text[0] - '0';
    } else {
      spec.type = type_of_name(text);
    }
  }
  return spec;
}

std::vector<Row> make_rows() {
  std::vector<Row> rows;
  OpClass op_class = OpClass::integer;
  const auto add = [&](std::string_view opcode, std::string_view modifiers,
                       std::string_view operands, Builder builder, std::string_view section,
                       int ptx, std::string_view target, bool inexact, bool asynchronous) {
    Row row{opcode, modifiers, operands, builder,      section, ptx,
            target, op_class,  inexact,  asynchronous, {},      {}};
    row.tokens = parse_modifiers(modifiers);
    for (std::string_view operand : split(operands, ','))
      row.specs.push_back(parse_operand(operand));
    rows.push_back(std::move(row));
  };
#define GROUP(name) op_class = OpClass::name;
#define ROW(opcode, modifiers, operands, builder, section, ptx, target) \
  add(opcode, modifiers, operands, &builder, section, ptx, target, false, false);
#define ASYNC(opcode, modifiers, operands, builder, section, ptx, target) \
  add(opcode, modifiers, operands, &builder, section, ptx, target, false, true);
#define APPROX(opcode, modifiers, operands, builder, section, ptx, target) \
  add(opcode, modifiers, operands, &builder, section, ptx, target, true, false);
#include "sim/isa.def"
#undef GROUP
#undef ROW
#undef ASYNC
#undef APPROX
  return rows;
}

using RowIndex = std::unordered_map<std::string_view, std::vector<u32>>;

const RowIndex& row_index() {
  static const RowIndex index = [] {
    RowIndex result;
    const std::vector<Row>& rows = isa_rows();
    for (u32 i = 0; i < rows.size(); ++i) result[rows[i].opcode].push_back(i);
    return result;
  }();
  return index;
}

bool matches(const Row& row, const Instruction& instruction, Form& form) {
  form = {};
  form.row = &row;
  std::vector<std::string_view> types, others;
  for (std::string_view modifier : instruction.modifiers)
    (type_of_name(modifier) != Type::none ? types : others).push_back(modifier);
  std::size_t next_type = 0;
  for (const ModifierToken& token : row.tokens) {
    const auto chosen = [&](std::string_view modifier) {
      const auto found = std::find(token.alternatives.begin(), token.alternatives.end(), modifier);
      return found == token.alternatives.end()
                 ? -1
                 : static_cast<int>(found - token.alternatives.begin());
    };
    int choice = -1;
    if (token.type) {
      if (next_type < types.size()) choice = chosen(types[next_type]);
      if (choice >= 0) form.types.push_back(type_of_name(types[next_type++]));
    } else {
      for (auto it = others.begin(); it != others.end(); ++it) {
        choice = chosen(*it);
        if (choice < 0) continue;
        others.erase(it);
        break;
      }
    }
    if (choice < 0 && !token.optional) return false;
    form.choices.push_back(choice);
  }
  return next_type == types.size() && others.empty();
}

// Whether the operands have the number and the syntax that a row wants: an address or not, a vector or not.
bool operands_fit(const Row& row, const Instruction& instruction) {
  for (std::size_t n = 0; n < instruction.operands.size(); ++n) {
    const OperandKind kind = instruction.operands[n].kind;
    const OperandSpec& spec = row.specs[n];
    if ((kind == OperandKind::address) != (spec.kind == OperandSpec::address)) return false;
    if (kind == OperandKind::vector && !spec.vector) return false;
  }
  return true;
}

std::string spelling(const Instruction& instruction) {
  std::string text(instruction.opcode);
  for (std::string_view modifier : instruction.modifiers) text += "." + std::string(modifier);
  return text;
}

// Chip number of "sm_100a": 100; the suffix a, f or '\0'.
struct Chip {
  int number = 0;
  char suffix = '\0';
};
Chip chip_of(std::string_view target) {
  Chip chip;
  for (char c : target) {
    if (c >= '0' && c <= '9') chip.number = chip.number * 10 + (c - '0');
    if (c == 'a' || c == 'f') chip.suffix = c;
  }
  return chip;
}

// Targets of isa.def: "any"; "sm_90": that chip or a later one; "blackwell": the a and f targets of 10x,
// 11x and 12x; "datacenter": those of 10x and 11x; "datacenter_a": of these the a targets; "i8": of these all but 103a;
// "sm120": the a and f targets of 12x; "fa": a or f target of 9x and later; "rs": 100a, 103a.
bool target_allows(std::string_view needed, std::string_view target) {
  if (needed == "any") return true;
  const Chip chip = chip_of(target);
  const bool special = chip.suffix != '\0';
  if (needed == "blackwell") return special && chip.number >= 100;
  if (needed == "datacenter") return special && chip.number >= 100 && chip.number < 120;
  const bool datacenter_a = chip.suffix == 'a' && chip.number >= 100 && chip.number < 120;
  if (needed == "datacenter_a") return datacenter_a;
  if (needed == "i8") return datacenter_a && chip.number != 103;
  if (needed == "sm120") return special && chip.number >= 120;
  if (needed == "fa") return special && chip.number >= 90;
  if (needed == "rs") return chip.suffix == 'a' && (chip.number == 100 || chip.number == 103);
  return chip.number >= chip_of(needed).number;
}

}  // namespace

std::string_view name_of_class(OpClass c) {
  constexpr std::string_view kNames[] = {"integer", "floating", "convert", "memory",
                                         "control", "warp",     "matrix"};
  return kNames[static_cast<int>(c)];
}

const std::vector<Row>& isa_rows() {
  static const std::vector<Row> rows = make_rows();
  return rows;
}

bool Form::has(std::string_view modifier) const {
  for (std::size_t i = 0; i < choices.size(); ++i)
    if (choices[i] >= 0 && row->tokens[i].alternatives[choices[i]] == modifier) return true;
  return false;
}

std::string_view Form::modifier(std::size_t token) const {
  return choices[token] < 0 ? std::string_view() : row->tokens[token].alternatives[choices[token]];
}

Form match_form(const Module& module, const Instruction& instruction) {
  const auto fail = [&](const std::string& message) {
    return PtxError(module.source, instruction.line, message);
  };
  const auto found = row_index().find(instruction.opcode);
  if (found == row_index().end()) {
    throw fail("instruction '" + spelling(instruction) +
               "' is not modelled: no row of the instruction table has this opcode");
  }
  // Rows may differ in their operands alone. Where none has operands like those given, the first row with their
  // number says what it expects.
  Form form;
  const Row* first = nullptr;
  bool fits = false, other_operands = false;
  for (u32 index : found->second) {
    const Row& row = isa_rows()[index];
    Form candidate;
    if (!matches(row, instruction, candidate)) continue;
    const std::size_t given = instruction.operands.size();
    std::size_t least = 0;
    for (const OperandSpec& spec : row.specs) least += !spec.optional;
    if (given < least || given > row.specs.size()) {
      other_operands = true;
      continue;
    }
    fits = operands_fit(row, instruction);
    if (first && !fits) continue;
    first = &row;
    form = std::move(candidate);
    form.row_index = index;
    if (fits) break;
  }
  if (first) {
    const Row& row = *first;
    if (module.version < row.ptx) {
      throw fail("'" + spelling(instruction) + "' needs .version " + std::to_string(row.ptx / 10) +
                 "." + std::to_string(row.ptx % 10) + " or newer");
    }
    if (!target_allows(row.target, module.target)) {
      throw fail("'" + spelling(instruction) + "' does not exist on " + module.target +
                 "; it needs target '" + std::string(row.target) + "'");
    }
    return form;
  }
  throw fail("instruction '" + spelling(instruction) +
             "' is not modelled: the opcode is known, but " +
             (other_operands ? "not with this number of operands" : "no row has these modifiers"));
}

u64 count_forms() {
  u64 total = 0;
  for (const Row& row : isa_rows()) {
    u64 forms = 1;
    for (const ModifierToken& token : row.tokens) {
      if (token.hint) continue;
      forms *= token.alternatives.size() + (token.optional ? 1 : 0);
    }
    total += forms;
  }
  return total;
}

}  // namespace jax_fp4::sim
