// A kernel ready to run: instructions decoded to a handler and register slots.
//
//   Code     one instruction; operands are slots, so that no name is looked up at run time
//   Program  the code of an entry and of every function it calls, its constants and its layouts
//
// Registers live in blocks of 32 lanes x 32 bits: a slot is a block's number. 64-bit registers take
// two blocks, 128-bit ones four; 8- and 16-bit ones sit zero-extended in one. A slot with kConstant
// set is a block of the program's constant pool. Predicates are 32-bit masks in an array of their own.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "sim/isa.h"

namespace jax_fp4::sim {

inline constexpr int kLanes = 32;
inline constexpr u32 kAllLanes = ~0u;
inline constexpr u32 kNoSlot = ~0u;
inline constexpr u32 kConstant = 1u << 31;
inline constexpr u32 kPredicate = 1u << 30;  // in lists of slots to check: a predicate
inline constexpr u32 kNegated = 1u << 29;    // of a predicate source

// Where control goes after an instruction.
enum class Flow : u8 { next, branch, branch_list, end };

struct Code {
  Exec exec = nullptr;
  u32 dst[2] = {kNoSlot, kNoSlot};
  u32 src[8] = {kNoSlot, kNoSlot, kNoSlot, kNoSlot, kNoSlot, kNoSlot, kNoSlot, kNoSlot};
  u64 immediate = 0;                     // the first operand that is an integer constant
  i64 offset[4] = {0, 0, 0, 0};          // of address operands
  u32 guard = kNoSlot;                   // predicate
  u32 target = 0;                        // branch or call target; number of a branch list
  u32 vectors[6] = {};                   // where in Program::slots the n-th vector operand starts
  u16 counts[6] = {};                    // and how many elements it has
  u32 checks_begin = 0, checks_end = 0;  // Program::checks: registers that may be unwritten
  u32 marks_begin = 0, marks_end = 0;    // Program::checks: registers to mark as written
  u32 line = 0;
  u32 form = 0;
  u16 variant = 0;      // what the builder and the handler agree on
  u8 width = 0;         // bits of the destination register (st: of the source)
  u8 source_width = 0;  // bits of the first source register
  Space space = Space::generic;
  bool guard_negated = false;
  bool guard_checked = true;  // the guard may be unwritten
  // Only computes: from an unwritten register comes another one, and what uses that is the fault.
  bool computes = false;
  bool leader = false;  // lanes may meet here: the start of a block, or a convergent instruction
  Flow flow = Flow::next;
  u8 address_bits = 0;  // of the address register: bit n set: operand n is 64 bits wide
};

// What %tid.x and its like are read from: a register that is filled when the warp starts.
enum class Special : u8 {
  tid_x,
  tid_y,
  tid_z,
  ntid_x,
  ntid_y,
  ntid_z,
  ctaid_x,
  ctaid_y,
  ctaid_z,
  nctaid_x,
  nctaid_y,
  nctaid_z,
  laneid,
  warpid,
  nwarpid,
  smid,
  nsmid,
  gridid,
  clusterid_x,
  clusterid_y,
  clusterid_z,
  nclusterid_x,
  nclusterid_y,
  nclusterid_z,
  cluster_ctaid_x,
  cluster_ctaid_y,
  cluster_ctaid_z,
  cluster_nctaid_x,
  cluster_nctaid_y,
  cluster_nctaid_z,
  cluster_ctarank,
  cluster_nctarank,
  lanemask_eq,
  lanemask_le,
  lanemask_lt,
  lanemask_ge,
  lanemask_gt,
  dynamic_smem_size,
  total_smem_size,
  aggr_smem_size,
  is_explicit_cluster,
  clock,
  clock_hi,
  clock64,
  globaltimer,
  globaltimer_lo,
  globaltimer_hi,
  shared_address,  // of a shared variable: `value` plus the CTA's rank in bits 31:24
};

struct SpecialUse {
  Special special;
  u32 slot;
  bool wide;
  u64 value = 0;
};

// A copy of bytes between a caller's and a callee's parameter space, or from a register.
struct CallCopy {
  u32 from_slot = kNoSlot;  // a register or constant, else bytes of the frame at `from`
  u32 to_slot = kNoSlot;
  u32 from = 0, to = 0, bytes = 0;
};

struct CallSite {
  std::vector<CallCopy> before, after;
  bool reports_assertion = false;
};

struct ParameterLayout {
  std::string name;
  Type type;
  u32 offset, bytes, align;
  bool is_array;
};

// A variable in constant, global or shared memory, or in the local frame, and where it lies.
struct Placement {
  u64 address = 0;
  bool placed = false;
};

// Registers and predicates (kPredicate) of an instruction, in Program::operand_slots: for its timing.
struct OperandSlots {
  u32 reads_begin = 0, reads_end = 0, writes_begin = 0, writes_end = 0;
};

struct Program {
  const Module* module = nullptr;
  std::string entry;
  std::vector<Code> code;
  std::vector<Form> forms;  // one for each instruction of `code`
  std::vector<u32> order;   // running order of diverged lanes: lowest first
  std::vector<u32> slots;   // elements of vector operands
  std::vector<u32> checks;
  std::vector<u32> operand_slots;
  std::vector<OperandSlots> operands;  // one for each instruction of `code`
  std::vector<std::vector<u32>> branch_lists;
  std::vector<CallSite> calls;
  std::vector<std::string> register_names;  // by block, for messages
  std::vector<std::string> predicate_names;
  std::vector<SpecialUse> specials;
  std::vector<u32> constants;  // 32 lanes a block
  u32 blocks = 0;              // registers of a warp
  u32 predicates = 0;
  u32 true_predicate = 0;  // holds in every lane from the start
  std::vector<ParameterLayout> parameters;
  u32 parameter_bytes = 0;
  u32 local_bytes = 0;          // per lane: .local variables and the parameters of calls
  u32 static_shared_bytes = 0;  // from the start of the variables' area
  u32 dynamic_shared_align = 1;
  u32 required_block[3] = {0, 0, 0};
  u32 max_block[3] = {0, 0, 0};
  u32 max_registers[3] = {0, 0, 0};  // .maxnreg: the first
  u32 required_cluster[3] = {0, 0, 0};
  u32 cta_group = 0;           // of its tcgen05 instructions; 0: none says one
  bool tensor_memory = false;  // uses tensor memory
  bool asynchronous = false;   // uses engines that have clocks of their own (machine/async.h)
};

// Addresses of a module's .global and .const variables, chosen when it is loaded.
using Placements = std::vector<Placement>;

// Throws PtxError for anything that the table has no row for, or whose operands do not fit.
std::unique_ptr<Program> lower(const Module& module, const Function& entry,
                               const Placements& placements);

// Fills Program::order and Code::leader for code[begin, end), one function's instructions.
void order_blocks(Program& program, u32 begin, u32 end);
// Drops the checks of registers that every path to the instruction has written.
void drop_needless_checks(Program& program, u32 begin, u32 end);
// Then the marks of registers that nothing checks.
void drop_needless_marks(Program& program);

}  // namespace jax_fp4::sim
