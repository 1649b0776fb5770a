// The PTX parser: recursive descent over the tokens, names resolved on the way.
//
//   module     .version .target .address_size, then variables and functions
//   function   .entry or .func: results, name, parameters, directives, body
//   body       statements in nested scopes; a label may be used before it is defined, so label
//              operands stay names until their scope ends
//   operand    registers, numbers, addresses, vectors, pairs, lists
//
// Debug information (.loc, .file, .section and what is in it) is passed over: it has no effect.
#include "sim/ptx/parser.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <unordered_map>

#include "sim/ptx/lexer.h"

namespace jax_fp4::sim {
namespace {

// What a name means in a scope.
struct Symbol {
  enum Kind : u8 { reg, variable, branch_list, prototype } kind;
  u32 index;
};

// A label operand that waits for its label.
struct PendingLabel {
  std::string_view name;
  u32 line;
  u32 label;  // the number it was given
};

struct Scope {
  std::unordered_map<std::string_view, Symbol> symbols;
  std::unordered_map<std::string_view, u32> labels;  // defined here
  std::vector<PendingLabel> pending;
};

constexpr std::string_view kLinkage[] = {"visible", "weak", "extern", "common"};
// Directives between a function's head and its body that take numbers, or nothing.
constexpr std::string_view kDirectives[] = {
    "maxntid",           "reqntid",        "minnctapersm",    "maxnctapersm", "maxnreg",
    "reqnctapercluster", "maxclusterrank", "explicitcluster", "noreturn",     "blocksareclusters"};

class Parser {
 public:
  explicit Parser(std::string source) : module_(std::make_unique<Module>()) {
    module_->source = std::move(source);
    tokens_ = tokenize(module_->source);
  }

  std::unique_ptr<Module> run() {
    scopes_.emplace_back();
    header();
    while (peek().kind != TokenKind::end) module_item();
    return std::move(module_);
  }

 private:
  // ---- Tokens

  const Token& peek(std::size_t ahead = 0) const {
    return tokens_[std::min(position_ + ahead, tokens_.size() - 1)];
  }
  const Token& take() {
    const Token& token = peek();
    if (position_ + 1 < tokens_.size()) ++position_;
    return token;
  }
  bool accept(char c) {
    if (!peek().is(c)) return false;
    take();
    return true;
  }
  bool accept_dot(std::string_view name) {
    if (!peek().is_dot(name)) return false;
    take();
    return true;
  }
  [[noreturn]] void fail(u32 line, const std::string& message) const {
    throw PtxError(module_->source, line, message);
  }
  static std::string describe(const Token& token) {
    if (token.kind == TokenKind::end) return "the end of the text";
    return "'" + std::string(token.kind == TokenKind::dot ? "." : "") + std::string(token.text) +
           "'";
  }
  void expect(char c) {
    if (!accept(c))
      fail(peek().line, std::string("expected '") + c + "', found " + describe(peek()));
  }
  std::string_view name(const char* what) {
    if (peek().kind != TokenKind::identifier)
      fail(peek().line,
           std::string("expected the name of ") + what + ", found " + describe(peek()));
    return take().text;
  }
  u64 integer() {
    const bool negative = accept('-');
    if (peek().kind != TokenKind::integer)
      fail(peek().line, "expected an integer, found " + describe(peek()));
    const u64 value = take().bits;
    return negative ? 0 - value : value;
  }
  void skip_line() {
    const u32 line = peek().line;
    while (peek().kind != TokenKind::end && peek().line == line) take();
  }
  void skip_braces() {
    expect('{');
    for (int depth = 1; depth > 0; take()) {
      if (peek().kind == TokenKind::end) fail(peek().line, "a '{' is never closed");
      depth += peek().is('{') ? 1 : peek().is('}') ? -1 : 0;
    }
  }
  // Debug information, at module level or in a body.
  bool skip_debug() {
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

  // ---- Scopes

  Scope& scope() { return scopes_.back(); }
  const Symbol* find(std::string_view text) const {
    for (auto it = scopes_.rbegin(); it != scopes_.rend(); ++it) {
      const auto found = it->symbols.find(text);
      if (found != it->symbols.end()) return &found->second;
    }
    return nullptr;
  }
  void declare(std::string_view text, Symbol symbol, u32 line) {
    if (!scope().symbols.emplace(text, symbol).second)
      fail(line, "'" + std::string(text) + "' is declared twice in this scope");
  }
  // Gives the labels used in the innermost scope to their definitions, or to the scope around it.
  void close_scope() {
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

  // ---- Module level

  void header() {
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

  void module_item() {
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

  std::optional<Space> variable_space() const {
    const Token& token = peek();
    if (token.is_dot("global")) return Space::global;
    if (token.is_dot("shared") || token.is_dot("shared::cta")) return Space::shared;
    if (token.is_dot("const")) return Space::constant;
    if (token.is_dot("local")) return Space::local;
    if (token.is_dot("param")) return Space::param;
    return std::nullopt;
  }

  Type type(const char* what) {
    const Token& token = take();
    const Type result = token.kind == TokenKind::dot ? type_of_name(token.text) : Type::none;
    if (result == Type::none)
      fail(token.line, std::string("expected the type of ") + what + ", found " + describe(token));
    return result;
  }

  // After the space: alignment, type, name, array bounds, initialiser.
  Variable variable(Space space) {
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

  void initialiser(Variable& v, u32 bytes) {
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

  void initial_value(Variable& v, u32 bytes) {
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

  // Space already seen but not taken; several names may share a declaration.
  void variables(Space space, bool external) {
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

  u32 add_variable(const Variable& v) {
    const u32 index = static_cast<u32>(module_->variables.size());
    module_->variables.push_back(v);
    if (function_) function_->variables.push_back(index);
    // The name of the token: the variable's own copy moves when the vector grows.
    declare(intern(v.name), {Symbol::variable, index}, v.line);
    return index;
  }
  std::string_view intern(const std::string& text) {
    names_.push_back(std::make_unique<std::string>(text));
    return *names_.back();
  }

  // ---- Functions

  void function() {
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

  // __assertfail(message, file, line, function, size of a character) has no text anywhere: its calls
  // report (ops/control.cc), and this body is never executed.
  static void define_assertion(Function& f) {
    f.defined = f.reports_assertion = true;
    Instruction trap;
    trap.line = f.line;
    trap.opcode = "trap";
    f.body.push_back(std::move(trap));
  }

  void parameters(std::vector<u32>& indices, std::vector<bool>& is_register) {
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

  void directives(Function& f) {
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

  u32 add_register(std::string_view text, Type t, u32 line) {
    const u32 index = static_cast<u32>(function_->registers.size());
    function_->registers.push_back({std::string(text), t});
    declare(text, {Symbol::reg, index}, line);
    return index;
  }

  void registers() {
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

  // After '{', up to and including '}'.
  void body() {
    scopes_.emplace_back();
    while (!accept('}')) {
      if (peek().kind == TokenKind::end) fail(function_->line, "the body is never closed");
      statement();
    }
    close_scope();
  }

  void statement() {
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

  void label() {
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

  u32 use_label(std::string_view text, u32 line) {
    const u32 index = static_cast<u32>(function_->labels.size());
    function_->labels.push_back(kNoIndex);
    function_->label_names.emplace_back(text);
    scope().pending.push_back({text, line, index});
    return index;
  }

  void instruction() {
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

  Operand call_operand() {
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

  Operand operand() {
    Operand first = simple_operand();
    if (!accept('|')) return first;
    Operand pair;
    pair.kind = OperandKind::pair;
    pair.elements.push_back(std::move(first));
    pair.elements.push_back(simple_operand());
    return pair;
  }

  Operand simple_operand() {
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

  Operand named_operand() {
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

  // After '[': base, + or - offset, and for tensor accesses coordinates.
  Operand address() {
    Operand result;
    result.kind = OperandKind::address;
    const Token& token = peek();
    if (token.kind == TokenKind::identifier) {
      const Operand base = named_operand();
      if (base.kind != OperandKind::reg && base.kind != OperandKind::variable)
        fail(token.line,
             "an address starts with a register or a variable, found " + describe(token));
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

  std::unique_ptr<Module> module_;
  std::vector<Token> tokens_;
  std::size_t position_ = 0;
  std::vector<Scope> scopes_;
  Function* function_ = nullptr;
  std::vector<std::unique_ptr<std::string>> names_;
};

}  // namespace

std::unique_ptr<Module> parse(std::string source) { return Parser(std::move(source)).run(); }

}  // namespace jax_fp4::sim
