// tcgen05.mma (PTX ISA 9.7.16.10.9): D = A * B + D on tensor memory, one instruction of any dense kind, for one CTA
// or a pair. The sums are those of ops/mma_tile.h.
//
// Where the operands lie, for the CTAs of the group (one, or the even and the odd CTA of a pair):
//
//   A     shared memory by its descriptor, or tensor memory; each CTA holds M / CTAs rows of its own
//   B     shared memory by its descriptor; each CTA holds N / CTAs columns, and all are used by both
//   D     M = 128, and pairs with M = 256: row r of the CTA in lane r, column n in column n
//         M = 64: row r in lane 32 (r / 16) + r % 16, and 16 more where the address says lane 16
//         pairs with M = 128: row r of the CTA in lane r, or 64 + r for the second half of the columns
//   SFA   each CTA those of its own rows, SFB those of all columns: row r in lane r % 32, column r / 32, the
//         same in all four quarters of the lanes
//
// Everything is read when the operation is performed. The reads of shared memory are of the asynchronous
// proxy; the operation belongs to the pipe of the warp that issued it.
#include <algorithm>
#include <bit>
#include <cstring>

#include "sim/coverage.h"
#include "sim/machine/async.h"
#include "sim/ops/instruction_descriptor.h"
#include "sim/ops/matrix_descriptor.h"
#include "sim/ops/tcgen05.h"

namespace jax_fp4::sim {
namespace {

// Code::variant: the kind in the low three bits, then these.
constexpr u16 kKindMask = 7;
constexpr u16 kPair = 8, kBlock16 = 16, kTensorA = 32, kScaled = 64, kMasked = 128, kShrinks = 256;
constexpr int kCollectorShift = 9;  // and how the collector is used
enum Collector : u16 { kDiscard, kFill, kUse, kLastUse };

constexpr u32 kScaleAddressMask =
    0x3FFF'FFFF;                    // of a scale factor's address: bits 31:30 are an id of CUTLASS
constexpr u32 kOperandColumns = 8;  // of a row of A in tensor memory: 32 bytes

std::string hex(u64 value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", value);
  return text;
}

// One operation, decoded and checked when it is issued.
struct Operands {
  MmaInstruction instruction;
  u32 d = 0;         // address in tensor memory
  u64 a = 0, b = 0;  // matrix descriptors; of A: an address in tensor memory, if it lies there
  u32 sfa = 0, sfb = 0;
  bool accumulates = false;
  u32 shrink = 0;        // D is divided by 2^shrink first
  u32 disabled[8] = {};  // lanes of the CTAs that are not written
};

class MmaOperation : public AsyncOperation {
 public:
  MmaOperation(Warp& warp, const Code& code, int lane, const Operands& operands)
      : AsyncOperation(warp, code, lane, Clock::pipe), o_(operands) {}

  bool uses(const Cta& cta) const override {
    const Cta& own = *warp->cta;
    return &cta == &own ||
           ((code->variant & kPair) && cta.cluster == own.cluster && cta.rank == (own.rank ^ 1));
  }

  AsyncWork work() const override;

  void perform() override {
    if (!moves_data()) return;
    const MmaInstruction& in = o_.instruction;
    const u32 ctas = (code->variant & kPair) ? 2 : 1;
    const u32 first = ctas == 2 ? warp->cta->rank & ~1u : warp->cta->rank;
    MmaOperand b{in.n, {}, {}};
    for (u32 i = 0; i < ctas; ++i)
      read_shared(first + i, o_.b, in.transpose_b, in.b, in.n / static_cast<int>(ctas), b.codes);
    const int rows = in.m / static_cast<int>(ctas);
    for (u32 i = 0; i < ctas; ++i) {
      Cta& cta = *warp->cta->cluster->ctas[first + i];
      MmaOperand a{rows, {}, {}};
      if (code->variant & kTensorA) {
        read_tensor(cta, rows, a.codes);
      } else {
        read_shared(cta.rank, o_.a, in.transpose_a, in.a, rows, a.codes);
      }
      if (code->variant & kScaled) {
        read_scales(cta, o_.sfa, in.sfa_id, rows, "A", a.scales);
        read_scales(cta, o_.sfb, in.sfb_id, in.n, "B", b.scales);
      }
      const MmaTile tile(in.kind, a, b, warp->launch->spec.mma);
      update(cta, tile, o_.disabled + 4 * i);
    }
  }

 private:
  void read_shared(u32 rank, u64 descriptor, bool transposed, const ElementPacking& packing,
                   int rows, std::vector<u32>& codes);
  void read_tensor(Cta& cta, int rows, std::vector<u32>& codes);
  void read_scales(Cta& cta, u32 address, int id, int rows, const char* name,
                   std::vector<u8>& scales);
  void update(Cta& cta, const MmaTile& tile, const u32* disabled);

  Operands o_;
};

// Each CTA multiplies its rows of A with all columns of B, and reads its own part of B.
AsyncWork MmaOperation::work() const {
  constexpr std::string_view kNames[] = {"f16",      "tf32", "f8f6f4",  "i8",
                                         "mxf8f6f4", "mxf4", "mxf4nvf4"};
  constexpr u32 kRowBytes = 32;  // of an operand in shared memory, for any kind
  const MmaInstruction& in = o_.instruction;
  const bool pair = code->variant & kPair;
  const u32 ctas = pair ? 2 : 1, rank = warp->cta->rank;
  const u32 rows = static_cast<u32>(in.m) / ctas, columns = static_cast<u32>(in.n) / ctas;
  AsyncWork work;
  work.engine = AsyncWork::Engine::tensor_mma;
  work.ctas = pair ? 0b11u << (rank & ~1u) : 1u << rank;
  work.kind = kNames[code->variant & kKindMask];
  work.element_bits = std::max(in.a.bits, in.b.bits);
  // Codes of 4 and 6 bits beside those of 8 are multiplied at the rate of 8.
  if (work.element_bits < 8 && !work.kind.starts_with("mxf4")) work.element_bits = 8;
  work.flop = 2.0 * rows * in.n * in.kind.k;
  work.occupied_flop = 2.0 * std::max(rows, kTensorLanes) * in.n * in.kind.k;
  work.shared_bytes = u64{kRowBytes} * (columns + (code->variant & kTensorA ? 0 : rows));
  return work;
}

// The elements of 16 bytes, `step` apart in `codes`.
void unpack(const u8* bytes, const ElementPacking& packing, u32* codes, std::size_t step) {
  for (int i = 0; i < packing.count; ++i) {
    u32& code = codes[static_cast<std::size_t>(i) * step];
    switch (packing.bits) {
      case 4: code = bytes[i / 2] >> (4 * (i % 2)) & 0xF; break;
      case 6: code = load_code(Element::e2m3, bytes, i); break;
      case 8: code = bytes[i]; break;
      case 16: code = static_cast<u32>(bytes[2 * i] | bytes[2 * i + 1] << 8); break;
      default: {
        // TF32 is the upper 19 bits (assumption M13).
        u32 word;
        std::memcpy(&word, bytes + 4 * i, 4);
        code = word >> 13;
      }
    }
  }
}

// Appends rows x K codes.
void MmaOperation::read_shared(u32 rank, u64 descriptor, bool transposed,
                               const ElementPacking& packing, int rows, std::vector<u32>& codes) {
  const u32 k = static_cast<u32>(o_.instruction.kind.k), count = static_cast<u32>(packing.count);
  const u32 mn_chunks = static_cast<u32>(rows) / (transposed ? count : 1);
  const u32 k_chunks = transposed ? k : k / count;
  const SharedMatrix matrix(descriptor, transposed ? Major::mn : Major::k, mn_chunks, k_chunks);
  const std::size_t begin = codes.size();
  codes.resize(begin + static_cast<std::size_t>(rows) * k);
  for (u32 mn = 0; mn < mn_chunks; ++mn) {
    for (u32 j = 0; j < k_chunks; ++j) {
      const u64 at = u64{rank} << kRankShift | matrix.address(mn, j);
      const u8* bytes =
          access(Space::shared_cluster, at, static_cast<u32>(packing.bytes), AccessKind::read);
      u32* to = codes.data() + begin;
      if (transposed) {
        unpack(bytes, packing, to + std::size_t{mn} * count * k + j, k);
      } else {
        unpack(bytes, packing, to + std::size_t{mn} * k + j * count, 1);
      }
    }
  }
}

void MmaOperation::read_tensor(Cta& cta, int rows, std::vector<u32>& codes) {
  const u32 column = tensor_column(static_cast<u32>(o_.a));
  cta.tensor->access(actor(), TensorMemory::Use::read, 0, static_cast<u32>(rows), column,
                     kOperandColumns);
  const MmaInstruction& in = o_.instruction;
  codes.resize(static_cast<std::size_t>(rows) * in.kind.k);
  for (int r = 0; r < rows; ++r) {
    const u8* bytes = reinterpret_cast<const u8*>(cta.tensor->lane(static_cast<u32>(r)) + column);
    for (int chunk = 0; chunk < 2; ++chunk)
      unpack(bytes + 16 * chunk, in.a, &codes[r * in.kind.k + chunk * in.a.count], 1);
  }
}

// The scale bytes of `rows` rows: those from byte `id` on of their words. The other bytes do not matter.
void MmaOperation::read_scales(Cta& cta, u32 address, int id, int rows, const char* name,
                               std::vector<u8>& scales) {
  constexpr u32 kQuarters = kTensorLanes / kLanes;
  const u32 column = tensor_column(address);
  const u32 full = static_cast<u32>(rows) / kLanes, rest = static_cast<u32>(rows) % kLanes;
  TensorMemory& memory = *cta.tensor;
  memory.access(actor(), TensorMemory::Use::read, 0, kTensorLanes, column, full);
  for (u32 quarter = 0; quarter < kQuarters; ++quarter)
    memory.access(actor(), TensorMemory::Use::read, quarter * kLanes, rest, column + full, 1);
  const int used = o_.instruction.kind.scales;
  const u32 mask = (used == 4 ? ~0u : (1u << (8 * used)) - 1) << (8 * id);
  scales.resize(static_cast<std::size_t>(rows) * used);
  for (int r = 0; r < rows; ++r) {
    const u32 lane = static_cast<u32>(r) % kLanes, at = column + static_cast<u32>(r) / kLanes;
    const u32 word = memory.lane(lane)[at];
    for (u32 quarter = 1; quarter < kQuarters; ++quarter) {
      const u32 copy = memory.lane(quarter * kLanes + lane)[at];
      if (((copy ^ word) & mask) == 0) continue;
      actor().fault(FaultKind::argument, std::string("the scale factors of ") + name + ", row " +
                                             std::to_string(r) + ": column " + std::to_string(at) +
                                             " holds " + hex(word) + " in lane " +
                                             std::to_string(lane) + " and " + hex(copy) +
                                             " in lane " + std::to_string(quarter * kLanes + lane) +
                                             "; all four quarters of the lanes hold the same");
    }
    for (int s = 0; s < used; ++s) scales[r * used + s] = static_cast<u8>(word >> (8 * (id + s)));
  }
}

// An accumulator divided by 2^shrink, truncated where it becomes subnormal.
u32 shrunk(u32 c, const MmaCore& core, u32 shrink) {
  if (!core.half) {
    if ((c & kF32AbsMask) >= kF32InfBits) return c;
    const MmaTerm term = mma_accumulator(c, 0);
    return truncate_to_f32(term.significand, term.exponent - static_cast<int>(shrink));
  }
  const MmaNumber x = mma_number(kMmaF16, c & 0xFFFF);
  if (x.inf || x.nan || x.significand == 0) return c & 0xFFFF;
  u32 magnitude = c & 0x7FFF;
  for (u32 i = 0; i < shrink; ++i) {
    // A normal number loses one from its exponent; then the significand is cut.
    magnitude = magnitude >= 0x800 ? magnitude - 0x400 : magnitude >> 1;
  }
  return magnitude == 0 ? 0 : magnitude | (c & 0x8000);
}

// Adds a CTA's rows to D.
void MmaOperation::update(Cta& cta, const MmaTile& tile, const u32* disabled) {
  const MmaInstruction& in = o_.instruction;
  const bool pair = code->variant & kPair;
  const bool split = pair && in.m == 128;  // the columns lie in two halves of the lanes
  const bool spread = !pair && in.m == 64;
  const int rows = pair ? in.m / 2 : in.m;
  const u32 column = tensor_column(o_.d), columns = static_cast<u32>(split ? in.n / 2 : in.n);
  const u32 parts = split ? 2 : 1;
  const auto lane_of = [&](int row, u32 part) {
    const u32 r = static_cast<u32>(row);
    return spread ? 32 * (r / 16) + r % 16 + tensor_lane(o_.d) : r + 64 * part;
  };
  const auto enabled = [&](u32 lane) { return (disabled[lane / 32] >> lane % 32 & 1) == 0; };
  const auto touch = [&](TensorMemory::Use use) {
    // Runs of enabled lanes.
    for (u32 part = 0; part < parts; ++part) {
      for (int row = 0; row < rows;) {
        const u32 begin = lane_of(row, part);
        u32 count = 0;
        while (row < rows && lane_of(row, part) == begin + count && enabled(begin + count))
          ++row, ++count;
        if (count == 0) ++row;
        cta.tensor->access(actor(), use, begin, count, column, columns);
      }
    }
  };
  if (o_.accumulates) touch(TensorMemory::Use::read);
  touch(TensorMemory::Use::write);
  u32 d[kMmaMostColumns] = {};
  for (int row = 0; row < rows; ++row) {
    u32* words[2] = {};
    for (u32 part = 0; part < parts; ++part)
      words[part] = cta.tensor->lane(lane_of(row, part)) + column;
    if (o_.accumulates) {
      for (u32 part = 0; part < parts; ++part)
        std::memcpy(d + part * columns, words[part], columns * sizeof(u32));
      if (o_.shrink != 0)
        for (int n = 0; n < in.n; ++n) d[n] = shrunk(d[n], in.kind.core, o_.shrink);
      if (in.kind.core.half)
        for (int n = 0; n < in.n; ++n) d[n] &= 0xFFFF;
    } else {
      std::memset(d, 0, sizeof d);
    }
    tile.row(row, d);
    for (u32 part = 0; part < parts; ++part)
      if (enabled(lane_of(row, part)))
        std::memcpy(words[part], d + part * columns, columns * sizeof(u32));
  }
}

// ---- Issue

// Reports anything wrong with a matrix in shared memory now: the addresses do not depend on its contents.
void check_matrix(Warp& w, const Code& c, int lane, const MmaInstruction& in, const char* name,
                  u64 descriptor, bool transposed, const ElementPacking& packing, int rows) {
  const auto refuse = [&](FaultKind kind, const std::string& text) {
    w.fault(c, lane, kind,
            std::string("the matrix descriptor of ") + name + ", " + hex(descriptor) + ": " + text);
  };
  const bool words = packing.bits == 32, wide_atoms = descriptor >> 61 == 1;
  if (transposed && words && !wide_atoms)
    refuse(FaultKind::argument,
           "32-bit MN-major matrices have a swizzle of 1 (atoms of 32 bytes) here");
  if (transposed && !words && wide_atoms)
    refuse(FaultKind::argument,
           "a swizzle of 1 (atoms of 32 bytes) goes with 32-bit MN-major matrices only");
  if (transposed && rows % packing.count != 0) {
    refuse(FaultKind::argument, "a CTA's " + std::to_string(rows) +
                                    " rows are no multiple of the " +
                                    std::to_string(packing.count) + " elements of 16 bytes");
  }
  const int k = in.kind.k;
  try {
    const SharedMatrix matrix(descriptor, transposed ? Major::mn : Major::k,
                              static_cast<u32>(transposed ? rows / packing.count : rows),
                              static_cast<u32>(transposed ? k : k / packing.count));
  } catch (const MatrixDescriptorError& error) {
    refuse(error.kind, error.what());
  }
  record_matrix_descriptor(descriptor, transposed);
}

void check_addresses(Warp& w, const Code& c, int lane, const Operands& o) {
  const MmaInstruction& in = o.instruction;
  const auto refuse = [&](const std::string& text) { w.fault(c, lane, FaultKind::argument, text); };
  const bool pair = c.variant & kPair, spread = !pair && in.m == 64;
  const auto lane_zero = [&](const char* name, u32 address, bool or_16) {
    const u32 at = tensor_lane(address);
    if (at == 0 || (or_16 && at == 16)) return;
    refuse(std::string("the address of ") + name + ", " + hex(address) + ", names lane " +
           std::to_string(at) + "; expected lane 0" + (or_16 ? " or 16" : ""));
  };
  lane_zero("D", o.d, spread);
  if (c.variant & kTensorA) {
    lane_zero("A", static_cast<u32>(o.a), false);
    if (in.m != (pair ? 256 : 128)) {
      refuse("A in tensor memory with M = " + std::to_string(in.m) +
             " is not modelled: only a figure says which lanes hold it; expected M = " +
             (pair ? "256" : "128"));
    }
    if (in.a.bits < 8) {
      refuse("A in tensor memory with elements of " + std::to_string(in.a.bits) +
             " bits is not modelled: only a figure says where they lie in their bytes");
    }
    if (in.transpose_a) refuse("A in tensor memory has no transpose bit; got 1, expected 0");
  }
  if (!(c.variant & kScaled)) return;
  lane_zero("the scale factors of A", o.sfa, false);
  lane_zero("the scale factors of B", o.sfb, false);
  if (pair && in.m == 128) {
    refuse(
        "block scaling with M = 128 and .cta_group::2 is not modelled: the place of the scale factors is not "
        "documented; expected M = 256");
  }
  if (o.sfb % 2 != 0) {
    w.launch->warn(c.line, 1, [&] {
      return "the scale factors of B are at column " + std::to_string(tensor_column(o.sfb)) +
             ", which is odd; hardware is said to need an even one\n  " + w.where(c, lane);
    });
  }
}

// The collector buffer holds A from an MMA with ::fill until one with ::lastuse or ::discard, or other A. What it
// holds is not modelled: A is read from where it lies. That it does hold A is checked.
void check_collector(Warp& w, const Code& c, int lane, u64 a) {
  const u16 use = c.variant >> kCollectorShift;
  if ((use == kUse || use == kLastUse) && w.collected != a) {
    w.fault(c, lane, FaultKind::argument,
            "reuses A from the collector buffer, which does not hold it: no MMA of this warp with "
            ".collector::a::fill and the same A comes directly before");
  }
  w.collected = use == kFill || use == kUse ? a : 0;
}

Operands take_operands(Warp& w, const Code& c, int lane) {
  Operands o;
  const bool tensor_a = c.variant & kTensorA;
  int address = 0;  // number of the address operand
  const auto next_address = [&](u32 slot) {
    return static_cast<u32>(address_of(w, c, lane, slot, address++));
  };
  o.d = next_address(c.src[0]);
  o.a = tensor_a ? next_address(c.src[1]) : w.in64(c.src[1])[lane];
  o.b = w.in64(c.src[2])[lane];
  const u32 descriptor = w.in(c.src[3])[lane];
  const MmaForm form{static_cast<MmaForm::Kind>(c.variant & kKindMask), (c.variant & kPair) != 0,
                     (c.variant & kBlock16) != 0};
  try {
    o.instruction = decode_instruction_descriptor(form, descriptor);
  } catch (const InstructionDescriptorError& error) {
    w.fault(c, lane, FaultKind::argument,
            error.what() + std::string("; the descriptor is ") + hex(descriptor));
  }
  int next = 4;
  if (c.variant & kScaled) {
    o.sfa = next_address(c.src[next++]) & kScaleAddressMask;
    o.sfb = next_address(c.src[next++]) & kScaleAddressMask;
  }
  o.accumulates = w.predicate(c.src[next++]) >> lane & 1;
  if (c.variant & kShrinks) {
    o.shrink = w.in(c.src[next])[lane];
    if (o.shrink > 15) {
      w.fault(c, lane, FaultKind::argument,
              "scale-input-d is " + std::to_string(o.shrink) + ", expected 0 to 15");
    }
  }
  if (c.variant & kMasked) {
    const u32* slots = w.launch->program->slots.data() + c.vectors[0];
    for (u32 i = 0; i < c.counts[0]; ++i) o.disabled[i] = w.in(slots[i])[lane];
  }
  return o;
}

void mma_lanes(Warp& w, const Code& c, u32 mask) {
  warn_of_lanes(w, c, mask);
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const Operands o = take_operands(w, c, lane);
    const MmaInstruction& in = o.instruction;
    const int ctas = (c.variant & kPair) ? 2 : 1;
    check_addresses(w, c, lane, o);
    if (!(c.variant & kTensorA))
      check_matrix(w, c, lane, in, "A", o.a, in.transpose_a, in.a, in.m / ctas);
    check_matrix(w, c, lane, in, "B", o.b, in.transpose_b, in.b, in.n / ctas);
    check_collector(w, c, lane, o.a);
    w.launch->issue(std::make_unique<MmaOperation>(w, c, lane, o));
  }
}

MmaForm::Kind kind_of(const Form& form) {
  using Kind = MmaForm::Kind;
  constexpr std::pair<std::string_view, Kind> kKinds[] = {
      {"kind::f16", Kind::f16},           {"kind::tf32", Kind::tf32},
      {"kind::f8f6f4", Kind::f8f6f4},     {"kind::i8", Kind::i8},
      {"kind::mxf8f6f4", Kind::mxf8f6f4}, {"kind::mxf4", Kind::mxf4},
      {"kind::mxf4nvf4", Kind::mxf4nvf4}};
  for (const auto& [name, kind] : kKinds)
    if (form.has(name)) return kind;
  return Kind::f16;
}

}  // namespace

Exec tcgen05_mma(const Form& form, Code& code) {
  const bool pair = form.has("cta_group::2");
  const bool scaled = form.has("block_scale");
  const std::vector<OperandSpec>& specs = form.row->specs;
  u32 variant = static_cast<u32>(kind_of(form)) | (pair ? kPair : 0) | (scaled ? kScaled : 0);
  if (form.has("block16") || form.has("scale_vec::4X")) variant |= kBlock16;
  if (specs[1].kind == OperandSpec::address) variant |= kTensorA;
  if (form.has("collector::a::fill")) variant |= kFill << kCollectorShift;
  if (form.has("collector::a::use")) variant |= kUse << kCollectorShift;
  if (form.has("collector::a::lastuse")) variant |= kLastUse << kCollectorShift;
  if (specs[4].vector) {
    variant |= kMasked;
    if (code.counts[0] != (pair ? 8 : 4)) return nullptr;
  }
  const u32 last = code.src[scaled ? 7 : 5];
  if (last != kNoSlot) {
    if (!(last & kConstant)) return nullptr;  // scale-input-d is an immediate
    variant |= kShrinks;
  }
  code.variant = static_cast<u16>(variant);
  return mma_lanes;
}

}  // namespace jax_fp4::sim
