// The PTX parser: recursive descent over the tokens, names resolved on the way.
//
//   module     .version .target .address_size, then variables and functions
//   function   .entry or .func: results, name, parameters, directives, body
//   body       statements in nested scopes; a label may be used before it is defined, so label
//              operands stay names until their scope ends
//   operand    registers, numbers, addresses, vectors, pairs, lists
//
// Debug information (.loc, .file, .section and what is in it) is passed over: it has no effect.
#include <algorithm>
#include <array>
#include <cstring>

#include "sim/ptx/parser_state.h"

namespace jax_fp4::sim {
namespace {

// Directives between a function's head and its body that take numbers, or nothing.
constexpr std::string_view kDirectives[] = {
    "maxntid",           "reqntid",        "minnctapersm",    "maxnctapersm", "maxnreg",
    "reqnctapercluster", "maxclusterrank", "explicitcluster", "noreturn",     "blocksareclusters"};

}  // namespace

std::unique_ptr<Module> Parser::run() {
  scopes_.emplace_back();
  header();
  while (peek().kind != TokenKind::end) module_item();
  return std::move(module_);
}

std::string_view Parser::name(const char* what) {
  if (peek().kind != TokenKind::identifier)
    fail(peek().line, std::string("expected the name of ") + what + ", found " + describe(peek()));
  return take().text;
}

u64 Parser::integer() {
  const bool negative = accept('-');
  if (peek().kind != TokenKind::integer)
    fail(peek().line, "expected an integer, found " + describe(peek()));
  const u64 value = take().bits;
  return negative ? 0 - value : value;
}

void Parser::skip_line() {
  const u32 line = peek().line;
  while (peek().kind != TokenKind::end && peek().line == line) take();
}

void Parser::skip_braces() {
  expect('{');
  for (int depth = 1; depth > 0; take()) {
    if (peek().kind == TokenKind::end) fail(peek().line, "a '{' is never closed");
    depth += peek().is('{') ? 1 : peek().is('}') ? -1 : 0;
  }
}

bool Parser::skip_debug() {
  const Token& token = peek();
  if (token.is_dot("loc") || token.is_dot("file")) {
    skip_line();
  } else if (token.is_dot("section")) {
    while (!peek().is('{')) {
      if (peek().kind == TokenKind::end) fail(token.line, "a .section without '{'");
      take();
    }
    skip_braces();
  } else {
    return false;
  }
  return true;
}

const Symbol* Parser::find(std::string_view text) const {
  for (auto it = scopes_.rbegin(); it != scopes_.rend(); ++it) {
    const auto found = it->symbols.find(text);
    if (found != it->symbols.end()) return &found->second;
  }
  return nullptr;
}

void Parser::declare(std::string_view text, Symbol symbol, u32 line) {
  if (!scope().symbols.emplace(text, symbol).second)
    fail(line, "'" + std::string(text) + "' is declared twice in this scope");
}

void Parser::close_scope() {
  Scope closed = std::move(scopes_.back());
  scopes_.pop_back();
  for (const PendingLabel& use : closed.pending) {
    const auto found = closed.labels.find(use.name);
    if (found != closed.labels.end()) {
      function_->labels[use.label] = found->second;
    } else if (scopes_.size() > 1) {
      scope().pending.push_back(use);
    } else {
      fail(use.line, "'" + std::string(use.name) + "' is not declared");
    }
  }
}

void Parser::function() {
  Function f;
  f.line = peek().line;
  f.entry = take().text == "entry";
  function_ = &f;
  scopes_.emplace_back();
  if (!f.entry && peek().is('(')) parameters(f.results, f.result_is_register);
  f.name = name("a function");
  if (peek().is('(')) parameters(f.parameters, f.parameter_is_register);
  directives(f);
  if (peek().is('{')) {
    f.defined = true;
    expect('{');
    body();
  } else {
    expect(';');
    if (f.name == "__assertfail" && f.parameters.size() == 5) define_assertion(f);
  }
  close_scope();
  function_ = nullptr;
  // A prototype is replaced by its definition.
  for (Function& known : module_->functions) {
    if (known.name != f.name) continue;
    if (known.defined && f.defined) fail(f.line, "'" + f.name + "' is defined twice");
    if (f.defined) known = std::move(f);
    return;
  }
  module_->functions.push_back(std::move(f));
}

void Parser::define_assertion(Function& f) {
  f.defined = f.reports_assertion = true;
  Instruction trap;
  trap.line = f.line;
  trap.opcode = "trap";
  f.body.push_back(std::move(trap));
}

void Parser::parameters(std::vector<u32>& indices, std::vector<bool>& is_register) {
  expect('(');
  while (!accept(')')) {
    if (accept_dot("reg")) {
      const Type t = type("a parameter");
      indices.push_back(add_register(name("a parameter"), t, peek().line));
      is_register.push_back(true);
    } else {
      if (!accept_dot("param")) fail(peek().line, "expected .param, found " + describe(peek()));
      indices.push_back(add_variable(variable(Space::param)));
      is_register.push_back(false);
    }
    accept(',');
  }
}

void Parser::directives(Function& f) {
  for (;;) {
    if (skip_debug()) continue;
    if (peek().kind != TokenKind::dot) return;
    const Token& token = take();
    if (token.text == "pragma") {
      while (!accept(';')) take();
    } else if (token.text == "noinline") {
      continue;
    } else if (std::find(std::begin(kDirectives), std::end(kDirectives), token.text) !=
               std::end(kDirectives)) {
      std::vector<u64>& values = f.directives[std::string(token.text)];
      while (peek().kind == TokenKind::integer) {
        values.push_back(integer());
        if (!accept(',')) break;
      }
    } else {
      fail(token.line, "a directive that is not known: " + describe(token));
    }
  }
}

u32 Parser::add_register(std::string_view text, Type t, u32 line) {
  const u32 index = static_cast<u32>(function_->registers.size());
  function_->registers.push_back({std::string(text), t});
  declare(text, {Symbol::reg, index}, line);
  return index;
}

void Parser::registers() {
  while (accept_dot("v2") || accept_dot("v4"))
    fail(peek().line, "vector registers are not modelled");
  const Type t = type("a register");
  do {
    const u32 line = peek().line;
    const std::string_view stem = name("a register");
    if (accept('<')) {
      const u64 count = integer();
      if (count > 1'000'000) fail(line, "more than a million registers");
      expect('>');
      for (u64 i = 0; i < count; ++i)
        add_register(intern(std::string(stem) + std::to_string(i)), t, line);
    } else {
      add_register(stem, t, line);
    }
  } while (accept(','));
  expect(';');
}

void Parser::body() {
  scopes_.emplace_back();
  while (!accept('}')) {
    if (peek().kind == TokenKind::end) fail(function_->line, "the body is never closed");
    statement();
  }
  close_scope();
}

void Parser::statement() {
  if (skip_debug() || accept(';')) return;
  if (accept('{')) {
    body();
    return;
  }
  if (peek().kind == TokenKind::identifier && peek(1).is(':')) {
    label();
    return;
  }
  if (accept_dot("reg")) {
    registers();
  } else if (accept_dot("pragma")) {
    while (!accept(';')) take();
  } else if (const std::optional<Space> space = variable_space()) {
    variables(*space, false);
  } else if (peek().is_dot("extern")) {
    take();
    const std::optional<Space> external = variable_space();
    if (!external) fail(peek().line, "expected a state space, found " + describe(peek()));
    variables(*external, true);
  } else {
    instruction();
  }
}

void Parser::label() {
  const u32 line = peek().line;
  const std::string_view text = take().text;
  take();
  if (peek().is_dot("branchtargets") || peek().is_dot("calltargets")) {
    take();
    std::vector<u32> targets;
    do targets.push_back(use_label(name("a label"), line));
    while (accept(','));
    expect(';');
    declare(text, {Symbol::branch_list, static_cast<u32>(function_->branch_lists.size())}, line);
    function_->branch_lists.push_back(std::move(targets));
    return;
  }
  if (accept_dot("callprototype")) {
    while (!accept(';')) take();
    declare(text, {Symbol::prototype, 0}, line);
    return;
  }
  const u32 position = static_cast<u32>(function_->body.size());
  if (!scope().labels.emplace(text, position).second)
    fail(line, "label '" + std::string(text) + "' is defined twice in this scope");
}

u32 Parser::use_label(std::string_view text, u32 line) {
  const u32 index = static_cast<u32>(function_->labels.size());
  function_->labels.push_back(kNoIndex);
  function_->label_names.emplace_back(text);
  scope().pending.push_back({text, line, index});
  return index;
}

void Parser::instruction() {
  Instruction instruction;
  if (accept('@')) {
    instruction.guard_negated = accept('!');
    const u32 line = peek().line;
    const std::string_view text = name("a predicate");
    const Symbol* symbol = find(text);
    if (!symbol || symbol->kind != Symbol::reg ||
        function_->registers[symbol->index].type != Type::pred)
      fail(line, "'" + std::string(text) + "' is not a predicate register");
    instruction.guard = symbol->index;
  }
  instruction.line = peek().line;
  instruction.opcode = name("an instruction");
  while (peek().kind == TokenKind::dot) instruction.modifiers.push_back(take().text);
  const bool calls = instruction.opcode == "call";
  while (!accept(';')) {
    instruction.operands.push_back(calls ? call_operand() : operand());
    if (!accept(',') && !peek().is(';'))
      fail(peek().line, "expected ',' or ';', found " + describe(peek()));
  }
  function_->body.push_back(std::move(instruction));
}

std::unique_ptr<Module> parse(std::string source) { return Parser(std::move(source)).run(); }

}  // namespace jax_fp4::sim
