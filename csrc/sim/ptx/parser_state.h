// What the parser knows while it goes over the tokens. Functions and statements: parser.cc. Variables:
// parser_module.cc. Operands: parser_operands.cc.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sim/ptx/lexer.h"
#include "sim/ptx/parser.h"

namespace jax_fp4::sim {

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

class Parser {
 public:
  explicit Parser(std::string source) : module_(std::make_unique<Module>()) {
    module_->source = std::move(source);
    tokens_ = tokenize(module_->source);
  }

  std::unique_ptr<Module> run();

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
  std::string_view name(const char* what);
  u64 integer();
  void skip_line();
  void skip_braces();
  // Debug information, at module level or in a body.
  bool skip_debug();

  // ---- Scopes
  Scope& scope() { return scopes_.back(); }
  const Symbol* find(std::string_view text) const;
  void declare(std::string_view text, Symbol symbol, u32 line);
  // Gives the labels used in the innermost scope to their definitions, or to the scope around it.
  void close_scope();

  // ---- Module level
  void header();
  void module_item();
  std::optional<Space> variable_space() const;
  Type type(const char* what);
  // After the space: alignment, type, name, array bounds, initialiser.
  Variable variable(Space space);
  void initialiser(Variable& v, u32 bytes);
  void initial_value(Variable& v, u32 bytes);
  // Space already seen but not taken; several names may share a declaration.
  void variables(Space space, bool external);
  u32 add_variable(const Variable& v);
  std::string_view intern(const std::string& text);

  // ---- Functions
  void function();
  // __assertfail(message, file, line, function, size of a character) has no text anywhere: its calls
  // report (ops/control.cc), and this body is never executed.
  static void define_assertion(Function& f);
  void parameters(std::vector<u32>& indices, std::vector<bool>& is_register);
  void directives(Function& f);
  u32 add_register(std::string_view text, Type t, u32 line);
  void registers();
  // After '{', up to and including '}'.
  void body();
  void statement();
  void label();
  u32 use_label(std::string_view text, u32 line);
  void instruction();
  Operand call_operand();
  Operand operand();
  Operand simple_operand();
  Operand named_operand();
  // After '[': base, + or - offset, and for tensor accesses coordinates.
  Operand address();

  std::unique_ptr<Module> module_;
  std::vector<Token> tokens_;
  std::size_t position_ = 0;
  std::vector<Scope> scopes_;
  Function* function_ = nullptr;
  std::vector<std::unique_ptr<std::string>> names_;
};

}  // namespace jax_fp4::sim
