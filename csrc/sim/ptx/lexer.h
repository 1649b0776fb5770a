// PTX text to tokens.
//
// A modifier with its dot is one token (".shared::cta", ".2d", ".16x256b"), so that an opcode is an
// identifier followed by `dot` tokens, and "%tid.x" an identifier and ".x". Comments, `#` lines and
// "@@DWARF" lines disappear; `.loc`, `.file` and `.section` are left to the parser.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "numerics/base.h"

namespace jax_fp4::sim {

// A fault in the PTX text, found before anything runs. `what()` has the line and its text.
class PtxError : public std::runtime_error {
 public:
  PtxError(std::string_view source, u32 line, const std::string& message);
  u32 line() const { return line_; }

 private:
  u32 line_;
};

// The text of a line (numbered from 1), without leading and trailing blanks.
std::string_view line_text(std::string_view source, u32 line);

enum class TokenKind : u8 { end, identifier, dot, integer, f32, f64, string, punctuation };

struct Token {
  TokenKind kind = TokenKind::end;
  std::string_view text;  // of a `dot`: without the dot
  u32 line = 0;
  u64 bits = 0;  // of a number: the integer, or the bits of the f32 or f64

  bool is(char c) const { return kind == TokenKind::punctuation && text[0] == c; }
  bool is_dot(std::string_view name) const { return kind == TokenKind::dot && text == name; }
};

// Tokens point into `source`, which must outlive them. The last one is `end`.
std::vector<Token> tokenize(std::string_view source);

}  // namespace jax_fp4::sim
