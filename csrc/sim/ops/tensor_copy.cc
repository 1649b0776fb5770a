// Tensor copies (PTX ISA 9.7.9.25.5): boxes of a tensor map between global and shared memory.
#include <algorithm>

#include "sim/coverage.h"
#include "sim/machine/tensor_box.h"
#include "sim/ops/atomic.h"
#include "sim/ops/bulk.h"
#include "sim/ops/lanes.h"

namespace jax_fp4::sim {
namespace {

// Code::variant; the AtomicOp of a reduction from kOpShift on
constexpr u16 kPair = 1, kMulticast = 2, kRows4 = 4, kStores = 8, kReduces = 16;
constexpr int kOpShift = 8;

// Of a box in shared memory: CUDA programming guide, "Tensor Memory Access".
constexpr u32 kBoxAlign = 128;

// The elements that an operation reduces (PTX ISA 9.7.9.25.5.3); none where it does not exist.
Type reduced_type(u32 data_type, AtomicOp op) {
  const auto one_of = [&](std::initializer_list<u32> types) {
    return std::find(types.begin(), types.end(), data_type) != types.end();
  };
  const bool halves = one_of({kTensorFloat16, kTensorBfloat16});
  const bool integers = one_of({kTensorUint32, kTensorInt32, kTensorUint64});
  const bool signed_long = data_type == kTensorInt64;
  bool exists = false;
  switch (op) {
    case AtomicOp::add: exists = integers || halves || data_type == kTensorFloat32; break;
    case AtomicOp::min:
    case AtomicOp::max: exists = integers || signed_long || halves; break;
    case AtomicOp::inc:
    case AtomicOp::dec: exists = data_type == kTensorUint32; break;
    default: exists = integers || signed_long;
  }
  if (!exists) return Type::none;
  switch (data_type) {
    case kTensorUint32: return Type::u32;
    case kTensorInt32: return Type::s32;
    case kTensorUint64: return Type::u64;
    case kTensorInt64: return Type::s64;
    case kTensorFloat16: return Type::f16;
    case kTensorBfloat16: return Type::bf16;
    default: return Type::f32;
  }
}

// Why an instruction cannot use a tensor map; empty if it can.
std::string misfit(const TensorMap& map, const Actor& actor) {
  const Code& c = actor.code;
  if (std::string broken = check(map); !broken.empty()) return "is not valid: " + broken;
  const u32 rank = c.variant & kRows4 ? 2 : c.counts[0];
  if (map.rank != rank) {
    return "has " + std::to_string(map.rank) + " dimensions, and the instruction " +
           std::to_string(rank);
  }
  if (map.interleave != kInterleaveNone)
    return "has an interleaved layout, which is not modelled; use interleave NONE";
  if (map.data_type == kTensorFloat32Ftz || map.data_type == kTensorTfloat32 ||
      map.data_type == kTensorTfloat32Ftz)
    return "has a type that copies round, which is not modelled; use FLOAT32";
  const u32 span = swizzle_span(map.swizzle), row = inner_shared_bytes(map);
  if (span != 0 && row != span) {
    return "has rows of " + std::to_string(row) + " bytes and a swizzle of " +
           std::to_string(span) + "; where shorter rows lie is not documented";
  }
  if ((c.variant & kRows4) && map.box[1] != 1) {
    return "has boxes of " + std::to_string(map.box[1]) +
           " rows; .tile::gather4 and .tile::scatter4 take boxes of one";
  }
  // The rest: PTX ISA 9.7.9.25.5.1.
  if (c.variant & kStores) {
    if (map.data_type == kTensor16U4Align16B) return "has type 16U4_ALIGN16B, for loads only";
    if (map.swizzle == kSwizzle128BAtom32BFlip8B)
      return "has swizzle 128B_ATOM_32B_FLIP_8B, for loads only";
    const AtomicOp op = static_cast<AtomicOp>(c.variant >> kOpShift);
    if ((c.variant & kReduces) && reduced_type(map.data_type, op) == Type::none)
      return "has elements that this reduction does not take";
  } else if (c.space == Space::shared_cluster &&
             actor.warp.launch->program->module->target.starts_with("sm_12")) {
    if (element_bits(map.data_type) < 8)
      return "has elements of less than a byte, which sm_12x loads to .shared::cta only";
    if (map.swizzle >= kSwizzle128BAtom32B)
      return "has a swizzle with larger atoms, which sm_12x loads to .shared::cta only";
  }
  return "";
}

// The bytes of a tensor map at a generic address.
std::array<u8, kTensorMapBytes> bytes_of_map(const Actor& actor, u64 address) {
  require_aligned(actor, "a tensor map", address, kTensorMapAlign);
  std::array<u8, kTensorMapBytes> bytes;
  for (u32 at = 0; at < kTensorMapBytes; at += kTensorMapAlign) {
    const u8* part = access(actor, Space::generic, address + at, kTensorMapAlign, AccessKind::read);
    std::memcpy(bytes.data() + at, part, kTensorMapAlign);
  }
  return bytes;
}

TensorMap read_map(const Actor& actor, u64 address) {
  const std::optional<TensorMap> map = decode(bytes_of_map(actor, address).data());
  if (!map)
    actor.fault(FaultKind::argument, "these 128 bytes are no tensor map that was encoded here");
  if (const std::string wrong = misfit(*map, actor); !wrong.empty())
    actor.fault(FaultKind::argument, "the tensor map " + wrong);
  record_tensor_map(*map);
  return *map;
}

TensorPlace read_place(const Actor& actor, const TensorMap& map) {
  const Code& c = actor.code;
  TensorPlace place;
  place.rows4 = c.variant & kRows4;
  const u32* slots = actor.warp.launch->program->slots.data() + c.vectors[0];
  for (u32 d = 0; d < c.counts[0]; ++d)
    place.coordinates[d] = static_cast<i32>(actor.warp.in(slots[d])[actor.lane]);
  const i32 first = place.coordinates[0];
  // 128: PTX ISA 9.7.9.25.5.1; 2: elements of 4 bits start at a byte.
  const i32 unit = is_padded(map.data_type) ? 128 : element_bits(map.data_type) == 4 ? 2 : 1;
  if (first % unit != 0) {
    actor.fault(FaultKind::argument, "the first coordinate is " + std::to_string(first) +
                                         "; for this type it is a multiple of " +
                                         std::to_string(unit));
  }
  for (u32 d = 0; (c.variant & kStores) && d < c.counts[0]; ++d) {
    if (place.coordinates[d] < 0) {
      actor.fault(FaultKind::argument, "coordinate " + std::to_string(d) + " of a store is " +
                                           std::to_string(place.coordinates[d]) +
                                           "; it must not be negative");
    }
  }
  return place;
}

// The rows of a box that are inside the tensor.
std::vector<AsyncWork::Range> ranges_of(const TensorBox& box) {
  std::vector<AsyncWork::Range> ranges(box.rows);
  for (u32 n = 0; n < box.rows; ++n) {
    const BoxRow row = box.row(n);
    ranges[n] = {row.global, row.bytes};
  }
  return ranges;
}

// ---- Loads

class TensorLoad final : public BulkLoad {
 public:
  TensorLoad(const Actor& actor, const TensorMap& map, const TensorPlace& place, u64 destination,
             u64 barrier)
      : BulkLoad(actor, destination, barrier, TensorBox(map, place).copied_bytes()),
        map_(map),
        box_(map_, place) {
    if (moves_data()) forget(*warp, Space::shared_cluster, destination, box_.shared_bytes());
  }

 private:
  std::vector<AsyncWork::Range> ranges() const override { return ranges_of(box_); }

  void copy() override {
    u8* base = access(Space::shared_cluster, destination_, box_.shared_bytes(), AccessKind::write);
    std::vector<u8> packed(box_.row_bytes);
    for (u32 n = 0; n < box_.rows; ++n) {
      const BoxRow row = box_.row(n);
      if (row.bytes < box_.row_bytes) box_.fill(packed.data(), box_.row_bytes);
      if (row.bytes > 0) {
        std::memcpy(packed.data() + row.lead,
                    access(Space::global, row.global, row.bytes, AccessKind::read), row.bytes);
      }
      box_.scatter(n, 0, box_.row_bytes, packed.data(), base, destination_);
    }
    if (!is_padded(map_.data_type)) return;
    // The gaps were not written.
    forget(*warp, Space::shared_cluster, destination_, box_.shared_bytes());
    u8* written = warp->cta->cluster->ctas[rank_of(destination_)]->shared_written.data() +
                  (destination_ & kSharedOffsetMask) - kSharedReserved;
    for (u32 n = 0; n < box_.rows; ++n) {
      box_.each_piece(n, 0, box_.row_bytes, destination_,
                      [&](u32 offset, u32, u32 bytes) { std::memset(written + offset, 1, bytes); });
    }
  }

  const TensorMap map_;
  const TensorBox box_;
};

void load_lanes(Warp& w, const Code& c, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const Actor actor{w, c, lane};
    const u64 destination = address_of(w, c, lane, c.src[0], 0);
    const u64 barrier = address_of(w, c, lane, c.src[2], 2);
    const TensorMap map = read_map(actor, address_of(w, c, lane, c.src[1], 1));
    const TensorPlace place = read_place(actor, map);
    require_aligned(actor, "the destination", destination, kBoxAlign);
    require_aligned(actor, "the mbarrier", barrier, 8);
    if (c.space == Space::shared && rank_of(destination) != w.cta->rank)
      actor.fault(FaultKind::argument, "a .shared::cta destination is in memory of another CTA");
    const bool pair = c.variant & kPair;
    u32 ctas = 1u << rank_of(destination);
    if (c.variant & kMulticast) {
      ctas = check_cta_mask(actor, w.in(c.src[3])[lane]);
    } else {
      if ((rank_of(destination) ^ rank_of(barrier)) > (pair ? 1u : 0u)) {
        actor.fault(FaultKind::argument,
                    "the mbarrier is in CTA " + std::to_string(rank_of(barrier)) +
                        " and the destination in CTA " + std::to_string(rank_of(destination)) +
                        (pair ? ": not of one pair" : ": only .cta_group::2 signals another CTA"));
      }
    }
    for (bool first = true; ctas != 0; ctas &= ctas - 1, first = false) {
      const u32 rank = static_cast<u32>(std::countr_zero(ctas));
      // Of the destination's pair the CTA with the parity of the barrier's.
      const u32 signalled = pair ? (rank & ~1u) | (rank_of(barrier) & 1) : rank;
      auto load = std::make_unique<TensorLoad>(actor, map, place, in_cta(destination, rank),
                                               in_cta(barrier, signalled));
      load->repeated = !first;
      w.launch->issue(std::move(load));
    }
  }
}

// ---- Stores and reductions

class TensorStore final : public BulkStore {
 public:
  TensorStore(const Actor& actor, const TensorMap& map, const TensorPlace& place, u64 source)
      : BulkStore(actor, source), map_(map), box_(map_, place) {
    if ((code->variant & kReduces) || !moves_data()) return;
    for (u32 n = 0; n < box_.rows; ++n) {
      const BoxRow row = box_.row(n);
      if (row.bytes > 0) forget(*warp, Space::global, row.global, row.bytes);
    }
  }

 private:
  std::vector<AsyncWork::Range> ranges() const override { return ranges_of(box_); }

  void read() override {
    packed_.resize(box_.copied_bytes());
    bool whole = !is_padded(map_.data_type);
    for (u32 n = 0; n < box_.rows; ++n) whole &= box_.row(n).bytes == box_.row_bytes;
    const u8* base =
        whole ? access(Space::shared, source_, box_.shared_bytes(), AccessKind::read) : nullptr;
    for (u32 n = 0; n < box_.rows; ++n) {
      u8* packed = packed_.data() + std::size_t{n} * box_.row_bytes;
      if (whole) {
        box_.gather(n, 0, box_.row_bytes, packed, base, source_);
        continue;
      }
      // Only what is inside the tensor is looked at.
      const BoxRow row = box_.row(n);
      box_.each_piece(
          n, row.lead, row.lead + row.bytes, source_, [&](u32 offset, u32 at, u32 bytes) {
            const u8* from = access(Space::shared, source_ + offset, bytes, AccessKind::read);
            std::memcpy(packed + at, from, bytes);
          });
    }
  }

  void write() override {
    const bool reduces = code->variant & kReduces;
    const AtomicOp op = static_cast<AtomicOp>(code->variant >> kOpShift);
    for (u32 n = 0; n < box_.rows; ++n) {
      const BoxRow row = box_.row(n);
      if (row.bytes == 0) continue;
      const u8* from = packed_.data() + std::size_t{n} * box_.row_bytes + row.lead;
      u8* to = access(Space::global, row.global, row.bytes,
                      reduces ? AccessKind::atomic : AccessKind::write);
      if (reduces) {
        reduce_elements(op, reduced_type(map_.data_type, op), to, from, row.bytes);
      } else {
        std::memcpy(to, from, row.bytes);
      }
    }
  }

  const TensorMap map_;
  const TensorBox box_;
  std::vector<u8> packed_;
};

void store_lanes(Warp& w, const Code& c, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const Actor actor{w, c, lane};
    const TensorMap map = read_map(actor, address_of(w, c, lane, c.src[0], 0));
    const TensorPlace place = read_place(actor, map);
    const u64 source = address_of(w, c, lane, c.src[1], 1);
    require_aligned(actor, "the source", source, kBoxAlign);
    w.launch->issue(std::make_unique<TensorStore>(actor, map, place, source));
  }
}

// A hint; what it names must be there all the same.
void prefetch_lanes(Warp& w, const Code& c, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const Actor actor{w, c, lane};
    read_place(actor, read_map(actor, address_of(w, c, lane, c.src[0], 0)));
  }
}

void prefetch_map_lanes(Warp& w, const Code& c, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    u64 address = address_of(w, c, lane, c.src[0], 0);
    if (c.space == Space::param) address += kParamWindow;
    if (c.space == Space::constant) address += kConstantWindow;
    bytes_of_map({w, c, lane}, address);
  }
}

// Whether the cache policy is given where the modifier asks for it.
bool hint_fits(const Form& form, const Code& code, int source) {
  return form.has("L2::cache_hint") == (code.src[source] != kNoSlot);
}

// Whether the coordinates are as many as `.2d` says.
bool rank_fits(const Form& form, const Code& code) {
  constexpr std::string_view kDimensions[] = {"1d", "2d", "3d", "4d", "5d"};
  return code.variant & kRows4 ? form.has("2d") && code.counts[0] == 5
                               : form.has(kDimensions[code.counts[0] - 1]);
}

}  // namespace

Exec cp_tensor_load(const Form& form, Code& code) {
  code.space = form.has("shared::cluster") ? Space::shared_cluster : Space::shared;
  code.variant = static_cast<u16>((form.has("cta_group::2") ? kPair : 0) |
                                  (form.has("multicast::cluster") ? kMulticast : 0) |
                                  (form.has("tile::gather4") ? kRows4 : 0));
  const bool fits =
      rank_fits(form, code) && hint_fits(form, code, code.variant & kMulticast ? 4 : 3);
  return fits ? load_lanes : nullptr;
}
Exec cp_tensor_store(const Form& form, Code& code) {
  code.variant = kStores | (form.has("tile::scatter4") ? kRows4 : 0);
  return rank_fits(form, code) && hint_fits(form, code, 2) ? store_lanes : nullptr;
}
Exec cp_tensor_reduce(const Form& form, Code& code) {
  code.variant =
      static_cast<u16>(kStores | kReduces | static_cast<u16>(atomic_op_of(form)) << kOpShift);
  return rank_fits(form, code) && hint_fits(form, code, 2) ? store_lanes : nullptr;
}
Exec cp_tensor_prefetch(const Form& form, Code& code) {
  code.variant = form.has("tile::gather4") ? kRows4 : 0;
  return rank_fits(form, code) && hint_fits(form, code, 1) ? prefetch_lanes : nullptr;
}
Exec prefetch_tensormap(const Form& form, Code& code) {
  code.space = form.has("param")   ? Space::param
               : form.has("const") ? Space::constant
                                   : Space::generic;
  return prefetch_map_lanes;
}

}  // namespace jax_fp4::sim
