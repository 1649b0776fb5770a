// The PTX lexer: one pass over the text, no state but the position and the line.
#include "sim/ptx/lexer.h"

#include <bit>
#include <cstdlib>

namespace jax_fp4::sim {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool starts_name(char c) { return is_letter(c) || c == '_' || c == '$' || c == '%'; }
bool continues_name(char c) { return is_letter(c) || is_digit(c) || c == '_' || c == '$'; }

int digit_value(char c) {
  if (is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return 99;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(source) {}

  std::vector<Token> run() {
    while (skip_blanks()) tokens_.push_back(next());
    tokens_.push_back({TokenKind::end, {}, line_, 0});
    return std::move(tokens_);
  }

 private:
  char at(std::size_t offset = 0) const {
    return position_ + offset < source_.size() ? source_[position_ + offset] : '\0';
  }
  [[noreturn]] void fail(const std::string& message) const {
    throw PtxError(source_, line_, message);
  }
  void skip_line() {
    while (position_ < source_.size() && at() != '\n') ++position_;
  }

  // To the next token; false at the end of the text.
  bool skip_blanks() {
    while (position_ < source_.size()) {
      const char c = at();
      if (c == '\n') {
        ++line_;
        ++position_;
      } else if (c == ' ' || c == '\t' || c == '\r' || c == '\f' || c == '\v') {
        ++position_;
      } else if (c == '/' && at(1) == '/') {
        skip_line();
      } else if (c == '/' && at(1) == '*') {
        const std::size_t end = source_.find("*/", position_ + 2);
        if (end == std::string_view::npos) fail("a comment opened here is never closed");
        for (; position_ < end + 2; ++position_) line_ += at() == '\n';
      } else if (c == '#' || (c == '@' && at(1) == '@')) {
        skip_line();
      } else {
        return true;
      }
    }
    return false;
  }

  Token next() {
    const std::size_t start = position_;
    const char c = at();
    if (starts_name(c)) {
      ++position_;
      while (continues_name(at())) ++position_;
      return {TokenKind::identifier, source_.substr(start, position_ - start), line_, 0};
    }
    if (is_digit(c)) return number();
    if (c == '.' && continues_name(at(1))) {
      ++position_;
      while (continues_name(at()) || (at() == ':' && at(1) == ':' && continues_name(at(2))))
        position_ += at() == ':' ? 2 : 1;
      return {TokenKind::dot, source_.substr(start + 1, position_ - start - 1), line_, 0};
    }
    if (c == '"') {
      ++position_;
      while (position_ < source_.size() && at() != '"' && at() != '\n')
        position_ += at() == '\\' ? 2 : 1;
      if (at() != '"') fail("a string opened here is never closed");
      ++position_;
      return {TokenKind::string, source_.substr(start + 1, position_ - start - 2), line_, 0};
    }
    constexpr std::string_view kPunctuation = "{}()[],;:@!|+-<>=*/&~^?.%";
    if (kPunctuation.find(c) == std::string_view::npos) {
      fail("a character that PTX does not know, code " +
           std::to_string(static_cast<unsigned char>(c)));
    }
    ++position_;
    return {TokenKind::punctuation, source_.substr(start, 1), line_, 0};
  }

  u64 digits(int base, int count) {
    u64 value = 0;
    int seen = 0;
    for (; digit_value(at()) < base && (count == 0 || seen < count); ++position_, ++seen) {
      const u64 digit = static_cast<u64>(digit_value(at()));
      if (value > (~u64{0} - digit) / static_cast<u64>(base)) fail("a number of more than 64 bits");
      value = value * static_cast<u64>(base) + digit;
    }
    if (seen == 0 || (count != 0 && seen != count) || continues_name(at()))
      fail("a malformed number");
    return value;
  }

  Token number() {
    const std::size_t start = position_;
    const auto token = [&](TokenKind kind, u64 bits) {
      return Token{kind, source_.substr(start, position_ - start), line_, bits};
    };
    const char second = at() == '0' ? at(1) : '\0';
    if (second == 'f' || second == 'F' || second == 'd' || second == 'D') {
      const bool single = second == 'f' || second == 'F';
      position_ += 2;
      const u64 bits = digits(16, single ? 8 : 16);
      return token(single ? TokenKind::f32 : TokenKind::f64, bits);
    }
    std::size_t end = position_;
    while (end < source_.size() && is_digit(source_[end])) ++end;
    const char after = end < source_.size() ? source_[end] : '\0';
    if ((after == '.' && end + 1 < source_.size() && is_digit(source_[end + 1])) || after == 'e' ||
        after == 'E') {
      const std::string text(source_.substr(start, 64));
      char* stop = nullptr;
      const double value = std::strtod(text.c_str(), &stop);
      position_ += static_cast<std::size_t>(stop - text.c_str());
      return token(TokenKind::f64, std::bit_cast<u64>(value));
    }
    int base = 10;
    if (second == 'x' || second == 'X') {
      base = 16;
    } else if (second == 'b' || second == 'B') {
      base = 2;
    } else if (is_digit(second)) {
      base = 8;
    }
    position_ += base == 16 || base == 2 ? 2 : base == 8 ? 1 : 0;
    // The suffix of an unsigned literal is not a part of its digits.
    std::size_t stop = position_;
    while (stop < source_.size() && digit_value(source_[stop]) < base) ++stop;
    const bool suffix = stop < source_.size() && source_[stop] == 'U';
    u64 value = 0;
    if (suffix) {
      for (; position_ < stop; ++position_)
        value = value * static_cast<u64>(base) + static_cast<u64>(digit_value(at()));
      ++position_;
    } else {
      value = digits(base, 0);
    }
    return token(TokenKind::integer, value);
  }

  std::string_view source_;
  std::size_t position_ = 0;
  u32 line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

std::string_view line_text(std::string_view source, u32 line) {
  std::size_t start = 0;
  for (u32 n = 1; n < line; ++n) {
    const std::size_t end = source.find('\n', start);
    if (end == std::string_view::npos) return {};
    start = end + 1;
  }
  std::string_view text = source.substr(start, source.find('\n', start) - start);
  const auto blank = [](char c) { return c == ' ' || c == '\t' || c == '\r'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  return text;
}

PtxError::PtxError(std::string_view source, u32 line, const std::string& message)
    : std::runtime_error("PTX line " + std::to_string(line) + ": " + message + "\n    " +
                         std::string(line_text(source, line))),
      line_(line) {}

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

}  // namespace jax_fp4::sim
