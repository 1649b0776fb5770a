// Attributes of our custom calls: one string of `name=value` fields a copy or operand, for example
//
//   "axis=rows element=e2m1 scale=ue4m3 block=16 rule=rceil tiles=0 stochastic=1 four_over_six=0
//    hadamard=1 signs=55272 stream=1 layout=tiled"
//
// Readable in an HLO dump, and safe: a missing, unknown or malformed field is an error. The Python
// side writes them in copies.py (Copy.attribute) and block_array.py (operand_attribute).
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "cpu/quantize.h"
#include "numerics/formats.h"

namespace jax_fp4::ffi {

class Fields {
 public:
  explicit Fields(std::string_view text) : text_(text) {
    while (!text.empty()) {
      const std::size_t end = std::min(text.find(' '), text.size());
      const std::string_view field = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
      if (field.empty()) continue;
      const std::size_t equals = field.find('=');
      if (equals == std::string_view::npos) fail("field without '='", field);
      const auto inserted = values_.emplace(field.substr(0, equals), field.substr(equals + 1));
      if (!inserted.second) fail("field given twice:", field);
    }
  }

  std::int64_t integer(std::string_view name) {
    const std::string_view value = take(name);
    std::int64_t result = 0;
    const auto [end, status] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (status != std::errc{} || end != value.data() + value.size()) fail("not an integer", name);
    return result;
  }

  bool flag(std::string_view name) { return integer(name) != 0; }

  template <typename T, std::size_t N>
  T choice(std::string_view name, const std::pair<std::string_view, T> (&choices)[N]) {
    const std::string_view value = take(name);
    for (const auto& [key, result] : choices) {
      if (key == value) return result;
    }
    fail("unknown value", name);
  }

  // Every field must have been read: a field that a handler does not know is an option it ignores.
  void finish() const {
    if (!values_.empty()) fail("unknown field", values_.begin()->first);
  }

 private:
  std::string_view take(std::string_view name) {
    const auto found = values_.find(name);
    if (found == values_.end()) fail("missing field", name);
    const std::string_view value = found->second;
    values_.erase(found);
    return value;
  }

  [[noreturn]] void fail(std::string_view what, std::string_view field) const {
    throw std::invalid_argument("jax_fp4: attribute \"" + std::string(text_) +
                                "\": " + std::string(what) + " " + std::string(field));
  }

  std::string_view text_;
  std::map<std::string_view, std::string_view> values_;
};

inline Format parse_format(Fields& fields) {
  static constexpr std::pair<std::string_view, Element> kElements[] = {{"e2m1", Element::e2m1},
                                                                       {"e2m3", Element::e2m3},
                                                                       {"e3m2", Element::e3m2},
                                                                       {"e4m3", Element::e4m3},
                                                                       {"e5m2", Element::e5m2}};
  static constexpr std::pair<std::string_view, BlockScale> kScales[] = {
      {"ue4m3", BlockScale::ue4m3}, {"ue8m0", BlockScale::ue8m0}, {"unit", BlockScale::unit}};
  Format format{};
  format.element = fields.choice("element", kElements);
  format.scale = fields.choice("scale", kScales);
  format.block = static_cast<int>(fields.integer("block"));
  const int expected = format.scale == BlockScale::ue4m3 ? 16 : 32;
  if (format.block != expected || (expected == 16 && format.element != Element::e2m1)) {
    throw std::invalid_argument(
        "jax_fp4: no such format: element, scale and block do not go together");
  }
  return format;
}

inline ScaleLayout parse_layout(Fields& fields) {
  static constexpr std::pair<std::string_view, ScaleLayout> kLayouts[] = {
      {"linear", ScaleLayout::linear}, {"tiled", ScaleLayout::tiled}};
  return fields.choice("layout", kLayouts);
}

inline cpu::Axis parse_axis(Fields& fields) {
  static constexpr std::pair<std::string_view, cpu::Axis> kAxes[] = {{"cols", cpu::Axis::cols},
                                                                     {"rows", cpu::Axis::rows}};
  return fields.choice("axis", kAxes);
}

// How a copy is made; where it goes is filled in by the handler.
inline cpu::Copy parse_copy(std::string_view text) {
  static constexpr std::pair<std::string_view, ScaleRule> kRules[] = {{"rceil", ScaleRule::rceil},
                                                                      {"floor", ScaleRule::floor}};
  Fields fields(text);
  cpu::Copy copy;
  copy.axis = parse_axis(fields);
  copy.format = parse_format(fields);
  copy.rule = fields.choice("rule", kRules);
  copy.tiles = fields.flag("tiles");
  copy.stochastic = fields.flag("stochastic");
  copy.four_over_six = fields.flag("four_over_six");
  copy.hadamard = fields.flag("hadamard");
  copy.signs = static_cast<std::uint16_t>(fields.integer("signs"));
  copy.stream = static_cast<std::uint32_t>(fields.integer("stream"));
  copy.layout = parse_layout(fields);
  fields.finish();
  if (copy.hadamard && copy.tiles) {
    throw std::invalid_argument("jax_fp4: 2-D scaling does not go with the Hadamard transform");
  }
  if (copy.four_over_six && (copy.format.scale != BlockScale::ue4m3 || copy.stochastic)) {
    throw std::invalid_argument("jax_fp4: four-over-six is for NVFP4 rounded to nearest");
  }
  return copy;
}

}  // namespace jax_fp4::ffi
