// Operands: registers, numbers, addresses, vectors, pairs, lists.
#include <algorithm>
#include <array>
#include <cstring>

#include "sim/ptx/parser_state.h"

namespace jax_fp4::sim {

Operand Parser::call_operand() {
  if (!accept('(')) {
    const Token& token = peek();
    if (token.kind == TokenKind::identifier && !find(token.text)) {
      Operand function;
      function.kind = OperandKind::function;
      function.name = take().text;
      return function;
    }
    return operand();
  }
  Operand list;
  list.kind = OperandKind::list;
  while (!accept(')')) {
    list.elements.push_back(operand());
    accept(',');
  }
  return list;
}

Operand Parser::operand() {
  Operand first = simple_operand();
  if (!accept('|')) return first;
  Operand pair;
  pair.kind = OperandKind::pair;
  pair.elements.push_back(std::move(first));
  pair.elements.push_back(simple_operand());
  return pair;
}

Operand Parser::simple_operand() {
  const Token& token = peek();
  Operand result;
  if (accept('{')) {
    result.kind = OperandKind::vector;
    while (!accept('}')) {
      result.elements.push_back(simple_operand());
      accept(',');
    }
    return result;
  }
  if (accept('[')) return address();
  if (accept('!')) {
    result = simple_operand();
    result.negated = true;
    return result;
  }
  if (token.kind == TokenKind::identifier) return named_operand();
  if (token.kind == TokenKind::f32 || token.kind == TokenKind::f64) {
    result.kind = token.kind == TokenKind::f32 ? OperandKind::f32 : OperandKind::f64;
    result.bits = take().bits;
    return result;
  }
  if (token.is('-') && (peek(1).kind == TokenKind::f64 || peek(1).kind == TokenKind::f32)) {
    take();
    result = simple_operand();
    result.bits ^= result.kind == OperandKind::f32 ? u64{1} << 31 : u64{1} << 63;
    return result;
  }
  if (token.kind == TokenKind::integer || token.is('-')) {
    result.kind = OperandKind::integer;
    result.bits = integer();
    return result;
  }
  fail(token.line, "expected an operand, found " + describe(token));
}

Operand Parser::named_operand() {
  const u32 line = peek().line;
  const std::string_view text = take().text;
  Operand result;
  if (text == "_") return result;
  if (const Symbol* symbol = find(text)) {
    result.index = symbol->index;
    switch (symbol->kind) {
      case Symbol::reg: result.kind = OperandKind::reg; break;
      case Symbol::branch_list: result.kind = OperandKind::branch_list; break;
      case Symbol::prototype: result.kind = OperandKind::function; break;
      case Symbol::variable:
        result.kind = OperandKind::variable;
        if (accept('+')) result.offset = static_cast<i64>(integer());
        break;
    }
    return result;
  }
  if (text[0] == '%') {
    result.kind = OperandKind::special;
    result.name = text.substr(1);
    if (peek().kind == TokenKind::dot) result.name += "." + std::string(take().text);
    return result;
  }
  result.kind = OperandKind::label;
  result.index = use_label(text, line);
  return result;
}

Operand Parser::address() {
  Operand result;
  result.kind = OperandKind::address;
  const Token& token = peek();
  if (token.kind == TokenKind::identifier) {
    const Operand base = named_operand();
    if (base.kind != OperandKind::reg && base.kind != OperandKind::variable)
      fail(token.line, "an address starts with a register or a variable, found " + describe(token));
    result.base_kind = base.kind;
    result.index = base.index;
    result.offset = base.offset;
    if (accept('+')) {
      result.offset += static_cast<i64>(integer());
    } else if (peek().is('-')) {
      result.offset += static_cast<i64>(integer());
    }
  } else {
    result.offset = static_cast<i64>(integer());
  }
  while (accept(',')) result.elements.push_back(simple_operand());
  expect(']');
  return result;
}

}  // namespace jax_fp4::sim
