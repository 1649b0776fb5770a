#include "sim/coverage.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

#include "sim/isa.h"

namespace jax_fp4::sim {
namespace {

struct Executed {
  std::mutex mutex;
  std::vector<std::vector<u64>> alternatives;  // [row][token]: a bit for each alternative
  std::set<std::string> descriptors;

  Executed() {
    for (const Row& row : isa_rows())
      alternatives.emplace_back(std::max<std::size_t>(row.tokens.size(), 1), 0);
  }
};

void write_when_the_process_ends();

// Never destroyed: it is read when the process ends.
Executed& executed() {
  static Executed& made = []() -> Executed& {
    if (std::getenv("JAX_FP4_SIM_FORMS") != nullptr) std::atexit(write_when_the_process_ends);
    return *new Executed;
  }();
  return made;
}

// Calls visit(row, alternative, whether it was executed); hints count for nothing.
template <typename Visit>
void for_each_form(const Executed& all, Visit&& visit) {
  for (std::size_t r = 0; r < isa_rows().size(); ++r) {
    const Row& row = isa_rows()[r];
    if (row.tokens.empty()) visit(row, std::string_view(), all.alternatives[r][0] != 0);
    for (std::size_t t = 0; t < row.tokens.size(); ++t) {
      if (row.tokens[t].hint) continue;
      for (std::size_t a = 0; a < row.tokens[t].alternatives.size(); ++a)
        visit(row, row.tokens[t].alternatives[a], (all.alternatives[r][t] >> a & 1) != 0);
    }
  }
}

void write_when_the_process_ends() {
  Executed& all = executed();
  const std::scoped_lock lock(all.mutex);
  std::string lines;
  for_each_form(all, [&](const Row& row, std::string_view alternative, bool done) {
    if (!done) return;
    for (std::string_view part : {row.opcode, std::string_view(" ["), row.modifiers,
                                  std::string_view("] ("), row.operands, std::string_view(")")})
      lines += part;
    if (!alternative.empty()) lines.append(": .").append(alternative);
    lines += '\n';
  });
  for (const std::string& descriptor : all.descriptors) lines.append(descriptor) += '\n';
  std::FILE* file = std::fopen(std::getenv("JAX_FP4_SIM_FORMS"), "a");
  const bool written =
      file != nullptr && std::fwrite(lines.data(), 1, lines.size(), file) == lines.size();
  if (file == nullptr || std::fclose(file) != 0 || !written) {
    std::perror("PTX machine: JAX_FP4_SIM_FORMS");
    std::_Exit(1);  // a list that is missing would read as "executed nothing"
  }
}

void record_descriptor(const std::string& descriptor) {
  Executed& all = executed();
  const std::scoped_lock lock(all.mutex);
  all.descriptors.insert(descriptor);
}

// By the values of CUtensorMapDataType and CUtensorMapSwizzle.
constexpr const char* kDataTypes[] = {
    "UINT8",        "UINT16",       "UINT32",        "INT32",        "UINT64",      "INT64",
    "FLOAT16",      "FLOAT32",      "FLOAT64",       "BFLOAT16",     "FLOAT32_FTZ", "TFLOAT32",
    "TFLOAT32_FTZ", "16U4_ALIGN8B", "16U4_ALIGN16B", "16U6_ALIGN16B"};
static_assert(std::size(kDataTypes) == kTensorDataTypes);
constexpr const char* kSwizzleNames[] = {
    "NONE", "32B", "64B", "128B", "128B_ATOM_32B", "128B_ATOM_32B_FLIP_8B", "128B_ATOM_64B"};
static_assert(std::size(kSwizzleNames) == kSwizzles);

}  // namespace

void record_executed(const Launch& launch) {
  Executed& all = executed();
  const std::scoped_lock lock(all.mutex);
  for (std::size_t pc = 0; pc < launch.counts.size(); ++pc) {
    if (launch.lane_counts[pc] == 0) continue;
    const Form& form = launch.program->forms[pc];
    std::vector<u64>& row = all.alternatives[form.row_index];
    if (form.choices.empty()) row[0] |= 1;
    for (std::size_t t = 0; t < form.choices.size(); ++t)
      if (form.choices[t] >= 0) row[t] |= u64{1} << form.choices[t];
  }
}

void record_tensor_map(const TensorMap& map) {
  record_descriptor("tensor map: " + std::string(kDataTypes[map.data_type]) + ", swizzle " +
                    kSwizzleNames[map.swizzle]);
}

void record_matrix_descriptor(u64 descriptor, bool mn_major) {
  const u64 swizzle_code = descriptor >> 61;
  const char* swizzle = swizzle_code == 0   ? "NONE"
                        : swizzle_code == 1 ? "128B_ATOM_32B"
                        : swizzle_code == 2 ? "128B"
                        : swizzle_code == 4 ? "64B"
                                            : "32B";
  record_descriptor(std::string("matrix descriptor: ") + (mn_major ? "MN" : "K") +
                    "-major, swizzle " + swizzle);
}

std::vector<InstructionForm> unreached_forms() {
  Executed& all = executed();
  const std::scoped_lock lock(all.mutex);
  std::vector<InstructionForm> result;
  for_each_form(all, [&](const Row& row, std::string_view alternative, bool done) {
    if (!done)
      result.push_back({std::string(row.opcode), std::string(row.modifiers),
                        std::string(row.operands), std::string(alternative)});
  });
  return result;
}

}  // namespace jax_fp4::sim
