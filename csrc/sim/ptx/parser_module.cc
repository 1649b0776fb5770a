// The head of a module, its variables and their initial values.
#include <algorithm>
#include <array>
#include <cstring>

#include "sim/ptx/parser_state.h"

namespace jax_fp4::sim {
namespace {

constexpr std::string_view kLinkage[] = {"visible", "weak", "extern", "common"};

}  // namespace

void Parser::header() {
  while (skip_debug()) {
  }
  if (!accept_dot("version")) fail(peek().line, "expected .version, found " + describe(peek()));
  const u32 line = peek().line;
  const std::string_view text = take().text;
  const std::size_t dot = text.find('.');
  if (dot == std::string_view::npos || dot + 2 != text.size())
    fail(line, "expected a version such as 8.8");
  module_->version = std::atoi(std::string(text).c_str()) * 10 + (text[dot + 1] - '0');
  if (!accept_dot("target")) fail(peek().line, "expected .target, found " + describe(peek()));
  module_->target = name("a target");
  while (accept(',')) name("a target option");
  if (accept_dot("address_size") && integer() != 64)
    fail(peek().line, "only 64-bit addresses are modelled");
}

void Parser::module_item() {
  if (skip_debug() || accept(';')) return;
  bool external = false;
  while (peek().kind == TokenKind::dot &&
         std::find(std::begin(kLinkage), std::end(kLinkage), peek().text) != std::end(kLinkage))
    external |= take().text == "extern";
  if (peek().is_dot("entry") || peek().is_dot("func")) {
    function();
  } else if (const std::optional<Space> space = variable_space()) {
    variables(*space, external);
  } else if (accept_dot("pragma")) {
    while (!accept(';')) take();
  } else {
    fail(peek().line, "expected a function or a variable, found " + describe(peek()));
  }
}

std::optional<Space> Parser::variable_space() const {
  const Token& token = peek();
  if (token.is_dot("global")) return Space::global;
  if (token.is_dot("shared") || token.is_dot("shared::cta")) return Space::shared;
  if (token.is_dot("const")) return Space::constant;
  if (token.is_dot("local")) return Space::local;
  if (token.is_dot("param")) return Space::param;
  return std::nullopt;
}

Type Parser::type(const char* what) {
  const Token& token = take();
  const Type result = token.kind == TokenKind::dot ? type_of_name(token.text) : Type::none;
  if (result == Type::none)
    fail(token.line, std::string("expected the type of ") + what + ", found " + describe(token));
  return result;
}

Variable Parser::variable(Space space) {
  Variable v;
  v.space = space;
  v.line = peek().line;
  u64 lanes = 1;
  for (;;) {
    if (accept_dot("align")) {
      v.align = static_cast<u32>(integer());
      if (v.align == 0 || (v.align & (v.align - 1)) != 0)
        fail(v.line, "an alignment is a power of two");
    } else if (accept_dot("v2")) {
      lanes = 2;
    } else if (accept_dot("v4")) {
      lanes = 4;
    } else if (accept_dot("attribute")) {
      while (!accept(')')) take();
    } else {
      break;
    }
  }
  v.element = type("a variable");
  // Of parameters: .ptr, the space it points to, its alignment.
  if (accept_dot("ptr")) {
    v.pointer = true;
    if (variable_space()) take();
    if (accept_dot("align")) integer();
  }
  v.name = name("a variable");
  const u64 element_bytes = static_cast<u64>(bits_of_type(v.element) + 7) / 8 * lanes;
  if (v.align < element_bytes && (element_bytes & (element_bytes - 1)) == 0)
    v.align = static_cast<u32>(element_bytes);
  v.bytes = element_bytes;
  while (accept('[')) {
    v.bytes = peek().is(']') ? 0 : v.bytes * integer();
    expect(']');
  }
  if (v.bytes > (u64{1} << 40)) fail(v.line, "a variable of more than 2^40 bytes");
  if (accept('=')) initialiser(v, static_cast<u32>(element_bytes / lanes));
  return v;
}

void Parser::initialiser(Variable& v, u32 bytes) {
  if (accept('{')) {
    while (!accept('}')) {
      initialiser(v, bytes);
      accept(',');
    }
  } else {
    initial_value(v, bytes);
  }
  if (v.initial.size() > v.bytes && v.bytes != 0)
    fail(v.line, "the initialiser is longer than the variable");
}

void Parser::initial_value(Variable& v, u32 bytes) {
  const Token& token = peek();
  u64 bits = 0;
  if (token.kind == TokenKind::identifier) {
    Relocation relocation{v.initial.size(), bytes, {}, 0, false};
    if (token.text == "generic" && peek(1).is('(')) {
      take();
      take();
      relocation.generic = true;
    }
    relocation.symbol = name("a variable");
    if (relocation.generic) expect(')');
    if (accept('+')) relocation.addend = static_cast<i64>(integer());
    v.relocations.push_back(std::move(relocation));
  } else if (token.kind == TokenKind::f64 && bytes == 4) {
    bits = __builtin_bit_cast(u32, static_cast<float>(__builtin_bit_cast(double, take().bits)));
  } else if (token.kind == TokenKind::f32 || token.kind == TokenKind::f64) {
    bits = take().bits;
  } else {
    bits = integer();
  }
  for (u32 i = 0; i < bytes; ++i) v.initial.push_back(static_cast<u8>(bits >> (8 * i)));
}

void Parser::variables(Space space, bool external) {
  take();
  Variable v = variable(space);
  v.external = external;
  if (external && space != Space::shared)
    fail(v.line, "'" + v.name + "' is defined in another module; modules are not linked here");
  for (;;) {
    if (v.bytes == 0 && !external) fail(v.line, "'" + v.name + "' has no size");
    add_variable(v);
    if (!accept(',')) break;
    v.name = name("a variable");
  }
  expect(';');
}

u32 Parser::add_variable(const Variable& v) {
  const u32 index = static_cast<u32>(module_->variables.size());
  module_->variables.push_back(v);
  if (function_) function_->variables.push_back(index);
  // The name of the token: the variable's own copy moves when the vector grows.
  declare(intern(v.name), {Symbol::variable, index}, v.line);
  return index;
}

std::string_view Parser::intern(const std::string& text) {
  names_.push_back(std::make_unique<std::string>(text));
  return *names_.back();
}

}  // namespace jax_fp4::sim
